"""The gradient of a gain in 16 bits, from outside."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.gain_gradients import gain_gradient_errors

WIDTH = 64
# One rounding of a sum taken in float32, in bfloat16 and float16; and what sums in 16 bits leave over 4096 rows.
ROUNDED = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
SUMMED_IN_HALF = {torch.bfloat16: 0.1, torch.float16: 1e-2}


class Own(nn.Module):
    """An RMSNorm whose gain's gradient is rounded once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x):
        self.calls += x.shape[0] > 100
        wide = x.float()
        return (self.weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


class Detached(Own):
    def forward(self, x):
        return super().forward(x).detach()


class Called(nn.Module):
    """Norms as functions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        x = F.layer_norm(self.inner(x), (WIDTH,), self.gain, self.bias)
        return F.rms_norm(self.inner(x), (WIDTH,), self.gain, 1e-6)


def errors(model, dtype, entering=None):
    model = model.to(dtype)
    x = torch.randn(2, WIDTH).to(dtype)
    with torch.no_grad():
        sites, _ = find_sites(model, trace(model, lambda: model(x)))
        name = str(entering or dtype).removeprefix("torch.")
        return gain_gradient_errors(sites, {site.path: name for site in sites})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_layer_norm_sums_in_16_bits_on_the_cpu(dtype):
    found = errors(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Own()), dtype)
    assert found["0"] > SUMMED_IN_HALF[dtype]
    assert found["2"] < ROUNDED[dtype]


def test_functions_are_tried_too():
    layer, root = errors(Called(), torch.bfloat16).values()
    assert layer > SUMMED_IN_HALF[torch.bfloat16]
    assert root < ROUNDED[torch.bfloat16]


def test_in_float32_nothing_is_tried_but_16_bit_inputs_of_float32_gains_are():
    assert math.isnan(errors(Own(), torch.float32)[""])
    assert errors(Own(), torch.float32, torch.bfloat16)[""] < ROUNDED[torch.bfloat16]


def test_what_has_no_gradient_is_not_known():
    model = nn.Sequential(Detached(), nn.LayerNorm(WIDTH, elementwise_affine=False))
    assert all(math.isnan(error) for error in errors(model, torch.bfloat16).values())


def test_like_norms_are_tried_once_and_left_as_they_are(monkeypatch):
    from normkit.measurement import gain_gradients

    tried, error = [], gain_gradients._error
    monkeypatch.setattr(gain_gradients, "_error", lambda site, *rest: tried.append(site.path) or error(site, *rest))
    model = nn.Sequential(Own(), nn.Linear(WIDTH, WIDTH), Own(), nn.LayerNorm(WIDTH))
    found = errors(model, torch.bfloat16)
    assert tried == ["0", "3"]
    assert found["0"] == found["2"]
    assert model[0].calls == 0
    assert model[0].weight.grad is None


def test_classes_that_share_a_name_are_tried_apart():
    class LayerNorm(nn.Module):
        """In float32 inside, so that the gain's gradient is rounded once."""

        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            return F.layer_norm(x.float(), (WIDTH,), self.weight.float(), self.bias.float()).to(x.dtype)

    model = nn.Sequential(LayerNorm(), nn.LayerNorm(WIDTH))
    own, torchs = errors(model, torch.bfloat16).values()
    assert own < 1e-2 < torchs
