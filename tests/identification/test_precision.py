"""Formulas found from calls in 16 bits or float64 alone: right, or open; never another."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import normkit as nk
from helpers import diagonal
from normkit import NormSpec, specs
from normkit.identification.behaviour import identify
from normkit.identification.passport import CONVENTIONS
from normkit.identification.precision import precision_of

BF16, FP16 = torch.bfloat16, torch.float16
N = 48


def written(kind, placement, eps, wide):
    """One norm as people write it, over rows of the last axis; statistics in float32, or in the input's dtype."""

    def norm(x):
        dtype = x.dtype
        x = x.float() if wide else x
        centred = x - x.mean(-1, keepdim=True)
        numerator, square = {
            "layer": lambda: (centred, centred.square().mean(-1, keepdim=True)),
            "rms": lambda: (x, x.square().mean(-1, keepdim=True)),
            "l2": lambda: (x, x.square().sum(-1, keepdim=True)),
            "bessel": lambda: (centred, x.var(-1, keepdim=True)),
        }[kind]()
        scale = {
            "inside": lambda: (square + eps).sqrt(),
            "outside": lambda: square.sqrt() + eps,
            "clamp": lambda: square.sqrt().clamp_min(eps),
        }[placement]()
        return (numerator / scale).to(dtype)

    return norm


def wanted(kind, placement, eps):
    centred = kind in ("layer", "bessel")
    return {
        "centring": {"centre_numerator": centred, "centre_statistics": centred},
        "divisor": {
            "correction": int(kind == "bessel"),
            "reduction": "sum" if kind == "l2" else "mean",
            "multiplier": "one",
        },
        "eps": {"eps": eps, "eps_placement": placement},
    }


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("eps", "wide"), diagonal([1e-12, 1e-8, 1e-6, 1e-5, 1e-3], [True, False]))
def test_all_is_found_in_bfloat16(eps, wide):
    for kind, placement in itertools.product(("layer", "rms", "l2", "bessel"), ("inside", "outside", "clamp")):
        passport = identify(written(kind, placement, eps, wide), N, dtype=BF16)
        for reading, value in wanted(kind, placement, eps).items():
            assert passport.readings[reading].value == value, (kind, placement)
        assert passport.dtype == "bfloat16"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("eps", "wide"), diagonal([1e-12, 1e-8, 1e-6, 1e-5, 1e-3], [True, False]))
def test_in_float16_all_is_found_or_open(eps, wide):
    for kind, placement in itertools.product(("layer", "rms", "l2", "bessel"), ("inside", "outside", "clamp")):
        passport = identify(written(kind, placement, eps, wide), N, dtype=FP16)
        for reading, value in wanted(kind, placement, eps).items():
            found = passport.readings[reading]
            # Rows of rms 1e-6 are float16's smallest with a digit or two.
            must = reading != "eps" or (wide and (eps >= 1e-5 or (placement, kind) == ("inside", "layer")))
            if must or found.undecidable is None:
                assert found.value == value, (kind, placement)


@pytest.mark.parametrize("eps", [1e-8, 1e-9, 1e-12])
def test_an_eps_outside_the_root_that_float16_has_no_rows_for_is_open(eps):
    passport = identify(written("rms", "outside", eps, True), N, dtype=FP16)
    assert "too small for float16" in passport.undecidable["eps"]
    assert passport.verdict == "norm"
    assert "eps" in passport.to_json()["undecidable"]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "spec",
    [specs.TORCH_LAYER_NORM, specs.LLAMA, specs.GEMMA, specs.T5, specs.IMAGEGPT, specs.DEBERTA.replace(eps=1e-5)],
)
def test_modules_with_parameters(spec, dtype):
    passport = identify(nk.Norm(spec, 64), (2, 3, 64), dtype=dtype)
    for reading in passport.readings:
        if reading in CONVENTIONS and reading not in passport.undecidable:
            for field in CONVENTIONS[reading]:
                assert getattr(passport.spec, field) == getattr(spec, field), field
    # 1e-6 in float16's own statistics, and nothing else, may stay open.
    assert set(passport.undecidable) <= ({"eps"} if spec == specs.IMAGEGPT and dtype == FP16 else set())
    assert passport.weight_name == "weight"


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_function_that_refuses_float32(dtype):
    def norm(x):
        if x.dtype != dtype:
            raise RuntimeError("16 bits only")
        return nn.functional.rms_norm(x, (N,), eps=1e-5)

    passport = identify(norm, N, dtype=dtype)
    assert passport.spec == specs.NANOCHAT.replace(eps=1e-5)
    assert "the norm runs in" in passport.readings["casts"].evidence[1]


@pytest.mark.parametrize("n", [768, 4096])
@pytest.mark.parametrize("correction", [0, 1])
def test_the_bits_tell_two_divisors_that_the_length_of_long_rows_does_not(n, correction):
    def norm(x):
        wide = x.float()
        variance = wide.var(-1, keepdim=True, correction=correction)
        return ((wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5)).to(x.dtype)

    passport = identify(norm, n, dtype=BF16)
    assert passport.spec == specs.OLMO.replace(correction=correction)
    assert passport.readings["divisor"].evidence == ("the bits of its outputs are those of this divisor alone",)


def test_long_rows_whose_bits_are_no_ones_leave_the_divisor_open():
    def coarse(x):
        """Its last bits are moved, each in its own way."""
        wide = x.float()
        y = (wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(wide.var(-1, keepdim=True) + 1e-5)
        return (y * (1 + 1e-3 * torch.sin(1e3 * y.abs()))).to(x.dtype)

    assert "may as well be divided by n" in identify(coarse, 768, dtype=BF16).undecidable["divisor"]


def test_float64():
    passport = identify(nn.LayerNorm(N), N, dtype=torch.float64)
    assert (passport.spec, passport.dtype) == (specs.TORCH_LAYER_NORM, "float64")
    assert identify(nn.RMSNorm(N), N, dtype=torch.float64).spec.eps is None


def test_a_machine_epsilon_as_a_constant_is_not_none():
    assert identify(nn.RMSNorm(N, eps=2.0**-23), N).spec.eps == 2.0**-23
    assert identify(nn.RMSNorm(N), N).spec.eps is None


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: nn.functional.rms_norm(x, (N,), eps=torch.finfo(x.dtype).eps),
        # In a clamp no row of ordinary length shows it.
        lambda x: x / x.float().square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(x.dtype).eps).to(x.dtype),
    ],
)
def test_an_eps_that_changes_with_the_inputs_dtype_is_open(norm):
    passport = identify(norm, N)
    assert "0.0078125" in passport.undecidable["eps"]


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_a_coarser_dtype_asks_for_less(dtype):
    precision, finest = precision_of(dtype), precision_of(torch.float64)
    assert precision.fits >= finest.fits
    assert precision.eps >= finest.eps
    assert precision.far * precision.growth * 4.5 < torch.finfo(dtype).max ** 0.5
    # Below this, a wrong model would pass.
    assert precision.constant < 0.28
    assert precision.fits < 0.03


@pytest.mark.slow
def test_spec_defaults_are_found_in_every_dtype():
    for dtype in (torch.float64, torch.float32, BF16, FP16):
        assert identify(nk.Norm(NormSpec(), 32), 32, dtype=dtype).spec == NormSpec()
