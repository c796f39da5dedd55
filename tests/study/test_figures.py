import math

import pytest

from normkit.study.chart import Bars, Curves, Line, Marks, line, swept_lines
from normkit.study.figures import study_drawing

WORDS = {"name": "chart", "title": "Title", "caption": "Caption.", "description": "What is seen."}


def curves(*lines, panels=None, **choices):
    return Curves(**WORDS, x_label="layers", y_label="norm", panels=panels or (("", lines),), **choices)


def drawn(chart):
    return study_drawing(chart).figure.axes


def test_a_line_goes_through_medians_with_a_band_to_both_ends():
    (ax,) = drawn(curves(line("pre", [1, 2], [[1.0, 5.0], [3.0, 4.0], [2.0, 9.0]])))
    (median,) = ax.get_lines()
    assert list(median.get_ydata()) == [2.0, 5.0]
    band = ax.collections[0].get_paths()[0].vertices
    assert {(1.0, 1.0), (1.0, 3.0), (2.0, 4.0), (2.0, 9.0)} <= {tuple(map(float, place)) for place in band}


def test_a_swept_line_goes_through_one_arm_a_place():
    seeds = [{f"a, rate {rate:g}": {"last": rate * seed} for rate in (1.0, 10.0)} for seed in (1, 2, 3)]
    seeds[0]["a, rate 10"] = {"last": None}
    (found,) = swept_lines(seeds, ["a"], "{}, rate {:g}", "last", (1.0, 10.0))
    assert (found.label, found.x, found.y, found.high) == ("a", (1.0, 10.0), (2.0, 30.0), (3.0, math.inf))


def test_infinity_is_a_cross_and_a_gap():
    (ax,) = drawn(curves(Line(label="none", x=(1, 2), y=(1.0, math.inf)), y_log=True))
    shown, cross = ax.get_lines()
    assert math.isnan(shown.get_ydata()[1])
    assert (list(cross.get_xdata()), cross.get_marker()) == ([2], "x")


def test_panels_share_their_vertical_axis_and_one_legend():
    panels = (("a", (Line(label="pre", x=(1, 2), y=(0.0, 1.0)),)), ("b", (Line(label="post", x=(1, 2), y=(5.0, 9.0)),)))
    figure = study_drawing(curves(panels=panels)).figure
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["pre", "post"]


def test_lines_of_one_colour_differ_in_dash_or_marker():
    lines = [Line(label=str(place), x=(1, 2), y=(1.0, place)) for place in range(1, 9)]
    (ax,) = drawn(curves(*lines))
    looks = {(each.get_color(), each.get_linestyle(), each.get_markerfacecolor()) for each in ax.get_lines()}
    assert len(looks) == 8


def test_a_reference_below_all_curves_is_in_sight_with_its_words():
    (ax,) = drawn(curves(Line(label="loss", x=(1, 2), y=(3.0, 2.0)), reference=(0.5, "floor")))
    assert ax.get_ylim()[0] < 0.5
    assert [text.get_text() for text in ax.texts] == ["floor"]


def test_a_horizontal_log_axis_names_the_places_that_were_measured():
    (ax,) = drawn(curves(Line(label="loss", x=(3, 12, 48), y=(3.0, 2.0, 1.0)), x_log=True))
    assert list(ax.get_xticks()) == [3, 12, 48]


def test_bars_show_each_seed_and_say_what_is_missing():
    (ax,) = drawn(Bars(**WORDS, label="loss", values=(("LayerNorm", (2.0, 2.5, 2.1)), ("none", (1.0, math.inf, 3.0)))))
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["LayerNorm", "none (1 of 3 not finite)"]
    assert sorted(ax.get_lines()[0].get_xdata()) == [2.0, 2.1, 2.5]


def test_marks_are_full_where_it_holds_and_none_where_nothing_is_said():
    cells = (((True, 1e-16), (False, 0.5), (None, 2.0)),)
    (ax,) = drawn(Marks(**WORDS, rows=("scaled",), columns=("LayerNorm", "none", "rest"), cells=cells))
    faces = [mark.get_markerfacecolor() for mark in ax.get_lines() if mark.get_marker() == "o"]
    assert len(faces) == 2
    assert faces[0] != "none" == faces[1]


@pytest.mark.parametrize(
    "chart",
    [
        curves(Line(label="pre", x=(1, 2), y=(1.0, math.nan), low=(1.0, math.nan), high=(2.0, math.nan)), y_log=True),
        curves(Line(label="pre", x=(), y=())),
        Bars(**WORDS, label="loss", values=(("a", (math.nan,)),), log=True),
    ],
)
def test_what_has_no_numbers_is_drawn_all_the_same(chart):
    assert study_drawing(chart).file("svg")


@pytest.mark.slow
def test_the_same_chart_gives_the_same_bytes():
    chart = curves(line("pre", [1, 2], [[1.0, 5.0], [3.0, 4.0]]), line("post", [1, 2], [[1.0, 2.0], [2.0, 4.0]]))
    assert study_drawing(chart).file("svg") == study_drawing(chart).file("svg")
