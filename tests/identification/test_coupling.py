"""Rows, from which outputs move when one input element does; and over time, which positions reach which."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.conventions.rows import CHANNELS_LAST
from normkit.errors import ShapeError
from normkit.identification import coupling
from normkit.identification.behaviour import identify
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
        (lambda x: F.layer_norm(x.mT, (3,)).mT, (2, 3, 6), [((1,), 1), (CHANNELS_LAST, 6)], (1,)),
        (lambda x: F.group_norm(x.mT, 3).mT, (2, 4, 6), [(CHANNELS_LAST, 3)], (1, 2)),
        (lambda x: F.instance_norm(x.movedim(-1, 1)).movedim(1, -1), (2, 3, 5, 4), [(CHANNELS_LAST, 4)], (1, 2)),
        (lambda x: F.rms_norm(x.unflatten(-1, (3, 4)), (4,)).flatten(-2), (2, 5, 12), [((-1,), 3)], (2,)),
    ],
)
def test_rows(norm, shape, choices, row):
    found = rows(norm, shape)
    assert [(choice.axes, choice.groups) for choice in found.choices] == choices
    assert found.row == row


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


def cumulative(x, axes=(1,), time=2):
    """Statistics over the features and all positions up to this one."""
    count = torch.ones_like(x).sum(axes, keepdim=True).cumsum(time)
    mean = x.sum(axes, keepdim=True).cumsum(time) / count
    square = x.square().sum(axes, keepdim=True).cumsum(time) / count
    return (x - mean) / (square - mean.square() + 1e-5).sqrt()


def over_time(x):
    return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("norm", "shape", "time", "has_spec"),
    [
        (nn.LayerNorm(6), (2, 5, 6), {1: "none"}, True),
        (nn.LayerNorm(6), (2, 3, 5, 6), {1: "none", 2: "none"}, True),
        (nn.LayerNorm((5, 6)), (2, 5, 6), {1: "both directions"}, True),
        (lambda x: F.normalize(x, dim=1), (2, 4, 5), {2: "none"}, True),
        (over_time, (2, 5, 6), {2: "none"}, True),
        (nn.GroupNorm(2, 4), (2, 4, 5), {2: "both directions"}, True),
        (cumulative, (2, 4, 5), {2: "causal"}, False),
        (lambda x: cumulative(x, (2,), 1), (2, 5, 4), {1: "causal"}, False),
        (lambda x: cumulative(x.flip(1), (2,), 1).flip(1), (2, 5, 4), {1: "anti-causal"}, False),
        (lambda x: F.layer_norm(x.roll(1, 1) + x, (6,)), (2, 5, 6), {1: "both directions"}, False),
    ],
)
def test_time(norm, shape, time, has_spec):
    passport = identify(norm, shape)
    assert passport.verdict == "norm"
    assert (passport.spec is not None) is has_spec
    assert {each["axis"]: each["coupling"] for each in passport.readings["time"].value} == time


def test_rows_of_two_axes_have_no_time():
    assert "time" not in identify(nn.LayerNorm(6), 6).readings


def test_a_leak_of_the_future_is_said_in_words():
    leaking = identify(nn.LayerNorm((5, 6)), (2, 5, 6)).readings["time"].evidence
    assert "changing the last position moves earlier outputs by" in leaking[0]
    assert "leaks the future" in leaking[0]
    causal = identify(cumulative, (2, 4, 5)).readings["time"].evidence
    assert "the last one no earlier ones" in causal[0]


def test_the_cumulative_norm_of_transformers():
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioCumulativeGroupNorm

    passport = identify(Gemma3nAudioCumulativeGroupNorm(8, (4,)), (2, 6, 4, 8))
    assert (passport.verdict, passport.spec) == ("norm", None)
    assert passport.readings["time"].value[0] == {"axis": 1, "coupling": "causal"}


def test_a_norm_that_wants_a_mask_is_called_with_one():
    def masked(x, mask):
        count = mask.sum(1, keepdim=True)
        square = (x.square() * mask).sum((1, 2), keepdim=True) / (count * x.shape[-1])
        return x / (square + 1e-6).sqrt() * mask

    def call(norm, x):
        return norm(x, torch.ones(len(x), x.shape[1], 1))

    passport = identify(masked, (2, 5, 6), call=call)
    assert passport.spec.axes == (-2, -1)
    assert passport.readings["time"].value == [{"axis": 1, "coupling": "both directions"}]
