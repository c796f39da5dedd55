"""Norms with a wrong power, from outside: which one, and what is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from faulty_norms import GainAndBias
from normkit.identification.behaviour import identify
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace

N = 32


class Powered(GainAndBias):
    """A norm that divides by the variance or mean square to any power."""

    def __init__(self, power: float, centred: bool) -> None:
        super().__init__(N)
        self.power, self.centred = power, centred

    def forward(self, x):
        row = x - x.mean(-1, keepdim=True) if self.centred else x
        return self.weight * row / (row.square().mean(-1, keepdim=True) + self.eps) ** self.power + self.bias


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("power", [2.0, 1.0, 0.25, -0.5])
def test_the_power_is_read(power, centred):
    passport = identify(Powered(power, centred), (2, 5, N))
    assert passport.verdict == "not a norm"
    assert passport.readings["degree"].value == pytest.approx(1 - 2 * power, abs=0.01)
    assert ("standard deviation" if centred else "root mean square") in passport.readings["degree"].evidence[0]


def test_a_norm_and_an_identity_have_none():
    assert "degree" not in identify(Powered(0.5, True), N).readings
    assert "degree" not in identify(Powered(0.0, False), N).readings


class Gate(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x.mean(-1, keepdim=True))


class Sum(nn.Module):
    def forward(self, x):
        return x * x.sum(-1, keepdim=True)


class Mixes(nn.Module):
    def forward(self, x):
        return x @ x.transpose(-1, -2) @ x


@pytest.mark.parametrize(
    "module", [Gate(), Sum(), Mixes(), nn.GELU(), nn.Softmax(-1), nn.LogSoftmax(-1), nn.Linear(N, N)]
)
def test_other_maps_have_none(module):
    assert "degree" not in identify(module, (2, 5, N)).readings


def test_a_model_lists_it_among_the_norms_without_a_spec():
    model = nn.Sequential(nn.Linear(N, N), Powered(2.0, True), nn.Linear(N, N), nn.ReLU(), nn.LayerNorm(N))
    x = torch.randn(2, 5, N)
    with torch.no_grad():
        sites, others = find_sites(model, trace(model, lambda: model(x)))
    assert [site.path for site in sites] == ["4"]
    assert [other.path for other in others] == ["1"]
    assert "to the power -3.00, not 0" in others[0].reason
