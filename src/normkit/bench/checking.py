"""How far the answers of a peer are from the reference in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit import reference
from normkit.bench.cases import DTYPES, Arguments, Case

# Rows are taken a few at a time, as float64 and its graph need several times the memory of what is checked.
_ELEMENTS = 1 << 21


def bound(case: Case) -> float:
    """The relative error up to which an answer counts as right.

    One machine epsilon of the dtype (some four times what correct rounding leaves, so that other orders of casts
    pass), and of float32 for every root of the terms in the longest sum.
    """
    return torch.finfo(DTYPES[case.dtype]).eps + torch.finfo(torch.float32).eps * math.sqrt(max(case.shape))


def errors(case: Case, given: Arguments, answers: dict[str, tuple[Tensor, ...]]) -> dict[str, tuple[float, ...]]:
    """The relative errors of each peer, ||answer - truth|| / ||truth||, one each of `case.answers`.

    Args:
        case: What was asked.
        given: Its tensors.
        answers: What `case.answers` names, by the name of the peer.
    """
    rows = max(1, _ELEMENTS // case.shape[1])
    weight, bias = (None if p is None else p.detach().double() for p in (given.weight, given.bias))
    outputs = 1 + case.adds
    with_backward = case.is_differentiated
    gains = [torch.zeros_like(p) for p in (weight, bias) if p is not None] if with_backward else []
    by_row = outputs + (outputs if with_backward else 0)
    squares = {name: [0.0] * len(found) for name, found in answers.items()}
    sizes = [0.0] * (by_row + len(gains))

    def compare(position: int, truth: Tensor, part: slice) -> None:
        sizes[position] += float(truth.square().sum())
        for name, found in answers.items():
            difference = found[position][part].detach().double() - truth
            squares[name][position] += float(difference.square().sum())

    for start in range(0, case.shape[0], rows):
        part = slice(start, start + rows)
        truth = _truth(case, given, part, weight, bias, with_backward=with_backward)
        for position, value in enumerate(truth[:by_row]):
            compare(position, value, part)
        for total, value in zip(gains, truth[by_row:], strict=True):
            total += value
    for position, total in enumerate(gains, by_row):
        compare(position, total, slice(None))
    return {
        name: tuple(_relative(square, size) for square, size in zip(found, sizes, strict=True))
        for name, found in squares.items()
    }


def _relative(square: float, size: float) -> float:
    # NaN is the worst error there is, and max() would pass over it.
    ratio = math.sqrt(square / size) if size else math.sqrt(square)
    return math.inf if math.isnan(ratio) else ratio


def _truth(
    case: Case, given: Arguments, part: slice, weight: Tensor | None, bias: Tensor | None, *, with_backward: bool
) -> tuple[Tensor, ...]:
    """Outputs of some rows, then the gradients of x, residual, weight and bias."""
    inputs = [value[part].detach().double() for value in (given.x, given.residual) if value is not None]
    if case.adds:
        # The stream is rounded to its dtype before it is normalized, and this is what a gradient passes through.
        rounded = (given.x[part].detach().float() + _residual(given)[part].float()).to(given.x.dtype).double()
    else:
        rounded = inputs[0]
    with torch.enable_grad():
        leaves = [rounded.requires_grad_(), *(p.detach().requires_grad_() for p in (weight, bias) if p is not None)]
        y = reference.forward(rounded, case.spec, leaves[1], leaves[2] if bias is not None else None)
    outputs = (y.detach(), rounded.detach()) if case.adds else (y.detach(),)
    if not with_backward:
        return outputs
    dx, *gains = torch.autograd.grad(y, leaves, given.gradients[0][part].double())
    if case.adds:
        dx = dx + given.gradients[1][part].double()
    return (*outputs, *([dx] * len(inputs)), *gains)


def _residual(given: Arguments) -> Tensor:
    return given.x if given.residual is None else given.residual.detach()
