"""Maps that are no norms are named: by superposition, by their curve, by their limits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification import maps
from normkit.identification.behaviour import identify
from normkit.identification.maps import activation_of
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed


def kind(norm, shape):
    with undisturbed():
        return maps.plain_map(Specimen(norm), shape, torch.Generator().manual_seed(0))


class Scale(nn.Module):
    """A gain and a bias, and nothing else: MobileBERT's NoNorm, a LayerScale."""

    def __init__(self, n):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return x * self.weight + self.bias


class Frozen(nn.Module):
    """A frozen batch norm: all of it in buffers, along axis 1."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("scale", torch.ones(n))
        self.register_buffer("shift", torch.zeros(n))

    def forward(self, x):
        return x * self.scale[:, None, None] + self.shift[:, None, None]


@pytest.mark.parametrize("norm", [nn.Identity(), nn.Dropout(0.5), lambda x: x.clone(), nn.Sequential()])
def test_identity_is_bit_for_bit(norm):
    assert kind(norm, (2, 6)).verdict == "identity"


@pytest.mark.parametrize("norm", [lambda x: x + 1e-6, lambda x: x * 1.0000002, lambda x: x.bfloat16().float()])
def test_what_is_nearly_the_identity_is_not(norm):
    assert kind(norm, (2, 6)).verdict != "identity"


def test_an_affine_map_that_does_nothing_yet_is_no_identity():
    assert kind(Scale(6), (2, 6)).verdict == "affine"
    assert kind(Frozen(3), (2, 3, 4, 4)).verdict == "affine"


@pytest.mark.parametrize(("module", "shape"), [(Scale(6), (2, 6)), (Frozen(3), (2, 3, 4, 4))])
def test_looking_leaves_parameters_and_buffers(module, shape):
    specimen = Specimen(module)
    with undisturbed():
        maps.plain_map(specimen, shape, torch.Generator().manual_seed(0))
    state = specimen.module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())


def test_the_passport_of_an_affine_map_computes_it():
    scale, frozen = Scale(6), Frozen(3)
    with torch.no_grad():
        scale.weight.copy_(torch.linspace(-2, 2, 6))
        scale.bias.copy_(torch.linspace(5, 7, 6))
        frozen.scale.copy_(torch.tensor([1e-6, 1.0, 1e6]))
        frozen.shift.fill_(3.0)
    for norm, x in (
        (scale, torch.randn(4, 6)),
        (frozen, torch.randn(2, 3, 5, 7)),
        (lambda x: 2 * x, torch.randn(3, 6)),
    ):
        passport = identify(norm, tuple(x.shape))
        assert passport.verdict == "affine"
        assert torch.allclose(passport(x), norm(x), rtol=1e-6, atol=1e-6)
    assert identify(frozen, (2, 3, 5, 7)).weight.shape == (3, 1, 1)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.Linear(6, 6), (2, 6)),
        (nn.Conv1d(4, 4, 3, padding=1), (2, 4, 6)),
        (lambda x: x - x.mean(-1, keepdim=True), (2, 6)),
        (lambda x: x.flip(-1), (2, 6)),
        (lambda x: x.cumsum(1), (2, 4, 6)),
    ],
)
def test_what_mixes_features_in_proportion_is_linear(norm, shape):
    assert kind(norm, shape).verdict == "linear"


@pytest.mark.parametrize(
    ("norm", "shape", "axis", "temperature"),
    [
        (nn.Softmax(-1), (2, 6), 1, 1.0),
        (nn.Softmax(1), (2, 4, 6), 1, 1.0),
        (lambda x: (x / 8).softmax(-1), (2, 4, 6), 2, 8.0),
        (nn.Softmax(0), (2, 6), 0, 1.0),
        (nn.Softmin(-1), (2, 6), 1, -1.0),
    ],
)
def test_softmax(norm, shape, axis, temperature):
    found = kind(norm, shape)
    assert found.verdict == "softmax"
    assert found.readings["softmax"].value == {"axis": axis, "temperature": pytest.approx(temperature, rel=1e-5)}


@pytest.mark.parametrize(
    "norm",
    [
        # Positive rows of sum 1, but no softmax: of other logarithms; and one that leaves some for nothing.
        lambda x: x.sigmoid() / x.sigmoid().sum(-1, keepdim=True),
        lambda x: x.exp() / (1 + x.exp().sum(-1, keepdim=True)),
        lambda x: (3 * x.tanh()).softmax(-1),
        nn.LayerNorm(6),
        # Its inputs are felt beside eps only where they are large.
        lambda x: x / (x.square().mean(-1, keepdim=True) + 1e9).sqrt(),
        lambda x: x / (x.square().mean(-1, keepdim=True) + 1e12).sqrt(),
        lambda x: x / x.abs().amax(-1, keepdim=True),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)),
    ],
)
def test_what_is_none_of_these(norm):
    assert kind(norm, (2, 6)) is None


@pytest.mark.parametrize(("norm", "reason"), [(torch.zeros_like, "does not depend"), (torch.log, "not finite")])
def test_constants_and_infinities_are_no_norms(norm, reason):
    found = kind(norm, (2, 6))
    assert found.verdict == "not a norm"
    assert reason in found.readings["kind"].evidence[0]


class Dynamic(nn.Module):
    """A saturating map in place of a norm: gain * map(alpha * x) + bias."""

    def __init__(self, n, function=torch.tanh):
        super().__init__()
        self.function = function
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.linspace(0.5, 2, n))
        self.bias = nn.Parameter(torch.linspace(-1, 1, n))

    def forward(self, x):
        return self.weight * self.function(self.alpha * x) + self.bias


@pytest.mark.parametrize(
    ("norm", "function"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.SiLU(), "silu"),
        (torch.square, None),
    ],
)
def test_elementwise_maps_that_grow(norm, function):
    found = identify(norm, (2, 6))
    assert found.verdict == "elementwise"
    assert found.readings["elementwise"].value == {"saturates": False, "function": function}


@pytest.mark.parametrize(
    ("function", "name", "steepness"), [(torch.tanh, "tanh", 1.0), (torch.erf, "erf", 2 / torch.pi**0.5)]
)
def test_dynamic_tanh_and_erf(function, name, steepness):
    found = identify(Dynamic(6, function), (2, 6))
    assert found.verdict == "elementwise"
    value = found.readings["elementwise"].value
    assert (value["saturates"], value["function"]) == (True, name)
    assert value["slope"] == pytest.approx([0.25 * steepness, steepness], rel=1e-5)
    assert value["limits"] == [pytest.approx([-1.5, -1.0]), pytest.approx([-0.5, 3.0])]
    assert "DyT-like: a saturating elementwise map with gain and bias" in found.readings["kind"].evidence[1]


@pytest.mark.parametrize(("norm", "slope"), [(torch.sign, None), (nn.Hardtanh(), 1.0), (nn.Softsign(), 1.0)])
def test_other_maps_that_saturate(norm, slope):
    value = identify(norm, (2, 6)).readings["elementwise"].value
    assert (value["saturates"], value["function"]) == (True, None)
    assert value["slope"] == (None if slope is None else pytest.approx(slope, rel=1e-3))
    assert value["limits"] == pytest.approx([-1.0, 1.0], rel=1e-5)


def test_names_of_curves():
    at = torch.linspace(-3, 3, 25, dtype=torch.float64)
    for name, function in (("silu", F.silu), ("sigmoid", torch.sigmoid), ("none", lambda x: x)):
        assert activation_of(function(at), at) == name
    assert activation_of(at.exp(), at) is None
    assert activation_of(1.001 * F.silu(at), at) is None
