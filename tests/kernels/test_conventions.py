"""Every convention that a norm of trailing axes can have, in every mixture of dtypes; and what computes each preset."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch

import normkit
from contract import (
    DTYPES,
    GAIN_UNITS,
    HALF,
    ROUNDED,
    UNITS,
    Calls,
    assert_rounded,
    assert_within,
    below_normal,
    draw,
    outcome,
    roundings,
    terms,
    truth,
)
from helpers import PRESETS, arguments
from normkit import NormSpec, reference, specs
from normkit.kernels import cpu, support

TRAILING = "rows that are not the trailing axes"
IN_16_BITS = "statistics in 16 bits"
# Why the kernels leave a preset to the reference: for any input, or for 16-bit input alone.
NEVER = {
    "CONVNEXT": TRAILING,
    "POOLFORMER": TRAILING,
    "POCKET_TTS": "centring of the numerator or of the statistics alone",
    "MUSE_SPARK_INPUT_SCALED": "a gain before the norm",
}
NOT_IN_16_BITS = {"ANNOTATED_TRANSFORMER", "IMAGEGPT", "L2_NORM", "X_TRANSFORMERS_RMS"}

# The axes of the conventions that the kernels know.
CENTRES = [True, False]
SCALES = [("mean", 0), ("mean", 1), ("sum", 0)]
PLACEMENTS = ["inside", "outside", "clamp"]
MULTIPLIERS = ["one", "sqrt_n"]
CASTS = ["late", "early", "weight"]
GAINS = [(False, 0.0, "float32"), (True, 0.0, "float32"), (True, 1.0, "float32"), (True, 1.0, "parameter")]
GAINS += [(True, -0.5, "float32"), (True, -0.5, "parameter")]
OUTPUTS = ["input", "promote", "weight"]
CONVENTIONS = [
    NormSpec(
        centre_numerator=centre,
        centre_statistics=centre,
        # On rows of length near 1 a clamp at 0.5 holds some of them, and so does 20 on a sum.
        eps=0.5 if placement != "inside" else 1e-3,
        eps_placement=placement,
        reduction=reduction,
        correction=correction,
        multiplier=multiplier,
        cast=cast,
        has_weight=has_weight,
        weight_offset=offset,
        offset_dtype=offset_dtype,
        has_bias=has_bias,
        round_rstd=round_rstd,
        output_dtype=output,
    )
    for centre, (reduction, correction), placement, multiplier, cast, (has_weight, offset, offset_dtype), has_bias, (
        round_rstd
    ), output in product(CENTRES, SCALES, PLACEMENTS, MULTIPLIERS, CASTS, GAINS, [False, True], [False, True], OUTPUTS)
]
# An input's dtype, and its parameters'.
PAIRS = [(name, name) for name in DTYPES]
PAIRS += [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "bf16")]
PAIRS += [("fp64", "fp32"), ("fp64", "bf16"), ("bf16", "fp64"), ("fp32", "fp64")]


def sample(count, seed):
    """Conventions drawn without order: each axis has at most six values, so each pair of values is among them."""
    return Random(seed).sample(CONVENTIONS, count)


def assert_output(spec, case, y, true, size):
    """Rounded where the program rounds; else four units of the formula."""
    program, casts = reference.forward(case.x, spec, case.weight, case.bias), roundings(spec, case)
    assert y.dtype == program.dtype
    if spec.round_rstd and case.x.dtype in HALF:
        # Of a float32 output only what leads to it is rounded. A near-tie of 1/s moves a whole row by one ulp.
        step = 0.0 if y.dtype in HALF else 4 * torch.finfo(y.dtype).eps * size
        differing = ((y.double() - program.double()).abs() > step).double().mean(-1)
        is_tie = differing > 0.05
        assert is_tie.sum() <= 1, f"{is_tie.sum()} rows have another 1/s"
        assert differing[~is_tie].mean() <= 1 - ROUNDED[torch.float16], f"{differing[~is_tie].mean():.3g} are off"
    elif casts and y.dtype == torch.float64:
        # What follows a cast to 16 bits may then be float32 arithmetic, or wider.
        is_close = (y - program).abs() <= 4 * torch.finfo(torch.float32).eps * size
        assert is_close.double().mean() >= min(ROUNDED[dtype] for dtype in casts)
    elif casts:
        assert_rounded(y, program, spec, casts, size)
    else:
        # 1 + weight is taken in float32 "or wider": beside a float64 input both are right.
        is_nearer = (y - program.double()).abs() < (y - true).abs()
        assert_within(y, torch.where(is_nearer, program.double(), true), size, UNITS[y.dtype], "y")


def assert_conventions(spec, case):
    true = truth(spec, case)
    size, ours = terms(spec, case, true), outcome(spec, case)
    assert_output(spec, case, ours.y, true.y, size.y)
    if case.x.dtype in HALF:
        once = 0.5 * torch.finfo(case.x.dtype).eps * true.x.abs() + below_normal(case.x.dtype)
        bound = once + 4 * torch.finfo(torch.float32).eps * size.x
        error = (ours.x.double() - true.x).abs()
        assert (error <= bound).all(), f"dx: {(error / bound).max():.3g} of what rounding once leaves"
    else:
        assert_within(ours.x, true.x, size.x, UNITS[case.x.dtype], "dx")
    for what in ("weight", "bias"):
        if getattr(case, what) is not None:
            ours_of, true_of, size_of = (getattr(of, what) for of in (ours, true, size))
            assert ours_of.dtype == getattr(case, what).dtype
            assert_within(ours_of, true_of, size_of, GAIN_UNITS[ours_of.dtype], f"d{what}")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_conventions_in_every_mixture_of_dtypes(pair):
    """Forward and all gradients against the reference in float64, 60 conventions a pair of dtypes."""
    dtype, parameter_dtype = (DTYPES[name] for name in pair)
    for spec in sample(60, PAIRS.index(pair)):
        # Half of the rows are short enough for a clamp to hold them.
        case = draw(spec, 128, 200, dtype=dtype, parameter_dtype=parameter_dtype, mean=0.3)
        x = case.x.double() * torch.tensor([1.0, 0.02]).double().repeat(64).unsqueeze(1)
        try:
            assert_conventions(spec, case._replace(x=x.to(dtype)))
        except AssertionError as error:
            raise AssertionError(f"{error}: {spec!r}") from error


def test_the_sample_holds_every_pair_of_conventions():
    names = ("centre_numerator", "reduction", "correction", "eps_placement", "multiplier", "cast", "has_weight")
    names += ("weight_offset", "offset_dtype", "has_bias", "round_rstd", "output_dtype")

    def pairs(conventions):
        return {
            (a, getattr(spec, a), b, getattr(spec, b)) for spec in conventions for a in names for b in names if a < b
        }

    tried = [spec for index in range(len(PAIRS)) for spec in sample(60, index)]
    assert pairs(tried) == pairs(CONVENTIONS)
    assert len(set(CONVENTIONS)) == len(CONVENTIONS) == 7776


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_computes_a_preset(name, dtype):
    """The table above holds, and the public function does what it says, forward and backward."""
    spec, dtype = PRESETS[name], DTYPES[dtype]
    reason = NEVER.get(name) or (IN_16_BITS if name in NOT_IN_16_BITS and dtype in HALF else None)
    given = arguments(spec, dtype=dtype)
    assert cpu.supports(spec, *given) == reason
    # Rows along the channels are computed as rows of an input with the channels moved last.
    reason = None if spec.axes == (1,) else reason
    with Calls() as calls:
        leaves = [None if tensor is None else tensor.requires_grad_() for tensor in given]
        normkit.normalize(leaves[0], spec, *leaves[1:]).sum().backward()
    forward_and_backward = ["normalize_forward", "normalize_backward"]
    assert calls.names == ([] if reason or cpu.load() else forward_and_backward)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_what_computes_torchs_norms(name, pair):
    """The kernels, whatever the dtypes, but for a float64 parameter of a narrower input."""
    dtype, parameter_dtype = (DTYPES[part] for part in pair)
    x, weight = torch.randn(3, 8, dtype=dtype, requires_grad=True), torch.ones(8, dtype=parameter_dtype)
    residual = [torch.randn(3, 8, dtype=dtype)] if name.startswith("add") else []
    with Calls() as calls:
        y = getattr(normkit, name)(x, *residual, (8,), weight)
        (y[0] if residual else y).sum().backward()
    is_wide = parameter_dtype == torch.float64 != dtype
    expected = ["add_normalize_forward" if residual else "normalize_forward", "normalize_backward"]
    assert calls.names == ([] if is_wide or cpu.load() else expected)


def test_no_gradient_wanted_takes_the_plain_operators():
    x, out = torch.randn(3, 8), torch.empty(3, 8)
    with Calls() as calls:
        normkit.rms_norm(x, (8,))
        normkit.normalize(x, specs.NANOCHAT, out=out)
        normkit.add_rms_norm(x, x, (8,))
        normkit.add_normalize(x, x, specs.NANOCHAT, out=(out, torch.empty(3, 8)))
    expected = ["normalize_rows", "normalize_rows_out", "add_normalize_forward", "add_normalize_rows_out"]
    assert calls.names == ([] if cpu.load() else expected)


def test_a_preset_that_is_left_to_the_reference_is_no_row_of_trailing_axes_or_in_16_bits():
    """The kernels cover the rest: a new preset that they cannot compute must be named above."""
    assert {name for name, spec in PRESETS.items() if support.supports_spec(spec)} == set(NEVER)
    assert {name for name, spec in PRESETS.items() if spec.statistics_dtype == "input"} - set(NEVER) == NOT_IN_16_BITS
