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
    band, up, down = drawn([2.0, -1.0], 0.0, -1.0, 2.0).findall("rect")
    # 96 units for 3: zero stands at 64.
    assert edges(up) == (0.0, 64.0)
    assert edges(down) == (64.0, 96.0)
    assert edges(band) == (32.0, 96.0)


def test_the_mean_is_drawn_where_it_is_within_the_entries():
    assert drawn([1.0, 0.0], 0.5, -1.0, 1.0).find("path[@class='mean']").get("d") == "M0 24.0H160"
    assert drawn([1.0, 0.0], 7.0, -1.0, 1.0).find("path[@class='mean']") is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_entries_that_are_not_finite_are_left_out(value):
    assert len(drawn([1.0, value], value, -1.0, 1.0).findall("rect")) == 2


def test_no_entries_leave_the_band():
    assert len(drawn([], 0.0, -1.0, 1.0).findall("rect")) == 1
