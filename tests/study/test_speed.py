import math

import pytest

from normkit.study.speed import descent, steps_to


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0] * 10, 10),
        ([2.0] * 9, None),
        ([2.0] * 10 + [1.0] * 10, 20),
        ([2.0] * 10 + [0.0] * 10, 15),
        ([2.0] * 20 + [0.0] + [2.0] * 20, None),
        ([1.0] * 9, None),
        ([None] + [0.0] * 10, 11),
        ([], None),
    ],
)
def test_the_first_ten_steps_whose_mean_is_low_enough_end_there(losses, expected):
    assert steps_to(losses, 1.0) == expected


def test_a_curve_is_the_means_of_blocks_of_steps():
    ends, means = descent([4.0, 2.0, 1.0, 3.0], steps=4, places=2)
    assert ends == [2.0, 4.0]
    assert means == [3.0, 2.0]
    assert len(descent([1.0] * 200, steps=200)[0]) == 50
    assert descent([1.0, 2.0, 3.0], steps=3)[0] == [1.0, 2.0, 3.0]


def test_a_curve_is_capped_at_the_first_loss_and_infinite_where_the_run_had_ended():
    assert descent([2.0, 1e9, None], steps=4, places=4)[1] == [2.0, 2.0, 2.0, math.inf]
