"""The numbers contract in one place: inputs, what normkit makes of them, and how many units it may err by.

`normkit.units` has the float64 truth and the unit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import normkit
from helpers import PRESETS
from normkit import NormSpec, reference, units
from normkit.units import Exact, spacing

HALF = (torch.bfloat16, torch.float16)
# Fraction of a 16-bit output that must be the correctly rounded value of the spec's own cast program.
ROUNDED = {torch.bfloat16: 0.9999, torch.float16: 0.9995}
# Four for float32. The float64 truth is itself float64 arithmetic: two of those are compared, neither better.
UNITS = {torch.float32: 4.0, torch.float64: 16.0}
# Of a gain or bias gradient: multiplied and added in float64 and rounded once. In float64 again two such sums meet.
GAIN_UNITS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 1.0, torch.float64: 16.0}
# What one row is normalized by, alone: presets along the last axis.
ROWS = {name: spec for name, spec in PRESETS.items() if spec.axes == (-1,)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Case(NamedTuple):
    """What goes in."""

    x: Tensor
    dy: Tensor
    weight: Tensor | None
    bias: Tensor | None


class Outcome(NamedTuple):
    """Output and gradients, None where there is no parameter; or the sizes of their terms."""

    y: Tensor
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


class Calls(TorchDispatchMode):
    """The names of those of normkit's operators that computed something inside: the kernels did, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # One that refused its arguments computed nothing.
        if function.namespace == "normkit":
            self.names.append(function._opname)
        return result


def has_closed_casts(spec: NormSpec, dtype: torch.dtype) -> bool:
    """Whether derivatives that take every cast as the identity are promised for this spec and input."""
    return (
        spec.weight_placement == "after"
        and spec.centre_numerator == spec.centre_statistics
        and (spec.statistics_dtype == "float32" or dtype not in HALF)
    )


def draw(
    spec: NormSpec,
    *sizes: int,
    dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None,
    mean: float = 0.0,
    scale: float = 1.0,
) -> Case:
    """Random rows about a mean, and gain and bias about what is neutral."""
    parameter_dtype = parameter_dtype or dtype
    n = sizes[-1]
    x = ((torch.randn(*sizes, dtype=torch.float64) + mean) * scale).to(dtype)
    weight = (1.0 - spec.weight_offset + 0.3 * torch.randn(n)).to(parameter_dtype) if spec.has_weight else None
    bias = torch.randn(n).to(parameter_dtype) if spec.has_bias else None
    dy = torch.randn(*sizes).to(reference.output_dtype(dtype, spec, weight, bias))
    return Case(x, dy, weight, bias)


def outcome(spec: NormSpec, case: Case) -> Outcome:
    """Output and gradients of `normkit.normalize`, whichever implementation it takes."""
    given = [
        None if tensor is None else tensor.detach().requires_grad_() for tensor in (case.x, case.weight, case.bias)
    ]
    y = normkit.normalize(given[0], spec, *given[1:])
    gradients = iter(torch.autograd.grad(y, [tensor for tensor in given if tensor is not None], case.dy))
    return Outcome(y.detach(), *(None if tensor is None else next(gradients) for tensor in given))


def added(spec: NormSpec, case: Case, residual: Tensor, d_new: Tensor) -> list[Tensor | None]:
    """y, the new stream, and the gradients of x, residual, weight and bias, of `normkit.add_normalize`."""
    given = [
        None if tensor is None else tensor.detach().requires_grad_()
        for tensor in (case.x, residual, case.weight, case.bias)
    ]
    y, new = normkit.add_normalize(given[0], given[1], spec, *given[2:])
    leaves = [tensor for tensor in given if tensor is not None]
    gradients = iter(torch.autograd.grad([y, new], leaves, [case.dy, d_new]))
    return [y.detach(), new.detach(), *(None if tensor is None else next(gradients) for tensor in given)]


def truth(spec: NormSpec, case: Case) -> tuple[Outcome, Outcome]:
    """Output and gradients in float64, every cast taken as the identity; and the sizes of their terms."""
    found = (
        units.output(case.x, spec, case.weight, case.bias),
        *units.gradients(case.x, case.dy, spec, case.weight, case.bias),
    )
    values, sizes = zip(*((None, None) if each is None else each for each in found), strict=True)
    return Outcome(*values), Outcome(*sizes)


