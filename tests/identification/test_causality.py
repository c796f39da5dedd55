"""Over time: which positions reach which; a norm over time leaks the future, a cumulative one does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification.behaviour import identify


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
