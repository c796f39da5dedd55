"""Elementwise maps: known functions by their curve, dynamic tanh and erf, and others that saturate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification.behaviour import identify
from normkit.identification.elementwise import activation_of


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
