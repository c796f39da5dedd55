"""Centring, gain and bias together, and the axes that they settle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit import NormSpec
from normkit.conventions.rows import CHANNELS_LAST
from normkit.identification import structure
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import undisturbed


def recovered(norm, shape, given=None):
    with undisturbed():
        return structure.recover(Specimen(norm), shape, given or shape, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("offset", [0.0, 1.0, 2.0, -0.5])
def test_the_offset_is_the_intercept(offset):
    found = recovered(nk.Norm(NormSpec(weight_offset=offset), 12), (2, 3, 12))
    assert found.spec == NormSpec(weight_offset=offset, eps=0.0)
    assert (found.gain.name, found.bias.name) == ("weight", "bias")
    assert found.length == pytest.approx(1.0, rel=1e-6)
    assert all(reading.undecidable is None for reading in found.readings.values())
    assert found.readings["gain"].value["weight_offset"] == offset


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
    assert found.readings["gain"].value["kind"] == "per head"
    assert found.spec == NormSpec(eps=0.0, has_bias=False)


class HeadByHead(nn.Module):
    """A norm for each head, as StableLM has it, or one number for each, along another axis than the features."""

    def __init__(self, numbers):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(12, bias=not numbers) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4)) if numbers else None

    def forward(self, x):
        if self.scale is not None:
            return nn.functional.layer_norm(x, (12,)) * self.scale[None, :, None, None]
        return torch.cat([norm(head) for norm, head in zip(self.norms, x.split(1, dim=1), strict=True)], dim=1)


def test_rows_that_a_shorter_axis_would_hide():
    # On 4 channels, 4 groups are 4 rows; on the 16 of the call each is a block of 4.
    found = recovered(nn.GroupNorm(4, 16, affine=False), (2, 4, 5, 5), (2, 16, 5, 5))
    assert (found.spec.axes, found.spec.groups, found.n) == ("all_but_batch", 4, 100)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_gain_whose_entries_stand_in_several_parameters(numbers):
    found = recovered(HeadByHead(numbers), (2, 4, 3, 12))
    assert found.spec == NormSpec(eps=0.0, has_bias=not numbers)
    assert found.gain.name is None
    assert found.gain.names == (("scale",) if numbers else tuple(f"norms.{head}.weight" for head in range(4)))
    assert found.gain.gathered.index.shape == ((4, 1, 1) if numbers else (4, 1, 12))
    assert found.readings["gain"].value["kind"] == "per head"
    assert found.length == pytest.approx(1.0, rel=1e-6)
    module = HeadByHead(numbers)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5)
    x = torch.randn(2, 4, 3, 12)
    torch.testing.assert_close(nk.identify(module, x.shape)(x), module(x), rtol=1e-5, atol=1e-5)


class OneParameter(nn.Module):
    """A norm of 12 features whose gain and bias are what `parts` takes out of one parameter."""

    def __init__(self, sizes, parts):
        super().__init__()
        self.affine, self.parts = nn.Parameter(torch.rand(sizes) + 0.5), parts

    def forward(self, x):
        weight, bias = self.parts(self.affine)
        return nn.functional.layer_norm(x, (12,)) * weight + bias


@pytest.mark.parametrize(
    ("sizes", "parts", "offset"),
    [
        (24, lambda affine: affine.chunk(2), 0.0),
        ((2, 12), lambda affine: affine, 0.0),
        ((12, 2), lambda affine: affine.unbind(1), 0.0),
        (24, lambda affine: (1.0 + affine[:12], affine[12:]), 1.0),
    ],
)
def test_gain_and_bias_in_one_parameter(sizes, parts, offset):
    module = OneParameter(sizes, parts)
    passport = nk.identify(module, (2, 3, 12))
    assert (passport.spec.has_weight, passport.spec.has_bias, passport.spec.weight_offset) == (True, True, offset)
    assert passport.undecidable == {}
    assert passport.weight_name == passport.bias_name == "affine"
    x = torch.randn(2, 3, 12)
    torch.testing.assert_close(passport(x), module(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1,), ()])
def test_one_number_as_the_gain_and_one_as_the_bias(sizes):
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            # Through two draws of one number a straight line of the other always goes.
            self.shift, self.scale = nn.Parameter(torch.zeros(sizes)), nn.Parameter(torch.ones(sizes))

        def forward(self, x):
            return self.scale * nn.functional.layer_norm(x, (12,)) + self.shift

    found = recovered(Numbers(), (2, 12))
    assert (found.gain.name, found.bias.name, found.spec) == ("scale", "shift", NormSpec(eps=0.0))


@pytest.mark.parametrize(
    ("norm", "shape", "reason"),
    [
        (
            lambda x: nn.functional.layer_norm(x.movedim(1, -1), x.shape[1:2]).movedim(-1, 1),
            (2, 8, 3, 12),
            "its gain or bias lies along the last axis; of rows over axis 1, a spec's lies along axis 1",
        ),
        (
            lambda x: nn.functional.group_norm(x, 4),
            (2, 8, 12),
            "its gain or bias lies along the last axis; of rows over all axes but the first, a spec's lies along "
            "axis 1",
        ),
        (
            lambda x: nn.functional.group_norm(x.movedim(-1, 1), 4).movedim(1, -1),
            (2, 12, 8),
            "its gain or bias lies along another axis than the channels of its rows, the last axis",
        ),
    ],
)
def test_a_gain_along_another_axis_than_a_spec_has_is_called_so(norm, shape, reason):
    class Last(nn.LayerNorm):
        def forward(self, x):
            along = (-1, *(1,) * (x.dim() - 2)) if x.shape[1] == 12 else (-1,)
            return norm(x) * self.weight.reshape(along) + self.bias.reshape(along)

    module = Last(12)
    with pytest.raises(structure.ComputedAffineError) as raised:
        recovered(module, shape)
    assert str(raised.value) == reason
    # Of ones and zeros, what is left has a spec; else the reason is said once.
    assert reason in nk.identify(module, shape).evidence
    nn.init.uniform_(module.weight)
    assert nk.identify(module, shape).evidence[0] == reason


def test_one_number_as_the_gain():
    class ScaleNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.scale * nn.functional.normalize(x, dim=-1)

    found = recovered(ScaleNorm(), (2, 12))
    assert found.gain.name == "scale"
    assert found.readings["gain"].value["kind"] == "scalar"
    assert found.length == pytest.approx(12**-0.5, rel=1e-6)


def test_a_function_is_taken_at_its_word():
    plain = recovered(lambda x: nn.functional.layer_norm(x, (12,)), (2, 12))
    assert not plain.spec.has_weight
    assert "a gain of 1 and none are the same" in plain.readings["gain"].undecidable
    weight, bias = torch.linspace(0.5, 2, 12), torch.linspace(-1, 1, 12)
    scaled = recovered(lambda x: nn.functional.layer_norm(x, (12,), weight, bias), (2, 12))
    assert scaled.spec.has_weight
    assert scaled.spec.has_bias
    assert scaled.length is None
    torch.testing.assert_close(scaled.gain.values, weight.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scaled.bias.values, bias.double(), rtol=1e-5, atol=1e-5)
    assert "the length of a row" in scaled.readings["gain"].undecidable


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
    with pytest.raises(UnrecognisedError, match="not entries of parameters"):
        recovered(Unlike(gain), (2, 12))


@pytest.mark.parametrize("factor", [1.01, 0.5, -1.0])
@pytest.mark.parametrize("spec", [NormSpec(weight_offset=1.0), NormSpec(reduction="sum")])
def test_a_factor_of_gain_and_bias(spec, factor):
    class Scaled(nk.Norm):
        def forward(self, x):
            return factor * super().forward(x)

    with pytest.raises(structure.ComputedAffineError) as raised:
        recovered(Scaled(spec, 12), (2, 3, 12))
    assert raised.value.readings["factor"].value == f"{factor:g}"
    found = nk.identify(Scaled(spec, 12), (2, 3, 12))
    line = f"its output is {factor:g} times what weight and bias make of the row"
    assert found.readings["factor"].evidence == (line,)
    assert "gain" in found.undecidable


def test_no_factor_where_gain_and_bias_are_computed_otherwise():
    class Clamped(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, (12,), self.weight.clamp(0.1, 0.9), 2 * self.bias)

    with pytest.raises(structure.ComputedAffineError) as raised:
        recovered(Clamped(12), (2, 3, 12))
    assert raised.value.readings == {}


class KerasGroupNorm(nn.Module):
    """GroupNormalization(data_format="channels_last") of Keras, in torch; with one channel a group, InstanceNorm."""

    def __init__(self, groups, channels, *, affine=True):
        super().__init__()
        self.groups = groups
        self.gamma = nn.Parameter(torch.ones(channels)) if affine else None
        self.beta = nn.Parameter(torch.zeros(channels)) if affine else None

    def forward(self, x):
        grouped = x.float().reshape(*x.shape[:-1], self.groups, -1)
        axes = (*range(1, x.dim() - 1), -1)
        mean = grouped.mean(axes, keepdim=True)
        variance = grouped.var(axes, correction=0, keepdim=True)
        y = ((grouped - mean) * torch.rsqrt(variance + 1e-3)).reshape(x.shape)
        return (y if self.gamma is None else y * self.gamma + self.beta).to(x.dtype)


SHAPES = [(2, 5, 6, 12), (2, 12, 6, 12), (2, 7, 12), (2, 12, 12), (2, 3, 4, 5, 12)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [3, 12])
@pytest.mark.parametrize("shape", SHAPES)
def test_channels_last_is_found_by_what_it_does(shape, groups, affine):
    module = KerasGroupNorm(groups, 12, affine=affine)
    passport = nk.identify(module, shape)
    assert passport.spec == NormSpec(axes=CHANNELS_LAST, groups=groups, eps=1e-3, has_weight=affine, has_bias=affine)
    assert "rows" not in passport.undecidable
    assert (passport.weight_name, passport.bias_name) == (("gamma", "beta") if affine else (None, None))
    x = torch.randn(shape)
    torch.testing.assert_close(passport(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [3, 12])
def test_channels_first_of_the_same_shape_is_told_apart(groups):
    passport = nk.identify(nn.GroupNorm(groups, 12), (2, 12, 12))
    assert passport.spec == NormSpec(axes="all_but_batch", groups=groups)


def test_one_group_with_a_gain_along_the_last_axis_is_a_row_of_trailing_axes():
    # Both specs are one function: a gain of trailing axes broadcasts on the right.
    module = KerasGroupNorm(1, 12)
    passport = nk.identify(module, (2, 5, 6, 12))
    assert passport.spec == NormSpec(axes=(-3, -2, -1), eps=1e-3)
    x, weight, bias = torch.randn(2, 5, 6, 12), torch.randn(12), torch.randn(12)
    last = passport.spec.replace(axes=CHANNELS_LAST)
    torch.testing.assert_close(nk.normalize(x, last, weight, bias), nk.normalize(x, passport.spec, weight, bias))


def test_a_gain_in_front_of_the_division():
    spec = NormSpec(axes=CHANNELS_LAST, groups=3, weight_placement="before")
    assert nk.identify(nk.Norm(spec, 12), (2, 5, 12)).spec == spec


@pytest.mark.parametrize("shape", [(2, 8, 12), (2, 12, 12)])
def test_without_gain_and_with_three_axes_alone_nothing_tells(shape):
    def norm(x):
        batch, axis, other = x.shape
        return F.layer_norm(x.mT.reshape(batch, other, axis), (axis,)).mT

    passport = nk.identify(norm, shape)
    assert passport.spec.axes == (1,)
    assert passport.readings["rows"].value is None
    assert "without gain or bias" in passport.undecidable["rows"]


def test_without_gain_an_input_of_four_axes_tells():
    assert "rows" not in nk.identify(lambda x: F.normalize(x, dim=1), (2, 8, 12)).undecidable
    passport = nk.identify(KerasGroupNorm(12, 12, affine=False), (2, 8, 12))
    assert passport.spec.axes == CHANNELS_LAST
    assert passport.readings["rows"].evidence[1].startswith("with another axis, changing one element moves 8 x 3")


def test_a_gain_of_more_than_the_channels_is_no_spec():
    class Spatial(KerasGroupNorm):
        def forward(self, x):
            return super().forward(x) * self.scale

    module = Spatial(3, 12, affine=False)
    module.scale = nn.Parameter(torch.rand(5, 12) + 0.5)
    assert nk.identify(module, (2, 5, 12)).spec is None


@pytest.mark.parametrize("part", ["gain", "bias"])
@pytest.mark.parametrize(
    ("read", "count", "seen"),
    [
        (lambda entries: entries[torch.arange(12) % 6], 6, "feature 6 has entry 0 of .*; 6 of its entries are"),
        (lambda entries: torch.cat([entries[:4], entries[4:].flip(0)]), 8, "feature 4 has entry 11 of"),
    ],
)
def test_entries_that_are_read_in_another_order_are_no_plain_parameter(part, read, count, seen):
    class Misread(nn.LayerNorm):
        def forward(self, x):
            weight, bias = (read(self.weight), self.bias) if part == "gain" else (self.weight, read(self.bias))
            return weight * F.layer_norm(x, (12,)) + bias

    with pytest.raises(
        structure.ComputedAffineError, match=f"{count} of 12 features have the {part} of another one: {seen}"
    ):
        recovered(Misread(12), (2, 12))
