"""The numbers contract in one place: what is measured, the float64 truth, and the unit it is measured in.

The unit u of an element is the machine epsilon of its dtype times the root sum of squares of the terms that are added
to form it. Where a term is itself a sum (the mean of the deviations, the means inside dx), that sum's own terms belong
to it: a row of n standard deviations leaves 1 / sqrt(n) of one in its mean. A sum of many terms of one sign is larger
than their root sum of squares, and even its correctly rounded value errs in proportion to itself: so where |element|
is the larger of the two, it takes the place of the root.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import normkit
from helpers import PRESETS
from normkit import NormSpec, reference

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
    """What comes out; None where there is no parameter. Also used for the terms of each."""

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


def _wide(spec: NormSpec, case: Case) -> Case:
    gain = None
    if case.weight is not None:
        gain = reference.effective_weight(case.weight, spec, torch.float64).double()
    return Case(case.x.double(), case.dy.double(), gain, None if case.bias is None else case.bias.double())


def truth(spec: NormSpec, case: Case) -> Outcome:
    """Output and gradients in float64, every cast taken as the identity."""
    exact, (x, dy, weight, bias) = reference.unrounded(spec, case.x), _wide(spec, case)
    return Outcome(reference.forward(x, exact, weight, bias), *reference.backward(dy, x, exact, weight, bias))


def terms(spec: NormSpec, case: Case, of: Outcome) -> Outcome:
    """The larger of each element of `of`, the truth, and the root sum of squares of what is added to form it."""
    exact, (x, dy, weight, bias) = reference.unrounded(spec, case.x), _wide(spec, case)
    n = x.shape[-1]
    multiplier = math.sqrt(n) if spec.multiplier == "sqrt_n" else 1.0
    scale = reference.statistics(x.unsqueeze(-2), exact, exact.eps).scale.squeeze(-2)
    bare = exact.replace(has_weight=False, has_bias=False, multiplier="one", weight_placement="after")
    row = reference.forward(x, bare)
    gain = torch.ones((), dtype=torch.float64) if weight is None else weight
    own = row.square().mean(-1, keepdim=True) / n if spec.centre_numerator else torch.zeros_like(scale)
    y = (multiplier * gain).square() * (row.square() + own)
    h = dy * gain * multiplier
    direct = h / scale
    centre = direct.mean(-1, keepdim=True) if spec.centre_numerator else torch.zeros_like(scale)
    through_scale = direct - centre - of.x
    divisor = 1 if spec.reduction == "sum" else n - spec.correction
    in_centre = direct.square().mean(-1, keepdim=True) / n if spec.centre_numerator else torch.zeros_like(scale)
    # How much more than the root under it the scale moves with the row: not at all where a clamp holds it.
    ratio = {"inside": 1.0, "outside": scale / (scale - exact.eps), "clamp": (scale > exact.eps).double()}
    slope = row * ratio[spec.eps_placement] / divisor
    in_scale = slope.square() * (direct * row).square().sum(-1, keepdim=True)
    dx = direct.square() + centre.square() + through_scale.square() + in_centre + in_scale
    dweight = ((dy * multiplier).square() * (row.square() + own)).flatten(0, -2).sum(0)
    dbias = dy.square().flatten(0, -2).sum(0)
    squares = Outcome(
        y if bias is None else y + bias.square(),
        dx,
        None if weight is None else dweight,
        None if bias is None else dbias,
    )
    return Outcome(
        *(
            None if true is None else torch.maximum(square.sqrt(), true.abs())
            for square, true in zip(squares, of, strict=True)
        )
    )


def row_terms(true: Tensor, spec: NormSpec) -> Tensor:
    """The terms of a normalized row without gain and bias, by the same rule: no element is larger than they are."""
    own = true.square().mean(-1, keepdim=True) / true.shape[-1] if spec.centre_numerator else 0.0
    return (true.square() + own).sqrt()


def below_normal(dtype: torch.dtype) -> float:
    """The spacing of the subnormal numbers of a dtype: no error can be asked to be smaller."""
    information = torch.finfo(dtype)
    return information.smallest_normal * information.eps


def assert_within(actual: Tensor, expected: Tensor, size: Tensor, units: float, what: str = "") -> None:
    """Assert |actual - expected| <= units * eps * size, eps that of actual's dtype; NaN and infinities in place."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    dtype, actual = actual.dtype, actual.double()
    finite = expected.abs() <= torch.finfo(dtype).max
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN in other places"
    size = size.expand_as(expected)
    # To pick the finite ones takes longer than all the rest, and they are nearly always all.
    if not finite.all():
        actual, expected, size = actual[finite], expected[finite], size[finite]
    assert actual.isfinite().all(), f"{what}: not finite where a finite number was expected"
    unit = torch.finfo(dtype).eps * size + below_normal(dtype)
    error = (actual - expected).abs() / unit
    if error.numel():
        assert error.max() <= units, f"{what}: {error.max():.3g} u where {units} u are allowed"


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
    x, weight = case.x.dtype, None if case.weight is None else case.weight.dtype
    casts = {reference.output_dtype(x, spec, case.weight, case.bias)}
    if spec.cast in ("early", "none"):
        casts.add(x)
    if spec.cast == "weight" and weight is not None:
        casts.add(weight)
    return casts & set(HALF)


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
    bound = step + 4 * torch.finfo(torch.float32).eps * size + max(map(below_normal, casts))
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} of what one ulp is"


def assert_forward(spec, case):
    """The contract for any dtype: rounded once a cast where a cast is to 16 bits, else four units."""
    true = truth(spec, case)
    size, casts = terms(spec, case, true).y, roundings(spec, case)
    y = normkit.normalize(case.x, spec, case.weight, case.bias)
    program = reference.forward(case.x, spec, case.weight, case.bias)
    if casts:
        assert_rounded(y, program, spec, casts, size)
    else:
        assert y.dtype == program.dtype
        assert_within(y, true.y, size, UNITS[y.dtype], "y")
    return y, true.y


def assert_input_gradient(actual, expected, size):
    """Rounded once: four units of the arithmetic, and in 16 bits half an ulp of the value on top."""
    if actual.dtype not in HALF:
        assert_within(actual, expected, size, UNITS[actual.dtype], "dx")
        return
    step = 0.5 * torch.finfo(actual.dtype).eps * expected.abs() + below_normal(actual.dtype)
    bound = step + 4 * torch.finfo(torch.float32).eps * size
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"dx: {(error / bound).max():.3g} of what rounding once leaves"


def assert_gradients(spec, case):
    """Everything that comes back, each within the units of its dtype."""
    ours, true = outcome(spec, case), truth(spec, case)
    size = terms(spec, case, true)
    assert_input_gradient(ours.x, true.x, size.x)
    for what in ("weight", "bias"):
        if getattr(ours, what) is not None:
            gradient, parameter = getattr(ours, what), getattr(case, what)
            assert gradient.dtype == parameter.dtype
            assert_within(gradient, getattr(true, what), getattr(size, what), GAIN_UNITS[parameter.dtype], f"d{what}")
    return ours, true
