"""The derivatives by input, gain and bias against float64, and the outputs for as many rows as these take."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit import reference, units
from normkit.testing import agreement
from normkit.testing.norm_under_test import NormUnderTest, RefusedError
from normkit.testing.violation import Violation
from normkit.units import Exact

_ROWS = 1 << 16
_ELEMENTS = 1 << 20
_BLOCK = 1 << 17
"""The rows are so many elements over and over: the truth is that of one block, times their number."""
_NARROW_LIMIT = 64.0
"""Units of a 16-bit dtype where every step of the computation rounds to it."""
_NARROW_SUM_LIMIT = 16.0
"""The same for a gain gradient, and where the row is rounded before it is normalized."""
_LARGE_MEAN = 100.0
_CONFIRM = "compare x.grad with that of normkit.normalize(x.double(), spec, ...)"
_SMALL = 2.0**-6
"""Output gradients of this size keep the sum of 65,536 of them below the largest float16."""


def input_gradient(norm: NormUnderTest, *, has_variance: bool = True) -> Violation | None:
    """dx is that of the formula, also of a norm that is used twice before it is differentiated.

    For ordinary rows and, in float32, for rows that feel eps and for one with a large mean.

    Args:
        norm: The norm, compared with the spec that it was found to be.
        has_variance: Its variance is right under a large mean.
    """
    x = torch.randn(8, *norm.shape[1:], generator=norm.generator)
    x[1::2] += 0.5
    if not norm.is_half:
        x[2] += _LARGE_MEAN if has_variance else 0.0
        x[4:] *= max(norm.felt(), 1e-6)
    x = norm.cast(x)
    dy = norm.normal(8)
    try:
        dx = norm.gradients(x, dy, uses=2)[0]
    except RefusedError as error:
        return _violation("input gradient", f"none ({error})", "norm(x).sum().backward()")
    if dx is None:
        return _violation("input gradient", "none: the output does not depend on x for autograd", _CONFIRM)
    right = units.gradients(x, dy, norm.spec, *norm.parameters_of(norm.spec), plain=True)[0]
    return _wrong_dx(norm, right, dx, norm.words)


def _wrong_dx(norm: NormUnderTest, right: Exact, dx: Tensor, where: str) -> Violation | None:
    limit = _NARROW_LIMIT if norm.stays_narrow else units.plain_limit("dx", norm.dtype)
    if right.largest(dx) <= limit:
        return None
    return _violation("input gradient", f"a relative error of {right.relative(dx):.2g} in {where}", _CONFIRM)


def over_many_rows(norm: NormUnderTest, *, with_gradients: bool = True) -> tuple[Violation, ...]:
    """The output for as many rows as time allows, and the gradients: these are added up in a type that holds the sum.

    Args:
        norm: The norm, compared with the spec that it was found to be.
        with_gradients: Differentiate as well.
    """
    block = norm.samples(_ROWS, _BLOCK)
    copies = max(1, norm.samples(_ROWS, _ELEMENTS) // block)
    x = norm.normal(block, mean=0.25)
    many = x.repeat(copies, *(1,) * (x.dim() - 1))
    try:
        leaf, y = norm.differentiable(many.to(norm.device)) if with_gradients else (many, norm.y(many))
    except RefusedError:
        # The check of the input gradient reports it.
        return ()
    outputs = _wrong_rows(norm, x, y.detach().cpu())
    if outputs is not None or not with_gradients:
        return () if outputs is None else (outputs,)
    # A mean of its own and a share of x: both sums grow with every row, as those of a mean loss do.
    dy = norm.cast(_SMALL * (0.5 + x.float() + torch.randn(x.shape, generator=norm.generator)))
    dx, dweight, dbias = units.gradients(x, dy, norm.spec, *norm.parameters_of(norm.spec), plain=True)
    try:
        by_x, by_weight, by_bias = norm.gradients_of(leaf, y, dy.repeat(copies, *(1,) * (x.dim() - 1)))
    except RefusedError:
        # Likewise.
        return ()
    rows = x.numel() * copies // norm.row_length
    where = f"{norm.words} over {rows:,} rows"
    parts = () if by_x is None else torch.split(by_x, block)
    # Errors of a row that is rounded before it is normalized do not average out.
    is_rounded = norm.stays_narrow or (norm.is_half and norm.spec.gain.is_before)
    limit = _NARROW_SUM_LIMIT if is_rounded else units.plain_limit("sum", norm.dtype, rows)
    found = [seen for part in parts if (seen := _wrong_dx(norm, dx, part, where)) is not None][:1]
    for name, right, given in (("gain gradient", dweight, by_weight), ("bias gradient", dbias, by_bias)):
        if right is not None and (wrong := _wrong(right, given, copies, limit)):
            words = f"{wrong} over {rows:,} rows in {norm.words}"
            confirm = f"norm(x).sum().backward() for {rows:,} rows, and compare with the sums in float64"
            found.append(_violation(name, words, confirm))
    return tuple(found)


def _wrong_rows(norm: NormUnderTest, block: Tensor, y: Tensor) -> Violation | None:
    """The violation of outputs for a block over and over, if any is wrong: fewer rows have been compared before."""
    expected, limit = norm.expected(block), agreement.limit(norm)
    parts = torch.split(y.to(norm.dtype) if norm.is_half else y, len(block))
    wrong = torch.cat([reference.to_rows(expected.units(part), norm.spec).amax(-1).flatten() > limit for part in parts])
    if not bool(wrong.any()):
        return None
    first, rows = int(wrong.nonzero()[0]), len(wrong)
    sample = slice(place := first // (rows // len(y)) % len(block), place + 1)
    alone = norm.y(block[sample])
    is_alone = Exact(expected.value[sample], expected.size[sample]).largest(alone.to(parts[0].dtype)) > limit
    found = f"{int(wrong.sum()):,} of {rows:,} rows wrong in {norm.words}, the first of them row {first:,}"
    return Violation(
        check="batch position" if not is_alone else "casts" if norm.is_half else "formula",
        expected="the formula's output for each row of a batch, however many there are",
        found=f"{found}{', alone as well' if is_alone else ''}",
        confirm=f"compare row {first:,} of norm(x) for x of {rows:,} rows with what norm gives for that row alone",
    )


def _wrong(block: Exact, given: Tensor | None, copies: int, limit: float) -> str:
    """How a sum over `copies` blocks is wrong, in words; nothing if it is not."""
    if given is None:
        return "none: the output does not depend on it for autograd"
    # Each copy of a row is rounded like the others: these errors add up as the terms do.
    right = Exact(copies * block.value, copies * block.size)
    if right.largest(given) <= limit:
        return ""
    worst = int(right.units(given).argmax())
    values = f"{given.flatten()[worst]:.4g} in place of {right.value.flatten()[worst]:.4g}"
    return f"a relative error of {right.relative(given):.2g} ({values})"


def _violation(check: str, found: str, confirm: str) -> Violation:
    of = {"input gradient": "by x", "gain gradient": "by the gain", "bias gradient": "by the bias"}[check]
    return Violation(check=check, expected=f"the formula's derivative {of}", found=found, confirm=confirm)
