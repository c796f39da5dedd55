"""Centring, gain and bias together, and the axes that they settle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import NormSpec
from normkit.identification import structure
from normkit.identification.specimen import Specimen, UnrecognisedError, undisturbed


def recovered(norm, shape, given=None):
    with undisturbed():
        return structure.recover(Specimen(norm), shape, given or shape, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("offset", [0.0, 1.0, 2.0, -0.5])
def test_the_offset_is_the_intercept(offset):
    found = recovered(nk.Norm(NormSpec(weight_offset=offset), 12), (2, 3, 12))
    assert found.spec == NormSpec(weight_offset=offset, eps=0.0)
    assert (found.gain.name, found.bias.name) == ("weight", "bias")
    assert found.length == pytest.approx(1.0, rel=1e-6)
    assert found.doubts == ()


@pytest.mark.parametrize(
    ("norm", "shape", "axes", "groups", "n"),
    [
        (nn.LayerNorm(12), (2, 3, 12), (-1,), 1, 12),
        (nn.LayerNorm((3, 12)), (2, 3, 12), (-2, -1), 1, 36),
        (nn.GroupNorm(1, 3), (2, 3, 12), "all_but_batch", 1, 36),
        (nn.GroupNorm(2, 6), (2, 6, 4), "all_but_batch", 2, 12),
        (nn.InstanceNorm1d(3, affine=True), (2, 3, 12), "all_but_batch", 3, 12),
        (nn.GroupNorm(1, 3, affine=False), (2, 3, 12), (-2, -1), 1, 36),
        (nk.Norm(NormSpec(axes=(1,)), 6), (2, 6, 3, 2), (1,), 1, 6),
        (nk.Norm(NormSpec(axes="all_but_batch", weight_placement="before"), 6), (2, 6, 3, 2), "all_but_batch", 1, 36),
    ],
)
def test_the_parameters_settle_the_axes(norm, shape, axes, groups, n):
    found = recovered(norm, shape)
    assert (found.spec.axes, found.spec.groups, found.n) == (axes, groups, n)


def test_a_row_is_searched_at_its_full_length():
    # The search was on 4 channels; a row of the call has 64.
    found = recovered(lambda x: nn.functional.normalize(x, dim=1), (2, 4, 3, 2), (2, 64, 9, 9))
    assert (found.shape, found.n) == ((2, 64, 3, 2), 64)
    assert found.length == pytest.approx(1 / 8, rel=1e-6)


def test_a_gain_for_each_head():
    class PerHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 12))

        def forward(self, x):
            return self.weight * nn.functional.layer_norm(x, (12,))

    found = recovered(PerHead(), (2, 3, 4, 12))
    assert found.gain.name == "weight"
    assert found.spec == NormSpec(eps=0.0, has_bias=False)


def test_one_number_as_the_gain():
    class ScaleNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.scale * nn.functional.normalize(x, dim=-1)

    found = recovered(ScaleNorm(), (2, 12))
    assert found.gain.name == "scale"
    assert found.length == pytest.approx(12**-0.5, rel=1e-6)


def test_a_function_is_taken_at_its_word():
    plain = recovered(lambda x: nn.functional.layer_norm(x, (12,)), (2, 12))
    assert not plain.spec.has_weight
    assert "a gain of 1 is assumed" in plain.doubts[0]
    weight, bias = torch.linspace(0.5, 2, 12), torch.linspace(-1, 1, 12)
    scaled = recovered(lambda x: nn.functional.layer_norm(x, (12,), weight, bias), (2, 12))
    assert scaled.spec.has_weight
    assert scaled.spec.has_bias
    assert scaled.length is None
    torch.testing.assert_close(scaled.gain.values, weight.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scaled.bias.values, bias.double(), rtol=1e-5, atol=1e-5)
    assert "the length of a normalized row" in scaled.doubts[0]


class Unlike(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))
        self.bias = nn.Parameter(torch.zeros(12))
        self.gain = gain

    def forward(self, x):
        return self.gain(self.weight) * nn.functional.layer_norm(x, (12,)) + self.bias


@pytest.mark.parametrize("gain", [torch.abs, torch.exp, torch.square, lambda weight: weight.clamp_min(0.1)])
def test_a_gain_that_is_no_straight_line_of_its_parameter_is_not_passed_off_as_one(gain):
    with pytest.raises(UnrecognisedError, match="not one parameter each"):
        recovered(Unlike(gain), (2, 12))


def test_a_norm_by_another_mean_is_named():
    with pytest.raises(UnrecognisedError, match="no division by a standard deviation or rms explains its rows"):
        recovered(lambda x: x / x.abs().amax(-1, keepdim=True), (2, 12))
