"""Fresh matrices have rows of one expected length; training makes them differ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normkit.inspection.matrices import row_scatter

INITIALISERS = (
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    lambda weight: nn.init.sparse_(weight, 0.5),
)


def model(initialise, layers=8):
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    for number, layer in enumerate(made):
        initialise(layer.weight)
        layer.weight.data *= 0.5**number
    return made


@pytest.mark.parametrize("initialise", INITIALISERS)
def test_independent_entries_of_any_distribution_and_scale(initialise):
    # The variance of 64 numbers is off by 18 %, the median of eight such by 8 %.
    assert row_scatter(model(initialise)) == pytest.approx(1.0, abs=0.3)


def test_rows_of_several_lengths():
    made = model(nn.init.normal_)
    for layer in made:
        layer.weight.data *= torch.linspace(0.7, 1.3, 64)[:, None]
    assert row_scatter(made) > 2


def test_rows_of_zeros_and_small_matrices_do_not_count():
    made = model(nn.init.normal_)
    for layer in made:
        layer.weight.data[:8] = 0
    assert row_scatter(made) == pytest.approx(1.0, abs=0.3)
    assert math.isnan(row_scatter(nn.Linear(8, 8)))
