"""The output against the spec: its formula at every scale, its variance under a large mean, its casts, its dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normkit import reference, units
from normkit.testing.norm_under_test import NormUnderTest, RefusedError
from normkit.testing.violation import Violation
from normkit.text import dtype_name

LIMIT = units.plain_limit("y", torch.float32)
NARROW_LIMIT = 16.0
"""Units of a 16-bit dtype where every step of the computation rounds to it."""
MATCHED = 0.99
"""Share of 16-bit outputs bit for bit the program's. Float32 arithmetic flips 1e-4 of them in bfloat16 and 3e-4 in
float16, where the truth is a near-tie; a wrong program moves 4 % and more."""
_ALONG = 0.99
"""The cosine of what leaves and what should: rounding to 8 bits leaves 0.9999, a row of which half is lost 0.7."""
_ELEMENTS = 1 << 14
_LARGE = 1000.0
"""Its square is beyond the largest float16."""
_RATIOS = (1e2, 1e3, 1e4)


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """The rows on which the output is not that of the formula."""

    at: Literal["large", "length", "small"]
    """Either "large" rows, which are too long to feel eps; or only small rows, which differ in their "length" alone, as
    under another eps, or in other ways as well ("small")."""
    found: str
    """The worst sample, in words."""
    confirm: str
    """A call that shows it."""


def limit(norm: NormUnderTest) -> float:
    """How many units an output may err by in this dtype."""
    return NARROW_LIMIT if norm.stays_narrow else units.plain_limit("y", norm.dtype)


def misfit(norm: NormUnderTest) -> Misfit | None:
    """Compare outputs with the formula: for large rows, two of them spiky, and from 1 down to where eps is felt."""
    # Eps is felt by none of the first four. The squares of the others stay below the largest float16.
    far = torch.tensor([10.0, 30.0, 100.0, 100.0]) * (1.0 if norm.is_half else 1000.0)
    if norm.stays_narrow:
        # Squares stay below the largest float16 there too.
        far *= 0.1
    # Code that stays in 16 bits rounds the squares of small rows away, each in its own way.
    near = torch.empty(0) if norm.stays_narrow else torch.logspace(-10, 0, 11)
    if len(near) and norm.felt() > 0:
        near = torch.cat([near, norm.felt() * torch.logspace(-2, 1, 7)])
    # Smaller rows are zero in float16.
    near = near[near > 64 * torch.finfo(norm.dtype).smallest_normal * torch.finfo(norm.dtype).eps]
    scales = torch.cat([far, near])
    x = torch.randn(len(scales), *norm.shape[1:], generator=norm.generator)
    x[1] += 0.5
    x[2] -= 0.5
    # The largest outputs that there are: sqrt(n) times the largest gain.
    spikes, largest = range(len(far) - 2, len(far)), _largest_gain(norm)
    rest = 1.0 if norm.stays_narrow else 0.01
    for row, sign in zip(spikes, (1, -1), strict=True):
        x[row] *= rest
        x[row].view(-1)[largest] = sign * 3.0
    x = norm.cast(x * scales.reshape(-1, *(1,) * (x.dim() - 1)))
    expected, y = norm.expected(x), norm.y(x)
    # An output of another dtype is named as such, not as badly rounded.
    errors = expected.units(y.to(norm.dtype) if norm.is_half else y).flatten(1).amax(1)
    if float(errors.max()) <= limit(norm):
        return None
    missed = (errors > limit(norm)).nonzero().flatten().tolist()
    if set(missed) <= set(spikes):
        worst = int(errors[spikes[0] :][: len(spikes)].argmax()) + spikes[0]
        pair = _apart(float(y[worst].flatten()[largest]), float(expected.value[worst].flatten()[largest]))
        given = f"{rest * scales[worst]:.2g} * torch.randn{(1, *norm.shape[1:])}"
        given += f" with {x[worst].flatten()[largest]:g} as element {largest}"
        found = f"an output of {pair} where a row is long in one entry: it saturates"
    else:
        worst = int(errors.argmax())
        pair = _apart(*(float(part[worst].double().square().mean().sqrt()) for part in (y, expected.value)))
        given = f"{scales[worst]:.2g} * torch.randn{(1, *norm.shape[1:])}"
        found = f"outputs of root mean square {pair} for x = {given}"
    return Misfit(
        at="large" if missed[0] < len(far) else "length" if _is_along(norm, x[worst : worst + 1]) else "small",
        found=found,
        confirm=f"compare norm(x) with normkit.normalize(x, spec, ...) for x = {given}",
    )


def _largest_gain(norm: NormUnderTest) -> int:
    """The index in a sample, flattened, at which the largest gain acts."""
    if norm.weight is None:
        return 0
    weight = norm.spec.rows.aligned(norm.weight.double().abs(), torch.empty(norm.shape, device="meta"))
    return int(weight.expand(norm.shape[1:]).flatten().argmax())


def _is_along(norm: NormUnderTest, x: Tensor) -> bool:
    """Whether outputs are those of the formula but for their length."""
    odd = (norm.y(x).double() - norm.y(-x).double()).flatten()
    expected = (norm.expected(x).value - norm.expected(-x).value).flatten()
    return float(torch.cosine_similarity(odd, expected, dim=0)) > _ALONG


def _apart(found: float, right: float) -> str:
    """Two numbers with as many digits as tell them apart."""
    digits = next((digits for digits in range(4, 17) if f"{found:.{digits}g}" != f"{right:.{digits}g}"), 4)
    return f"{found:.{digits}g} in place of {right:.{digits}g}"


def degree(norm: NormUnderTest) -> float:
    """The power of the input that ordinary outputs grow as, the bias apart: nearly 0 for a norm."""
    x = 4 * norm.normal(4)
    # Larger ones could vanish beside the bias.
    odd = [norm.y(scale * x).double() - norm.y(-scale * x).double() for scale in (1, 4)]
    near, far = (float(part.square().mean().sqrt()) for part in odd)
    return math.log2(far / near) / 2 if near > 0 and far > 0 and math.isfinite(near + far) else 0.0


def cancelling_variance(norm: NormUnderTest) -> Violation | None:
    """Under a mean of R deviations the error is that of a rounded mean (R epsilons), not of a rounded square (R**2)."""
    if norm.is_half or not norm.spec.centring.statistics:
        return None
    noise = torch.randn(len(_RATIOS), *norm.shape[1:], generator=norm.generator)
    ratios = torch.tensor(_RATIOS).reshape(-1, *(1,) * (noise.dim() - 1))
    x = norm.cast(noise + ratios)
    # The size of what is added has the mean in it: so many roundings of the mean are allowed, not of its square.
    errors = norm.truth(x).units(norm.y(x)).flatten(1).amax(1)
    bad = (errors > LIMIT).nonzero().flatten().tolist()
    if not bad:
        return None
    first = bad[0]
    return Violation(
        check="cancelling variance",
        expected="the deviations squared after the mean is subtracted: an error in proportion to mean / deviation",
        found=f"an error {errors[first]:.2g} times the rounding of a mean of {_RATIOS[first]:g} deviations, "
        "as E[x^2] - E[x]^2 makes it",
        confirm="compare norm(x) with norm(x - mean) for "
        f"x = torch.randn{(1, *norm.shape[1:])} + {_RATIOS[first]:g} and its mean",
    )


def large_rows(norm: NormUnderTest) -> Violation | None:
    """Rows whose squares overflow float16 are not infinite, NaN, or as if they were zero."""
    if norm.dtype != torch.float16 or norm.stays_narrow:
        return None
    x = norm.cast(_LARGE * norm.normal(4).sign() * (1 + torch.rand(4, *norm.shape[1:], generator=norm.generator)))
    plus, minus = norm.y(x), norm.y(-x)
    wrong = "as for a zero row" if bool((plus == minus).double().mean() > 0.5) else ""
    if not bool(plus.isfinite().all()):
        wrong = "not finite"
    if not wrong:
        return None
    return Violation(
        check="statistics dtype",
        expected="statistics in float32",
        found=f"outputs {wrong} for rows of magnitude {_LARGE:g}, whose squares overflow in float16",
        confirm=f"norm.half()({_LARGE:g} * torch.randn{(1, *norm.shape[1:])}.half())",
    )


def match_rate(norm: NormUnderTest) -> float:
    """Share of the outputs of ordinary rows that are the program's, bit for bit; in a float32 output to 16 units."""
    x = norm.normal(max(1, norm.samples(_ELEMENTS, _ELEMENTS)), mean=0.25)
    y, program = norm.y(x), norm.program(x)
    if y.dtype != program.dtype:
        # That is named as such; here it counts as rounded once more.
        y, program = y.to(norm.dtype), program.to(norm.dtype)
    if y.dtype in (torch.float32, torch.float64):
        difference = (y.double() - program.double()).abs()
        size = norm.truth(x).size
        return float((difference <= LIMIT * torch.finfo(torch.float32).eps * size).double().mean())
    return float((y.double() == program.double()).double().mean())


