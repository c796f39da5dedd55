import math
from xml.etree import ElementTree

import pytest

from normkit.report.bars import bars


def drawn(*arguments):
    return ElementTree.fromstring(bars(*arguments))


def edges(rectangle):
    top = float(rectangle.get("y"))
    return top, top + float(rectangle.get("height"))


def test_bars_reach_from_zero_to_their_value():
    band, up, down = drawn([2.0, -1.0], 0.0).findall("rect")
    # 96 units for 3: zero stands at 64.
    assert edges(up) == (0.0, 64.0)
    assert edges(down) == (64.0, 96.0)
    assert edges(band) == (32.0, 96.0)


def test_the_mean_is_drawn_where_it_is_within_the_entries():
    assert drawn([1.0, -1.0], 0.5).find("path[@class='mean']").get("d") == "M0 24.0H160"
    assert drawn([1.0, -1.0], 7.0).find("path[@class='mean']") is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_entries_that_are_not_finite_are_left_out(value):
    assert len(drawn([1.0, value], value).findall("rect")) == 2


def test_no_entries_leave_the_band():
    assert len(drawn([], 0.0).findall("rect")) == 1


def test_each_drawing_fills_its_height_on_its_own_scale():
    # Seen on a trained model: beside a raw entry of 200 the scaled ones were flat.
    for factor in (200.0, 1.0, 0.01):
        _, up, down = drawn([0.5 * factor, -0.25 * factor], 0.0).findall("rect")
        assert (edges(up), edges(down)) == ((0.0, 64.0), (64.0, 96.0))
    band, *_ = drawn([200.0], 0.0).findall("rect")
    assert edges(band) == pytest.approx((95.5, 96.0))
