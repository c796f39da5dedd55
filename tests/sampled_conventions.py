"""Every convention that a norm of trailing axes can have, samples of them, and what is asserted of one."""

from __future__ import annotations

from itertools import product
from random import Random

import torch

from contract import (
    DTYPES,
    HALF,
    ROUNDED,
    UNITS,
    assert_input_gradient,
    assert_parameter_gradients,
    assert_rounded,
    assert_within,
    draw,
    outcome,
    roundings,
    truth,
)
from normkit import NormSpec, reference

# The axes of the conventions that the kernels know.
CENTRES = [True, False]
SCALES = [("mean", 0), ("mean", 1), ("sum", 0)]
PLACEMENTS = ["inside", "outside", "clamp"]
MULTIPLIERS = ["one", "sqrt_n"]
CASTS = ["late", "early", "weight", "input"]
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
        others = differing[~is_tie]
        assert others.sum() * y.shape[-1] <= 1 or others.mean() <= 1 - ROUNDED[torch.float16], (
            f"{others.mean():.3g} are off"
        )
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


def assert_sample(pair, count, seed, sizes=(128, 200), moved=lambda _spec, case: case):
    """`count` conventions on rows of a pair of dtypes; `moved` puts a case where the kernels compute."""
    dtype, parameter_dtype = (DTYPES[name] for name in pair)
    for spec in sample(count, seed + PAIRS.index(pair)):
        # Half of the rows are short enough for a clamp to hold them.
        case = draw(spec, *sizes, dtype=dtype, parameter_dtype=parameter_dtype, mean=0.3)
        x = case.x.double() * torch.tensor([1.0, 0.02]).double().repeat(sizes[0] // 2).unsqueeze(1)
        try:
            assert_conventions(spec, moved(spec, case._replace(x=x.to(dtype))))
        except AssertionError as error:
            raise AssertionError(f"{error}: {spec!r}") from error


def assert_conventions(spec, case):
    """Output and gradients within the contract."""
    (true, size), ours = truth(spec, case), outcome(spec, case)
    assert_output(spec, case, ours.y, true.y, size.y)
    assert_input_gradient(ours.x, true.x, size.x)
    assert_parameter_gradients(case, ours, true, size)