def output_dtype(norm: NormUnderTest) -> Violation | None:
    """The output has the dtype that the spec says."""
    expected = reference.output_dtype(norm.dtype, norm.spec, *norm.parameters_of(norm.spec))
    found = norm.y(norm.normal(1)).dtype
    if found == expected:
        return None
    parameters = {dtype_name(part.dtype) for part in (norm.weight, norm.bias) if part is not None}
    given = f"{norm.words} input and {' and '.join(parameters) or 'no'} parameters"
    return Violation(
        check="output dtype",
        expected=f"{dtype_name(expected)} for {given}",
        found=dtype_name(found),
        confirm=f"norm(x).dtype for {given}",
    )


def difference_in_bits(norm: NormUnderTest) -> str | None:
    """In words how 16-bit outputs miss the program's; None where they do not."""
    if (seen := misfit(norm)) is not None and not _matches(norm):
        return f"{match_rate(norm):.1%} of the outputs so, and {seen.found}"
    if seen is not None:
        return seen.found
    return None if norm.stays_narrow or _matches(norm) else f"{match_rate(norm):.1%} of the outputs so"


def difference_with_wide_parameters(norm: NormUnderTest) -> str | None:
    """The same for 16-bit inputs and float32 parameters; None also where the norm does not take them."""
    try:
        if norm.stays_narrow or _matches(norm):
            return None
        return f"{match_rate(norm):.1%} of the outputs so with float32 parameters"
    except RefusedError:
        return None


def _matches(norm: NormUnderTest) -> bool:
    return match_rate(norm) >= MATCHED
