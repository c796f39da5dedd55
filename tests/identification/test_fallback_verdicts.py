"""The second look: which of all kinds it is, with the most telling line first; and norms with a wrong power."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from faulty_norms import GainAndBias
from normkit.errors import IdentificationError
from normkit.identification.behaviour import identify
from normkit.identification.passport import Passport
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace


@pytest.mark.parametrize(
    ("norm", "shape", "verdict", "first"),
    [
        (nn.Identity(), 6, "identity", "its outputs are its inputs, bit for bit"),
        (nn.BatchNorm1d(6), 6, "batch", "in training mode, changing one sample moves the others"),
        (lambda x: x - x.mean(0), 6, "linear", "f(x + y) = f(x) + f(y) - f(0)"),
        (lambda x, gate: F.rms_norm(x, (6,)) * gate, 6, "gated", "gate multiplies elementwise after the norm"),
        (nn.Softmax(0), 6, "softmax", "outputs are positive, sum to 1 along axis 0"),
        (lambda x: F.dropout(x, 0.5), 6, "undecidable", "the same input gives different outputs"),
        (lambda x: x * (1 + 1e-6 * torch.rand(())), 6, "undecidable", "the same input gives different outputs"),
        (lambda x: x / x.abs().amax(-1, keepdim=True), 6, "norm", "it does not grow with its input"),
        (nn.Sequential(nn.Linear(6, 6), nn.Hardtanh()), 6, "not a norm", ""),
        (nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), 6, "not a norm", "its output grows"),
    ],
)
def test_each_has_its_line_first(norm, shape, verdict, first):
    passport = identify(norm, shape)
    assert (passport.verdict, passport.spec) == (verdict, None)
    assert next(iter(passport.readings)) == "kind"
    assert passport.evidence[0].startswith(first)
    again = Passport.from_json(json.loads(json.dumps(passport.to_json(), allow_nan=False)))
    assert again.verdict == verdict
    assert again.readings["kind"].value == verdict


def test_what_is_scale_invariant_but_for_its_bias_saturates():
    # With a bias in front, a norm behind it is no norm of the input.
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())
    passport = identify(module, 6)
    assert passport.verdict == "not a norm"
    assert "it saturates" in passport.evidence[1]


def test_several_tensors_without_a_norm_among_them():
    assert identify(lambda x: (x + 1, x), 6).verdict == "not a norm"
    with pytest.raises(IdentificationError, match=r"norm\(x\)\[1\]"):
        identify(lambda x: (x, F.layer_norm(x, (6,))), 6)


@pytest.mark.parametrize("norm", [torch.tanh, nn.Linear(6, 6), nn.Softmax(-1)])
def test_a_passport_without_a_formula_cannot_be_called(norm):
    with pytest.raises(IdentificationError, match="cannot be called"):
        identify(norm, 6)(torch.ones(2, 6))


def test_the_parameters_are_those_of_the_module_not_of_the_search():
    module = nn.BatchNorm1d(3)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([2.0, 3.0, 4.0]))
    assert identify(module, 3).weight.tolist() == pytest.approx([2.0, 3.0, 4.0], rel=1e-4)


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
