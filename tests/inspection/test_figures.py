import dataclasses
import math

import pytest
from matplotlib.figure import Figure

from normkit import specs
from normkit.errors import InputError
from normkit.inspection.figures import (
    attention_entropy,
    attention_logits,
    drawings,
    ellipsoid_depth,
    gain_spectrum,
    input_scale,
    mean_direction,
)
from normkit.show import theme

FIGURES = (input_scale, mean_direction, gain_spectrum, ellipsoid_depth, attention_logits, attention_entropy)


def axes_of(drawing):
    return drawing.figure.axes[0]


def labels(drawing):
    legend = axes_of(drawing).get_legend()
    return [text.get_text() for text in legend.get_texts()]


def line(drawing, label):
    return next(line for line in axes_of(drawing).get_lines() if line.get_label() == label)


@pytest.mark.slow
def test_each_figure_says_what_it_shows_and_has_units_on_its_axes(healthy):
    made = drawings(healthy)
    assert [drawing.name for drawing in made] == [
        "input-scale", "mean-direction", "gain-spectrum", "ellipsoid-depth", "attention-logits", "attention-entropy",
    ]  # fmt: skip
    for drawing in made:
        assert axes_of(drawing).get_xlabel().startswith("block (")
        assert axes_of(drawing).get_ylabel()
        assert drawing.title
        assert drawing.caption.endswith(".")
        assert drawing.description.endswith(".")
        assert labels(drawing)


def test_input_scale_draws_the_measured_medians(healthy):
    drawing = input_scale(healthy)
    medians = [site.input.rms_median for site in healthy.sites]
    assert line(drawing, "before a branch").get_ydata() == pytest.approx(medians[:-1])
    assert line(drawing, "final norm").get_ydata() == pytest.approx(medians[-1:])
    stream = [block.stream_in.rms_median for block in healthy.blocks] + [healthy.blocks[-1].stream_out.rms_median]
    assert line(drawing, "residual stream").get_ydata() == pytest.approx(stream)
    assert "0.120 at the first norm, 0.569 at the last" in drawing.description


def test_lines_end_where_a_stack_ends(healthy):
    """The residual stream of an encoder was joined with that of the decoder, and the two final norms, too."""
    ends = {2: "encoder.{}", 6: "decoder.{}"}
    renamed = tuple(
        dataclasses.replace(block, path=next(path.format(i) for end, path in ends.items() if i < end))
        for i, block in enumerate(healthy.blocks)
    )
    joined = axes_of(input_scale(dataclasses.replace(healthy, blocks=renamed))).get_lines()
    stream = next(each for each in joined if each.get_label() == "residual stream").get_ydata()
    assert [place for place, value in enumerate(stream) if math.isnan(value)] == [3]
    assert stream[2] == healthy.blocks[1].stream_out.rms_median
    assert stream[4] == healthy.blocks[2].stream_in.rms_median
    branches = joined[1].get_ydata()
    assert [place for place, value in enumerate(branches) if math.isnan(value)] == [4]
    inspection = dataclasses.replace(healthy, blocks=renamed)
    for drawing, label in (
        (attention_logits(inspection), "largest sampled"),
        (attention_entropy(inspection), "mean over heads"),
    ):
        assert [place for place, value in enumerate(line(drawing, label).get_ydata()) if math.isnan(value)] == [2]
        ax = axes_of(drawing)
        assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "0", "1", "2", "3"]
        assert [text.get_text() for text in ax.texts if text.get_text() in ("encoder", "decoder")] == [
            "encoder",
            "decoder",
        ]
    assert mean_direction(inspection).description.endswith("in block 0 of encoder.")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["h.0", "h.1"], []),
        (["a.vision.encoder.layers.0", "a.text.layers.0"], ["vision", "text"]),
        (["m.stages.0.layers.1", "m.stages.1.layers.1"], ["stages.0", "stages.1"]),
        (["down.0.attn.1.parts.0", "middle.parts.0"], ["down.0", "middle"]),
        (["layers.0", "layers.0.inner.0"], ["layers", "layers.0"]),
    ],
)
def test_stacks_are_named_by_the_words_that_tell_them_apart(healthy, paths, names):
    found = [
        dataclasses.replace(block, path=path, index=index)
        for index, (path, block) in enumerate(zip(paths, healthy.blocks, strict=False))
    ]
    assert dataclasses.replace(healthy, blocks=tuple(found)).stack_names() == names


