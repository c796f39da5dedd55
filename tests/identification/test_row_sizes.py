"""Norms whose root is approximate, and norms of which large rows get something else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from faulty_norms import Gain, GainAndBias
from normkit.identification.behaviour import identify


def newton(v):
    """1/sqrt(v) of the bits of a float32, and one step of Newton."""
    guess = (0x5F3759DF - (v.view(torch.int32) >> 1)).view(torch.float32)
    return guess * (1.5 - 0.5 * v * guess * guess)


class FastRoot(Gain):
    def forward(self, x):
        return self.weight * x * newton(x.square().mean(-1, keepdim=True) + self.eps)


@pytest.mark.slow
def test_a_root_is_approximate_and_nothing_is_rounded_to_16_bits():
    passport = identify(FastRoot(), 64)
    v = 4 ** torch.linspace(0, 1, 10_001)
    share = newton(v) * v.sqrt()
    assert float(share.max() / share.min()) - 1 == pytest.approx(0.00176, abs=5e-6)
    assert (passport.verdict, passport.spec) == ("norm", None)
    assert "rounding" not in passport.readings
    reading = passport.readings["root"]
    assert reading.value == "approximate"
    assert reading.evidence == (
        "a row keeps its direction whatever its size, and its output varies in length by 0.175 %: its root is "
        "approximate",
    )


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_an_exact_root_and_another_power_have_none(power):
    class Power(Gain):
        def forward(self, x):
            return self.weight * x / (x.abs().amax(-1, keepdim=True) + self.eps) ** (2 * power)

    assert "root" not in identify(Power(), 64).readings


class Clamped(GainAndBias):
    """It clamps its input."""

    def __init__(self, limit, centred):
        super().__init__()
        self.limit, self.centred = limit, centred

    def forward(self, x):
        x = x.clamp(-self.limit, self.limit)
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) + self.bias


@pytest.mark.slow
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("limit", [448.0, 1000.0, 65504.0])
def test_a_norm_that_clamps_its_input(limit, centred):
    passport = identify(Clamped(limit, centred), (2, 3, 64))
    formula = "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias"
    formula = formula if centred else "y = weight * x / sqrt(mean(x^2) + 1e-05) + bias"
    assert (passport.verdict, passport.spec) == ("norm", None)
    reading = passport.readings["large rows"]
    shown = {448.0: "448", 1000.0: "1000", 65504.0: "65500"}[limit]
    assert reading.value == f"{formula} up to a magnitude of {shown}, where its input is clamped"
    assert passport.cause == reading.evidence[0]
    assert passport.readings["kind"].evidence[0].startswith("for inputs of magnitude 1.04858e+06 ")


@pytest.mark.slow
def test_a_norm_of_which_large_rows_get_something_else():
    class Guarded(Gain):
        def forward(self, x):
            y = self.weight * self.rms(x)
            return torch.where(x.abs().amax(-1, keepdim=True) > 2000, 0 * y, y)

    passport = identify(Guarded(), 64)
    assert passport.verdict == "norm"
    found = passport.readings["large rows"].value
    assert found == "y = weight * x / sqrt(mean(x^2) + 1e-06) up to a magnitude of 2000, from where it is another"


@pytest.mark.parametrize("module", [nn.Tanh(), nn.Sequential(nn.LayerNorm(64), nn.Hardtanh()), nn.Softmax(-1)])
def test_what_is_no_norm_of_ordinary_rows_has_none(module):
    assert "large rows" not in identify(module, 64).readings
