"""Rows, from which outputs move when one input element does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.errors import ShapeError
from normkit.identification import coupling
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import undisturbed


def rows(norm, shape):
    with undisturbed():
        return coupling.rows_of(Specimen(norm), shape, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("norm", "shape", "choices", "row"),
    [
        (nn.LayerNorm(6), (2, 6), [((-1,), 1)], (1,)),
        (nn.LayerNorm(6), (2, 3, 4, 6), [((-1,), 1)], (3,)),
        (nn.LayerNorm(6), (2, 3, 6), [((-1,), 1), ("all_but_batch", 3)], (2,)),
        (nn.LayerNorm((4, 6)), (2, 4, 6), [((-2, -1), 1), ("all_but_batch", 1)], (1, 2)),
        (nn.LayerNorm((4, 6)), (2, 3, 4, 6), [((-2, -1), 1), ("all_but_batch", 3)], (2, 3)),
        (nn.GroupNorm(1, 4), (2, 4, 3, 5), [((-3, -2, -1), 1), ("all_but_batch", 1)], (1, 2, 3)),
        (nn.GroupNorm(2, 4), (2, 4, 3, 5), [("all_but_batch", 2)], (1, 2, 3)),
        (nn.GroupNorm(2, 4), (2, 4, 5), [("all_but_batch", 2)], (1, 2)),
        (nn.GroupNorm(2, 6), (2, 6), [((-1,), 2)], (1,)),
        (nn.InstanceNorm2d(4), (2, 4, 3, 5), [((-2, -1), 1), ("all_but_batch", 4)], (2, 3)),
        (lambda x: F.normalize(x, dim=1), (2, 4, 3, 5), [((1,), 1)], (1,)),
        (lambda x: F.layer_norm(x.mT, (3,)).mT, (2, 3, 6), [((1,), 1)], (1,)),
        (lambda x: F.rms_norm(x.unflatten(-1, (3, 4)), (4,)).flatten(-2), (2, 5, 12), [((-1,), 3)], (2,)),
    ],
)
def test_rows(norm, shape, choices, row):
    found = rows(norm, shape)
    assert list(found.choices) == choices
    assert found.row == row
    assert (found.axes, found.groups) == choices[0]


@pytest.mark.parametrize(
    ("function", "shape", "verdict", "reason"),
    [
        (torch.tanh, (2, 6), "not a norm", "its own input alone"),
        (torch.zeros_like, (2, 6), "not a norm", "its own input alone"),
        # The statistics of all but the first, and of what follows.
        (lambda x: x / x[:, 1:].norm(dim=-1, keepdim=True), (2, 6), "norm", "moves its own output alone"),
        (lambda x: x / x.square().flip(-1).cumsum(-1).flip(-1).sqrt(), (2, 6), "norm", "moves its own output alone"),
        (lambda x: x / x[-1:].norm(), (2, 6), "batch", "changing one sample moves the others"),
        (lambda x: (x - x.mean(0)) / x.std(0), (2, 3, 6), "batch", "changing one sample moves the others"),
        (lambda x: F.rms_norm(x.unflatten(-1, (4, 3)).mT, (4,)).mT.flatten(-2), (2, 12), "norm", "adjacent"),
        (lambda x: x / x.norm(dim=(1, 3), keepdim=True), (2, 3, 4, 5), "norm", "no spec describes such rows"),
    ],
)
def test_what_is_no_row_of_a_spec(function, shape, verdict, reason):
    with pytest.raises(UnrecognisedError, match=reason) as refusal:
        rows(function, shape)
    assert refusal.value.verdict == verdict


def test_a_row_without_a_batch_asks_for_one():
    with pytest.raises(ShapeError, match=r"a batch axis in front of the row, got the row itself, \(4, 6\)"):
        rows(nn.LayerNorm((4, 6)), (4, 6))


@pytest.mark.parametrize(
    ("norm", "shape", "reach"),
    [
        (nn.LayerNorm(6), (2, 3, 6), (1, 1, 6)),
        (nn.BatchNorm2d(3).train(), (2, 3, 4, 5), (1, 1, 1, 1)),
        (lambda x: x - x.mean(0), (2, 6), (2, 1)),
        (lambda x: x.cumsum(1), (2, 4, 6), (1, 4, 1)),
        (torch.zeros_like, (2, 6), None),
    ],
)
def test_how_far_one_element_reaches(norm, shape, reach):
    with undisturbed():
        assert coupling.reach(Specimen(norm), shape, torch.Generator().manual_seed(0)) == reach
