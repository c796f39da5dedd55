"""Every formula and snippet of the five notes that normkit grew from is a spec, and the reference computes it.

The notes, by topic: the three steps of a layer norm; a summary for transformers; thoughts on mean centring;
a picture of layer norm; a page on stable activations. They hold four epsilons (1e-5 inside the root, none at all,
1e-12 outside the root, 1e-5 in code), an RMSNorm with a bias, and one snippet that is not a LayerNorm.
Each formula is written out here as its note has it, in plain torch and float64.
"""

from __future__ import annotations

import math

import pytest
import torch

from helpers import assert_close
from normkit import NormSpec, reference, specs

N = 16
RMS = specs.TORCH_RMS_NORM


def three_steps(x, g, b):
    centred = x - (x @ torch.ones(N, dtype=x.dtype) / N).unsqueeze(-1)
    variance = centred.square().sum(-1, keepdim=True) / N
    return g * (centred / (variance + 1e-5).sqrt()) + b


def three_steps_without_epsilon(x, g, b):
    unit = torch.full((N,), 1 / math.sqrt(N), dtype=x.dtype)
    centred = x - torch.outer(x @ unit, unit)
    return g * (math.sqrt(N) * centred / centred.norm(dim=-1, keepdim=True)) + b


def root_mean_square_with_a_bias(x, g, b):
    return g * (x / (x.square().sum(-1, keepdim=True) / N).sqrt()) + b


def summary_layer_norm(x, gamma, beta):
    mu = x.sum(-1, keepdim=True) / N
    sigma = (((x - mu) ** 2).sum(-1, keepdim=True) / N).sqrt()
    return gamma * (x - mu) / sigma + beta


def summary_rms_norm(x, gamma, _):
    return gamma * x / ((x**2).sum(-1, keepdim=True) / N).sqrt()


def centre_then_rescale(x, _, __):
    centred = x - x.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt()


def picture(x, a, b):
    mean = x.sum(-1, keepdim=True) / N
    std = ((x - mean).square().sum(-1, keepdim=True) / N).sqrt()
    return a * (x - mean) / (std + 1e-12) + b


def picture_as_three_maps(x, a, b):
    projection = torch.eye(N, dtype=x.dtype) - torch.ones(N, N, dtype=x.dtype) / N
    on_hyperplane = x @ projection
    on_sphere = math.sqrt(N) * on_hyperplane / (on_hyperplane.norm(dim=-1, keepdim=True) + 1e-12 * math.sqrt(N))
    return on_sphere @ torch.diag(a) + b


def picture_without_the_first_map(x, a, _):
    return math.sqrt(N) * x / (x.norm(dim=-1, keepdim=True) + 1e-12 * math.sqrt(N)) @ torch.diag(a)


def stable_formula(x, gamma, beta):
    mu = x.mean(-1, keepdim=True)
    return gamma * (x - mu) / ((x - mu).square().mean(-1, keepdim=True) + 1e-5).sqrt() + beta


def stable_snippet(x, gamma, beta):
    normalized = (x - x.mean(dim=-1, keepdim=True)) / torch.sqrt(x.var(dim=-1, keepdim=True) + 1e-5)
    return gamma * normalized + beta


def stable_one_line(x, gamma, beta):
    layer = torch.nn.LayerNorm(N, dtype=x.dtype)
    layer.load_state_dict({"weight": gamma, "bias": beta})
    return layer(x)


def stable_rms_snippet(x, gamma, _):
    return gamma * x / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)


