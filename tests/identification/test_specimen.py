"""The copy that is called, and how finely each dtype shows a formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import normkit as nk
from helpers import diagonal
from normkit import NormSpec, specs
from normkit.errors import ModelError, ShapeError
from normkit.identification.behaviour import identify
from normkit.identification.spec_readings import CONVENTIONS
from normkit.identification.specimen import Specimen, UnrecognisedError, precision_of


def test_the_copy_has_no_hooks_and_shares_nothing():
    module = nn.LayerNorm(4).to(torch.bfloat16).train()
    calls = []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    specimen = Specimen(module)
    with torch.no_grad():
        specimen.draw(torch.Generator().manual_seed(0))
        specimen.parameters["bias"].fill_(3.0)
        specimen(torch.randn(2, 4))
    assert calls == []
    assert module.training
    assert module.weight.dtype == torch.bfloat16
    assert bool((module.weight == 1).all())
    assert bool((module.bias == 0).all())
    assert specimen.parameters["bias"].tolist() == [3.0] * 4
    assert not specimen.module.training


def test_a_hook_that_holds_on_to_everything_is_not_copied():
    class Uncopyable:
        def __deepcopy__(self, memo):
            raise RuntimeError("copied")

        def __call__(self, *_):
            return None

    module = nn.LayerNorm(4)
    module.register_forward_hook(Uncopyable())
    assert Specimen(module)(torch.randn(2, 4)).shape == (2, 4)


def test_what_cannot_be_copied_is_refused():
    module = nn.LayerNorm(4)
    module.scaled = torch.ones(4, requires_grad=True) * 2  # not a leaf, which deepcopy refuses
    with pytest.raises(ModelError, match=r"a LayerNorm cannot be copied .* pass lambda x: norm\(x\)$"):
        Specimen(module)
    x = torch.randn(2, 4)
    assert torch.equal(Specimen(lambda x: module(x))(x), module(x))


def test_the_input_is_not_changed_by_a_norm_in_place():
    x = torch.randn(2, 4)
    before = x.clone()
    Specimen(lambda x: x.mul_(2.0))(x)
    assert torch.equal(x, before)


def test_a_shape_that_does_not_fit_is_an_error():
    with pytest.raises(ShapeError, match=r"refuses an input of shape \(2, 5\)"):
        Specimen(nn.LayerNorm(4))(torch.randn(2, 5))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x, x), "it returns tuple"),
        (lambda x: x.sum(-1), r"into torch.float32 of shape \(2,\)"),
        (lambda x: x > 0, "into torch.bool"),
    ],
)
def test_an_output_that_is_not_like_the_input_is_no_norm(function, reason):
    with pytest.raises(UnrecognisedError, match=reason) as refusal:
        Specimen(function)(torch.randn(2, 4))
    assert refusal.value.verdict == "not a norm"


def test_a_second_input_may_be_a_gate():
    specimen = Specimen(lambda x, gate: x * gate)
    with pytest.raises(UnrecognisedError, match="cannot be called with one tensor") as refusal:
        specimen(torch.ones(2, 4))
    assert refusal.value.verdict == "gated"
    assert torch.equal(
        specimen.adapted(lambda run, x: run(x, 0.5 * x))(torch.full((2, 4), 2.0)), torch.full((2, 4), 2.0)
    )


def test_a_module_without_memory_gets_some():
    specimen = Specimen(nn.LayerNorm(4, device="meta"))
    assert bool(torch.isfinite(specimen(torch.randn(2, 4))).all())


def test_calls_in_other_dtypes_leave_the_parameters():
    specimen = Specimen(nn.LayerNorm(4))
    with torch.no_grad():
        specimen.parameters["weight"].fill_(1 / 3)
        y = specimen.call_in(torch.bfloat16, torch.randn(2, 4).bfloat16())
    assert y.dtype == torch.bfloat16
    assert specimen.parameters["weight"].dtype == torch.float32
    assert specimen.parameters["weight"][0] == torch.tensor(1 / 3)
    assert specimen.call_in(torch.bfloat16, torch.randn(2, 5)) is None


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("eps", "wide"), diagonal([1e-12, 1e-8, 1e-6, 1e-5, 1e-3], [True, False]))
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(half, marks=pytest.mark.slow) for half in (BF16, FP16))]
)
def test_formulas_as_people_write_them(dtype, eps, wide):
    for kind, placement in itertools.product(("layer", "rms", "l2", "bessel"), ("inside", "outside", "clamp")):
        passport = identify(written(kind, placement, eps, wide), N, dtype=dtype)
        centred = kind in ("layer", "bessel")
        divisor = {"correction": int(kind == "bessel"), "reduction": "sum" if kind == "l2" else "mean"}
        wanted = {
            "centring": {"centre_numerator": centred, "centre_statistics": centred},
            "divisor": {**divisor, "multiplier": "one"},
            "eps": {"eps": eps, "eps_placement": placement},
        }
        for reading, value in wanted.items():
            found = passport.readings[reading]
            # Rows of rms 1e-6 are float16's smallest with a digit or two: there eps may be open.
            must = reading != "eps" or (wide and (eps >= 1e-5 or (placement, kind) == ("inside", "layer")))
            if dtype != FP16 or must or found.undecidable is None:
                assert found.value == value, (kind, placement)
        assert passport.dtype == str(dtype).removeprefix("torch.")
        assert (passport.spec.has_weight, passport.spec.has_bias) == (False, False)


@pytest.mark.parametrize("eps", [1e-8, 1e-9, 1e-12])
def test_an_eps_outside_the_root_that_float16_has_no_rows_for_is_open(eps):
    passport = identify(written("rms", "outside", eps, True), N, dtype=FP16)
    assert "too small for float16" in passport.undecidable["eps"]
    assert passport.verdict == "norm"
    assert "eps" in passport.to_json()["undecidable"]


@pytest.mark.sampled(3)
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