def assert_within(actual: Tensor, expected: Tensor, size: Tensor, allowed: float, what: str = "") -> None:
    """Assert that every element that is a number of the dtype is within so many units; NaN in the same places."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN in other places"
    error = Exact(expected.double(), size.expand_as(expected)).largest(actual)
    assert error <= allowed, f"{what}: {error:.3g} u where {allowed} u are allowed"


def assert_alone(spec: NormSpec, case: Case, odd: float | str) -> None:
    """Assert that an odd number in row 2 of 5, infinities of both signs if "both", changes nothing in the others."""
    n = case.x.shape[-1]
    broken = case.x.clone()
    broken[2, n // 2] = math.inf if odd == "both" else odd
    broken[2, -1] = -math.inf if odd == "both" else broken[2, -1]
    ours, clean = outcome(spec, case._replace(x=broken)), outcome(spec, case)
    others = [0, 1, 3, 4]
    assert torch.equal(ours.y[others], clean.y[others])
    assert torch.equal(ours.x[others], clean.x[others])
    assert torch.equal(ours.y.isnan(), reference.forward(broken, spec, case.weight, case.bias).isnan())
    # A row with an infinity is divided by one: its other gradients may be 0 / inf or NaN, but not a plausible number.
    assert (ours.x[2].isnan() | (ours.x[2] == 0)).all()
    assert ours.x[2].isnan().any()
    assert ours.weight.isnan().any()
    if case.bias is not None:
        assert torch.equal(ours.bias, clean.bias)


def roundings(spec: NormSpec, case: Case) -> set[torch.dtype]:
    """The 16-bit dtypes that an output is rounded to on its way."""
    output = reference.output_dtype(case.x.dtype, spec, case.weight, case.bias)
    return spec.casts.narrow_dtypes(case.x.dtype, None if case.weight is None else case.weight.dtype, output)


def assert_rounded(actual: Tensor, program: Tensor, spec: NormSpec, casts: set[torch.dtype], size: Tensor) -> None:
    """Assert that 16-bit outputs are `program`'s, but for a few near-ties that fall to the other side.

    A near-tie before the gain is one ulp of the normalized row; the product can then be two away from the program's.
    To a near-tie belongs what float32 arithmetic leaves of the terms where they cancel.
    """
    assert actual.dtype == program.dtype, f"dtype {actual.dtype}, expected {program.dtype}"
    others, fraction = int((actual != program).sum()), (actual == program).double().mean().item()
    # Of a few thousand elements one is more than the fraction allows.
    assert others <= 1 or fraction >= min(ROUNDED[dtype] for dtype in casts), f"only {fraction:.6f} correctly rounded"
    error, value = (actual.double() - program.double()).abs(), program.double().abs()
    step = max(torch.finfo(dtype).eps for dtype in casts) * (value if spec.cast == "late" else 2 * size)
    bound = step + 4 * torch.finfo(torch.float32).eps * size + max(map(spacing, casts))
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} of what one ulp is"


def assert_forward(spec, case):
    """The contract for any dtype: rounded once a cast where a cast is to 16 bits, else four units."""
    (true, size), casts = truth(spec, case), roundings(spec, case)
    y = normkit.normalize(case.x, spec, case.weight, case.bias)
    program = reference.forward(case.x, spec, case.weight, case.bias)
    if casts:
        assert_rounded(y, program, spec, casts, size.y)
    else:
        assert y.dtype == program.dtype
        assert_within(y, true.y, size.y, UNITS[y.dtype], "y")
    return y, true.y


def assert_input_gradient(actual, expected, size):
    """Rounded once: four units of the arithmetic, and in 16 bits half an ulp of the value on top."""
    if actual.dtype not in HALF:
        assert_within(actual, expected, size, UNITS[actual.dtype], "dx")
        return
    step = 0.5 * torch.finfo(actual.dtype).eps * expected.abs() + spacing(actual.dtype)
    bound = step + 4 * torch.finfo(torch.float32).eps * size
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"dx: {(error / bound).max():.3g} of what rounding once leaves"


def assert_parameter_gradients(case, ours, true, size):
    """Those of gain and bias, within the units of their dtype."""
    for what in ("weight", "bias"):
        gradient, parameter = getattr(ours, what), getattr(case, what)
        if gradient is not None:
            assert gradient.dtype == parameter.dtype
            assert_within(gradient, getattr(true, what), getattr(size, what), GAIN_UNITS[parameter.dtype], f"d{what}")


def assert_gradients(spec, case):
    """Everything that comes back, each within the units of its dtype."""
    ours, (true, size) = outcome(spec, case), truth(spec, case)
    assert_input_gradient(ours.x, true.x, size.x)
    assert_parameter_gradients(case, ours, true, size)
    return ours, true