# What the note writes, the spec it is, and how that spec prints.
FORMULAS = [
    (three_steps, NormSpec(), "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias"),
    (
        three_steps_without_epsilon,
        NormSpec(reduction="sum", multiplier="sqrt_n", eps=0.0),
        "y = weight * sqrt(n) * (x - mean(x)) / norm(x - mean(x)) + bias",
    ),
    (root_mean_square_with_a_bias, RMS.replace(eps=0.0, has_bias=True), "y = weight * x / rms(x) + bias"),
    (summary_layer_norm, NormSpec(eps=0.0), "y = weight * (x - mean(x)) / std(x) + bias"),
    (summary_rms_norm, RMS.replace(eps=0.0), "y = weight * x / rms(x)"),
    (centre_then_rescale, NormSpec(eps=0.0, has_weight=False, has_bias=False), "y = (x - mean(x)) / std(x)"),
    (
        picture,
        NormSpec(eps=1e-12, eps_placement="outside"),
        "y = weight * (x - mean(x)) / (std(x) + 1e-12) + bias",
    ),
    (
        picture_as_three_maps,
        NormSpec(reduction="sum", multiplier="sqrt_n", eps=1e-12 * math.sqrt(N), eps_placement="outside"),
        "y = weight * sqrt(n) * (x - mean(x)) / (norm(x - mean(x)) + 4e-12) + bias",
    ),
    (
        picture_without_the_first_map,
        RMS.replace(reduction="sum", multiplier="sqrt_n", eps=1e-12 * math.sqrt(N), eps_placement="outside"),
        "y = weight * sqrt(n) * x / (norm(x) + 4e-12)",
    ),
    (stable_formula, NormSpec(eps=1e-5), "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias"),
    (stable_snippet, NormSpec(correction=1), "y = weight * (x - mean(x)) / sqrt(var(x, correction=1) + 1e-05) + bias"),
    (stable_one_line, specs.TORCH_LAYER_NORM, "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias"),
    (stable_rms_snippet, RMS.replace(eps=1e-5), "y = weight * x / sqrt(mean(x^2) + 1e-05)"),
]
IDS = [formula.__name__ for formula, _, _ in FORMULAS]


@pytest.fixture
def rows() -> torch.Tensor:
    """Rows from 1e-7 to 1e3 in size: at 1e-7 even an epsilon of 1e-12 outside the root shows, at 1e-5 relative."""
    size = torch.logspace(-7, 3, 11, dtype=torch.float64).unsqueeze(-1)
    return size * (torch.randn(11, N, dtype=torch.float64) + 0.5)


def parameters(spec: NormSpec) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    weight = 1 + 0.3 * torch.randn(N, generator=generator, dtype=torch.float64)
    bias = torch.randn(N, generator=generator, dtype=torch.float64)
    return weight if spec.has_weight else None, bias if spec.has_bias else None


@pytest.mark.parametrize(("formula", "spec", "printed"), FORMULAS, ids=IDS)
def test_the_formula_is_a_spec(formula, spec, printed, rows):
    weight, bias = parameters(spec)
    # 32 units are 7e-15 of the largest element: both sides round a sum of 16 terms and a handful of operations.
    assert_close(reference.forward(rows, spec, weight, bias), formula(rows, weight, bias), units=32)
    assert str(spec) == printed


@pytest.mark.parametrize(("formula", "spec"), [pytest.param(f, s, id=f.__name__) for f, s, _ in FORMULAS])
def test_no_other_epsilon_would_do(formula, spec, rows):
    weight, bias = parameters(spec)
    for eps in {0.0, 1e-12, 1e-5} - {spec.eps}:
        other = reference.forward(rows, spec.replace(eps=eps), weight, bias)
        assert (other - formula(rows, weight, bias)).abs().max() > 1e-6


def test_the_snippet_is_not_a_layer_norm():
    x = torch.randn(1, 6, dtype=torch.float64)
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    snippet = (x - mean) / std
    layer_norm = reference.forward(x, NormSpec(eps=0.0, has_weight=False, has_bias=False))
    # The divisor n - 1 instead of n: too small by sqrt(5/6), which is 8.7 % at n = 6.
    ratio = snippet / layer_norm
    assert_close(ratio, torch.full_like(ratio, math.sqrt(5 / 6)))
    assert 1 - ratio.mean().item() == pytest.approx(0.0871, abs=5e-5)


def test_without_gain_and_bias_a_row_lands_on_the_sphere_in_the_hyperplane(rows):
    y = reference.forward(rows, NormSpec(eps=0.0, has_weight=False, has_bias=False))
    assert_close(y.sum(-1), torch.zeros(len(rows), dtype=torch.float64), terms=torch.ones(()), length=N)
    assert_close(y.square().sum(-1), torch.full((len(rows),), float(N), dtype=torch.float64))
