"""What a row is: rows come back in their layout, and means are taken out where they should be."""

from __future__ import annotations

import pytest
import torch

from normkit.conventions.rows import CENTRINGS, Rows


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (Rows(), (2, 3, 1, 4)),
        (Rows(groups=2), (2, 3, 2, 2)),
        (Rows((-2, -1)), (2, 1, 12)),
        (Rows((1,)), (2, 4, 1, 3)),
        (Rows("all_but_batch", 3), (2, 3, 4)),
    ],
)
def test_rows_come_back_in_their_layout(rows, shape):
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert rows.split(x).shape == shape
    assert rows.joined(rows.split(x), x).equal(x)


def test_a_parameter_lies_along_the_channels_of_some():
    parameter, x = torch.ones(3), torch.ones(2, 3, 4, 5)
    assert Rows((1,)).parameter_dim == Rows("all_but_batch").parameter_dim == 1
    assert Rows((-2, -1)).parameter_dim == 2
    assert Rows((1,)).aligned(parameter, x).shape == Rows("all_but_batch").aligned(parameter, x).shape == (3, 1, 1)
    assert Rows().aligned(parameter, x) is parameter


@pytest.mark.parametrize("centring", CENTRINGS.values())
def test_the_mean_is_taken_out_where_it_should_be(centring):
    x = torch.tensor([1.0, 2.0, 6.0]) + 1e4
    numerator, deviation = centring.split(x)
    assert (float(numerator.mean()) == 0, float(deviation.mean()) == 0) == (centring.numerator, centring.statistics)
    assert centring.is_half == (centring.numerator != centring.statistics)
    assert centring.is_full == (centring.numerator and centring.statistics)
    assert len({each.words for each in CENTRINGS.values()}) == 4
