"""A norm fused with an addition: what leaves as the residual, and whether the sum is rounded before the statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from normkit import reference
from normkit.testing import agreement
from normkit.testing.norm_under_test import NormUnderTest, RefusedError
from normkit.testing.violation import Violation
from normkit.text import dtype_name

ResidualSum = Literal["rounded", "wide"]
SUMS: dict[ResidualSum, str] = {
    "rounded": "the sum rounded to the residual's dtype before the statistics",
    "wide": "the statistics of the sum in float32, before it is rounded",
}
"""The normalized quantity, in words."""

_SAMPLES = 64
_RESIDUAL = 3.0
"""Scale of the residual: a stream is larger than what is added to it."""


class Addition:
    """A fused norm, `norm(x, residual, ...) -> (y, new residual)`, called as a norm of x.

    Args:
        call: call(norm, x, residual, ...) in place of norm(x, residual, ...).
        asked: What should be normalized.
    """

    def __init__(self, call: Callable[..., Any] | None, asked: ResidualSum) -> None:
        self._call, self.asked = call, asked
        self._residual: Tensor | None = None
        self._left: Tensor | None = None

    def __deepcopy__(self, _memo: object) -> Addition:
        """Itself: a copy of the norm hands its residual on to here."""
        return self

    def __call__(self, norm: Callable[..., Any], x: Tensor, *parameters: Tensor) -> Any:
        """y for x; what it is added to is zero, but for `of`."""
        residual = torch.zeros_like(x) if self._residual is None else self._residual.clone()
        given = (x, residual, *parameters)
        found = norm(*given) if self._call is None else self._call(norm, *given)
        if not isinstance(found, (tuple, list)) or len(found) != 2 or not all(isinstance(y, Tensor) for y in found):
            raise TypeError(f"expected a pair (y, new residual), got a {type(found).__name__}")
        self._left = found[1]
        return found[0]

    def of(self, norm: NormUnderTest, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """y and the new residual, on the CPU.

        Raises:
            RefusedError: If the norm raises an error, or returns no pair of tensors of x's shape.
        """
        self._residual = residual.to(norm.device)
        try:
            y = norm.y(x)
        finally:
            self._residual = None
        assert self._left is not None
        if self._left.shape != x.shape:
            raise RefusedError(f"a new residual of shape {tuple(self._left.shape)}")
        return y, self._left.detach().cpu()


def violations(norm: NormUnderTest, addition: Addition) -> Iterator[Violation]:
    """In what way a fused norm, whose formula is that of its spec where the residual is zero, is not as asked."""
    x, residual = norm.normal(_SAMPLES), norm.cast(_RESIDUAL * norm.normal(_SAMPLES))
    y, left = addition.of(norm, x, residual)
    confirm = f"y, new = norm(x, residual) for x = torch.randn{tuple(x.shape)} and a residual {_RESIDUAL:g} times that"
    total = reference.added(x, residual)
    share = float((left == total).double().mean())
    if left.dtype != residual.dtype:
        yield _of_dtype(left.dtype, residual.dtype, norm.words, confirm)
    elif share < agreement.MATCHED:
        known = (("the residual as it was", residual), ("y", y), ("x", x))
        same = (name for name, tensor in known if torch.equal(left, tensor.to(left.dtype)))
        yield Violation(
            check="residual",
            expected="x + residual, rounded to the residual's dtype",
            found=next(same, f"{share:.1%} of it so"),
            confirm=confirm,
        )
    yield from _of_sum(norm, y, x, residual, addition.asked, confirm)
    # Only a true sum is tried: any other tensor keeps the dtype that it has.
    if norm.is_half and share >= agreement.MATCHED:
        try:
            _, left = addition.of(norm, x, residual.float())
        except RefusedError:  # not every norm takes a wider residual
            return
        if left.dtype != torch.float32:
            yield _of_dtype(left.dtype, torch.float32, norm.words, confirm.replace("residual)", "residual.float())"))


def _of_sum(
    norm: NormUnderTest, y: Tensor, x: Tensor, residual: Tensor, asked: ResidualSum, confirm: str
) -> Iterator[Violation]:
    """Whether y is that of the sum: in 16 bits that of one of the two sums, bit for bit."""
    total = reference.added(x, residual)
    if not norm.is_half or norm.stays_narrow:
        errors = norm.expected(total).units(y.to(norm.dtype))
        if float(errors.max()) > agreement.limit(norm):
            alone = norm.expected(x).units(y.to(norm.dtype))
            found = "that of x alone" if float(alone.max()) <= agreement.limit(norm) else "other numbers"
            yield Violation(
                check="residual sum", expected="y of x + residual", found=f"{found} ({norm.words})", confirm=confirm
            )
        return
    parameters = norm.parameters_of(norm.spec)
    programs: dict[ResidualSum, Tensor] = {
        "rounded": reference.forward(total, norm.spec, *parameters, input_dtype=norm.dtype),
        "wide": reference.forward(x.float() + residual.float(), norm.spec, *parameters, input_dtype=norm.dtype),
    }
    # An output of another dtype is named as such.
    shares = {
        name: float((y.to(norm.dtype) == right.to(norm.dtype)).double().mean()) for name, right in programs.items()
    }
    if shares[asked] >= agreement.MATCHED:
        return
    best = max(shares, key=lambda name: shares[name])
    found = SUMS[best] if shares[best] >= agreement.MATCHED else f"{shares[asked]:.1%} of the outputs so"
    yield Violation(check="residual sum", expected=SUMS[asked], found=f"{found} ({norm.words})", confirm=confirm)


def _of_dtype(found: torch.dtype, expected: torch.dtype, words: str, confirm: str) -> Violation:
    given = f"{words} input and {dtype_name(expected)} residual"
    return Violation(
        check="residual dtype",
        expected=f"a new residual in {dtype_name(expected)} for {given}",
        found=dtype_name(found),
        confirm=confirm,
    )