def test_a_norm_without_a_role_in_a_block_that_is_placed_is_in_a_branch(healthy):
    unknown = tuple(dataclasses.replace(site, role="unknown") for site in healthy.sites)
    found = dataclasses.replace(healthy, sites=unknown)
    assert {"in a branch", "other norms"} <= {*labels(input_scale(found))}


def test_eps_is_drawn_where_rows_come_near_it_only(healthy):
    assert [text.get_text() for text in axes_of(input_scale(healthy)).texts] == ["eps"]
    tiny = tuple(dataclasses.replace(site, spec=specs.BERT) for site in healthy.sites)
    far = input_scale(dataclasses.replace(healthy, sites=tiny))
    assert list(axes_of(far).texts) == []
    assert far.description.endswith("eps acts at 1e-6, out of reach below.")


def test_mean_direction_tells_what_is_removed_from_what_is_kept(healthy):
    assert labels(mean_direction(healthy)) == ["1/n: no preferred direction", "removed by centring"]
    mixed = (dataclasses.replace(healthy.sites[0], spec=specs.LLAMA), *healthy.sites[1:])
    drawing = mean_direction(dataclasses.replace(healthy, sites=mixed))
    assert "kept: no centring" in labels(drawing)
    heights = [bar.get_height() for container in axes_of(drawing).containers for bar in container]
    assert sorted(heights) == pytest.approx(sorted(100 * site.input.mean_energy for site in healthy.sites))
    assert drawing.description == "The share is 0.30 to 2.0 %, largest in block 0."


def test_recurring_outliers_are_marked_at_their_value(healthy):
    drawing = gain_spectrum(healthy)
    marks = line(drawing, "feature 11")
    assert list(marks.get_xdata()) == [4, 6, 8, 10]
    assert marks.get_ydata() == pytest.approx([1.94, 1.96, 1.98, 2.0])
    assert drawing.description.endswith("Outliers recur at feature 11.")


@pytest.mark.slow
def test_gains_over_decades_of_either_sign_stand_on_a_log_axis_around_zero(healthy):
    # Seen on Gemma 3: entries from -132 to 1,660 on a linear axis hid the medians near 1 of blocks 0 to 9.
    def with_gain(quantiles):
        sites = [dataclasses.replace(s, gain=dataclasses.replace(s.gain, outliers=())) for s in healthy.sites]
        sites[3] = dataclasses.replace(sites[3], gain=dataclasses.replace(sites[3].gain, quantiles=quantiles))
        return axes_of(gain_spectrum(dataclasses.replace(healthy, sites=tuple(sites), recurring_outliers=())))

    ax = with_gain((-132.0, 0.2, 1.0, 337.0, 500.0, 600.0, 1660.0))
    assert ax.get_yscale() == "symlog"
    assert {0.0, 1.0, 100.0, -100.0} <= set(ax.get_yticks())
    bottom, top = ax.transData.transform([(0, 0.5), (0, 1.5)])[:, 1]
    assert top - bottom > 0.03 * ax.bbox.height
    assert with_gain((0.2, 0.5, 0.9, 1.0, 1.1, 1.5, 1660.0)).get_yscale() == "log"
    assert with_gain((-1.0, 0.5, 0.9, 1.0, 1.1, 1.5, 2.0)).get_yscale() == "linear"


@pytest.mark.slow
def test_a_norm_without_gain_leaves_a_gap(healthy):
    sites = (dataclasses.replace(healthy.sites[0], gain=None), *healthy.sites[1:])
    assert gain_spectrum(dataclasses.replace(healthy, sites=sites)).svg()
    bare = tuple(dataclasses.replace(site, gain=None) for site in healthy.sites)
    with pytest.raises(InputError, match="this inspection has none"):
        gain_spectrum(dataclasses.replace(healthy, sites=bare))
    assert "gain-spectrum" not in [drawing.name for drawing in drawings(dataclasses.replace(healthy, sites=bare))]


def test_warning_lines_stand_at_the_heights_they_name(faulty):
    drawing = attention_logits(faulty)
    assert [text.get_text() for text in axes_of(drawing).texts] == ["100", "1,000"]
    flat = [line.get_ydata()[0] for line in axes_of(drawing).get_lines() if set(line.get_xdata()) == {0, 1}]
    assert flat == [100.0, 1000.0]
    assert line(drawing, "bound: no logit exceeds it").get_ydata()[-1] == 402.0


