"""Conventions mean for the Triton kernels what they mean for the compiled ones."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from normkit import reference, specs
from normkit.kernels.triton.program import program
from normkit.ops.plans import plan

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NARROW = [F32, BF16, F16]


def of(spec, n=12, x=F32, weight=None, bias=None, row=None):
    found = plan(spec)
    return program(found.conventions, found.eps, found.offset, n, x, row or x, weight, bias)


@pytest.mark.parametrize(
    ("spec", "x", "weight", "bias", "rounds"),
    [
        # A late cast is none on the way; nor is one to float32.
        (specs.TORCH_LAYER_NORM, BF16, BF16, BF16, 0),
        (specs.LLAMA, F32, F32, None, 0),
        # An early cast; the gain's product stays in 16 bits while the gain does.
        (specs.LLAMA, BF16, BF16, None, 2),
        (specs.LLAMA, BF16, F32, None, 1),
        (specs.LLAMA, BF16, F16, None, 1),
        (specs.LLAMA.replace(has_bias=True), BF16, BF16, BF16, 3),
        (specs.LLAMA.replace(has_bias=True), BF16, BF16, F32, 2),
        (specs.LLAMA.replace(has_bias=True, has_weight=False), BF16, None, BF16, 3),
        # An offset in float32 widens the gain; one in the gain's dtype does not; and so does none.
        (specs.LLAMA.replace(weight_offset=1.0), BF16, BF16, None, 1),
        (specs.LLAMA.replace(weight_offset=1.0, offset_dtype="parameter"), BF16, BF16, None, 2),
        # A cast to the gain's dtype; without a gain there is none.
        (specs.T5, F32, BF16, None, 2),
        (specs.T5, BF16, F32, None, 0),
        (specs.T5.replace(has_weight=False), BF16, None, None, 0),
        # Gain and bias are rounded to the input's dtype too.
        (specs.LLAMA.replace(cast="input"), BF16, F32, None, 4),
        (specs.LLAMA.replace(cast="input"), F32, BF16, None, 0),
    ],
)
def test_after_how_many_steps_a_row_is_rounded(spec, x, weight, bias, rounds):
    found = of(spec, x=x, weight=weight, bias=bias)
    assert found.rounds == rounds
    assert found.cast_to_weight == (spec.cast == "weight" and weight is not None)


@pytest.mark.parametrize("output", ["input", "promote", "weight"])
@pytest.mark.parametrize(
    ("x", "weight", "bias"), list(itertools.product(NARROW, [None, *NARROW], [None, *NARROW]))[::3]
)
def test_the_dtype_of_the_output_is_the_references(output, x, weight, bias):
    spec = specs.TORCH_LAYER_NORM.replace(output_dtype=output, has_weight=weight is not None, has_bias=bias is not None)
    parameters = (None if dtype is None else torch.ones(12, dtype=dtype) for dtype in (weight, bias))
    assert of(spec, x=x, weight=weight, bias=bias).output == reference.output_dtype(x, spec, *parameters)


@pytest.mark.parametrize(("reduction", "correction", "divisor"), [("mean", 0, 12), ("mean", 1, 11), ("sum", 0, 1)])
def test_the_divisor(reduction, correction, divisor):
    assert of(specs.OLMO.replace(reduction=reduction, correction=correction)).divisor == divisor


def test_small_things():
    assert of(specs.OLMO).centre
    assert not of(specs.NANOCHAT).centre
    assert of(specs.NANOCHAT.replace(multiplier="sqrt_n")).factor == math.sqrt(12)
    assert of(specs.OLMO).factor == 1
    assert of(specs.NANOCHAT.replace(eps=None)).eps == torch.finfo(F32).eps
    placements = [of(specs.OLMO.replace(eps_placement=name)).placement for name in ("inside", "outside", "clamp")]
    assert placements == [0, 1, 2]
    rounded = specs.NANOCHAT.replace(round_rstd=True)
    assert [of(rounded, x=dtype).round_rstd for dtype in NARROW] == [False, True, True]
    assert not of(specs.NANOCHAT, x=BF16).round_rstd


@pytest.mark.parametrize("centre", [specs.OLMO, specs.NANOCHAT])
def test_how_many_numbers_are_kept_of_a_row(centre):
    """1 / s and power, the mean in two parts, what eps does outside of the root, and what 1 / s lacks."""
    for placement, x in itertools.product(("inside", "outside", "clamp"), NARROW):
        found = of(centre.replace(eps_placement=placement), x=x)
        expected = 2 + 2 * centre.centre_numerator + (placement != "inside") + (x == F32)
        assert found.statistics_lines == expected


@pytest.mark.parametrize(
    ("row", "weight", "bias", "wide"),
    [(BF16, BF16, BF16, False), (F32, None, None, True), (BF16, F32, None, True), (F16, None, F32, True)],
)
def test_sums_are_wide_where_something_is(row, weight, bias, wide):
    assert of(specs.TORCH_LAYER_NORM, x=BF16, row=row, weight=weight, bias=bias).wide == wide


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("eps", [1e-45, 1e-30, 1e-12, 1e-5, 1.0, 1e3, 1e30, -1e-5, 0.0])
def test_a_row_scaled_by_the_largest_power_keeps_its_eps(placement, eps):
    """In units of the power eps stays within float32, and so small a row is nothing beside it."""
    power = of(specs.OLMO.replace(eps=eps, eps_placement=placement)).most_power
    assert math.frexp(power)[0] == 0.5
    scaled = abs(eps) * (power * power if placement == "inside" else power)
    assert scaled < 3e38
    if 1e-37 < abs(eps) < 1e37:
        assert 2.0**-3 < scaled < 2.0**3


@pytest.mark.parametrize(("n", "aligned"), [(1, 1), (33, 1), (24, 8), (1000, 8), (4096, 16), (10, 2)])
def test_rows_begin_at_multiples_of_what_divides_them(n, aligned):
    assert of(specs.OLMO, n=n).aligned == aligned