def test_a_model_with_nothing_to_draw_has_no_figures(empty):
    assert drawings(empty) == ()
    for draw in FIGURES:
        with pytest.raises(InputError, match="this inspection has none"):
            draw(empty)


def test_figures_draw_into_axes_that_are_given(healthy):
    with theme.style():
        left, right = Figure(figsize=(12, 4), layout="constrained").subplots(1, 2)
    assert input_scale(healthy, left).figure is right.figure
    assert mean_direction(healthy, right).figure is left.figure
    assert left.get_ylabel() == "rms of a row (5 %, median, 95 %)"


def broken(site):
    """Every statistic that can be is not finite or zero, as after an overflow."""
    worst = dataclasses.replace(
        site.input, rms_quantiles=(0.0, math.nan, math.inf), mean_energy=math.nan, angle_to_ones=math.nan
    )
    gain = dataclasses.replace(site.gain, quantiles=(math.nan,) * 7)
    return dataclasses.replace(site, input=worst, gain=gain)


@pytest.mark.slow
def test_numbers_that_are_not_finite_leave_gaps(healthy):
    attention = dataclasses.replace(
        healthy.attentions[0], bound=math.inf, sampled_max=math.nan, entropy=math.nan, entropy_min=math.nan
    )
    first, *others = healthy.sites[:5]
    half = dataclasses.replace(healthy, sites=(broken(first), *others), attentions=(attention,))
    whole = dataclasses.replace(half, sites=tuple(map(broken, half.sites)))
    for inspection in (half, whole):
        for drawing in drawings(inspection):
            assert "nan" not in drawing.svg().lower()


@pytest.mark.slow
def test_an_svg_of_twelve_layers_weighs_at_most_40_kb_and_has_the_same_bytes_again(twelve):
    first, *others = drawings(twelve)
    text = first.svg()
    assert input_scale(twelve).svg() == text
    sizes = {drawing.name: len(drawing.svg().encode()) for drawing in others} | {first.name: len(text.encode())}
    assert len(sizes) == 6
    assert max(sizes.values()) <= 40_000, sizes


@pytest.mark.slow
def test_a_hundred_layers_stay_within_the_figure(long):
    for drawing in drawings(long):
        drawing.figure.draw_without_rendering()
        width = drawing.figure.bbox.width
        box = axes_of(drawing).get_tightbbox()
        assert box.x0 >= 0
        assert box.x1 <= width
        assert axes_of(drawing).get_position().width > 0.8


def with_axes(inspection, *axes):
    """The inspection with these semi-axes in turn at its sites."""
    sites = [
        dataclasses.replace(site, geometry=dataclasses.replace(site.geometry, semi_axes=axes[place % len(axes)]))
        for place, site in enumerate(inspection.sites)
    ]
    return dataclasses.replace(inspection, sites=tuple(sites))


@pytest.mark.slow
def test_the_marks_are_the_semi_axes_and_sites_without_them_leave_a_gap(healthy):
    drawing = ellipsoid_depth(healthy)
    low, median, high = zip(*(site.geometry.semi_axes for site in healthy.sites), strict=True)
    for label, values in (("shortest semi-axis", low), ("median", median), ("longest", high)):
        assert line(drawing, label).get_ydata() == pytest.approx(values)
    gaps = ellipsoid_depth(with_axes(healthy, (0.5, 1.0, 2.0), None, (math.nan, 1.0, 2.0), (0.0, 0.0, 0.0)))
    assert list(line(gaps, "median").get_xdata()) == list(range(0, len(healthy.sites), 4))
    assert ellipsoid_depth(with_axes(healthy, (0.1, 1.0, 2.0), (0.5, 1.5, 4.0))).description == (
        "Median semi-axes run over 1.00 to 1.50; the longest axis of one norm over its shortest is at most 20.0."
    )
    bare = dataclasses.replace(healthy, sites=tuple(dataclasses.replace(s, geometry=None) for s in healthy.sites))
    for none in (with_axes(healthy, None), bare):
        assert "ellipsoid-depth" not in [drawing.name for drawing in drawings(none)]
        with pytest.raises(InputError, match="this inspection has none"):
            ellipsoid_depth(none)
