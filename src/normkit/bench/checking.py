"""How far the answers of a peer are from the reference in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit import reference
from normkit.bench.cases import DTYPES, Arguments, Case

# Rows are taken a few at a time, as float64 and its graph need several times the memory of what is checked; more of
# them on a GPU, where each operation costs its launch.
_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
_CHECKED = 1 << 26


def checked_rows(case: Case) -> Tensor:
    """Rows whose outputs and input gradients are held against the truth.

    All of them, up to 2^26 elements. Of larger cases the first, the last and a random sample from a fixed seed, of that
    size together: then the answers of six peers fit into memory beside their inputs. Gradients of gain and bias are
    sums over all rows, and are checked as such at every size.
    """
    rows, features = case.shape
    count = max(1, _CHECKED // features)
    if count >= rows:
        return torch.arange(rows)
    is_checked = torch.zeros(rows, dtype=torch.bool)
    is_checked[torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:count]] = True
    is_checked[[0, -1]] = True
    return is_checked.nonzero().flatten()


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
        answers: What `case.answers` names, by the name of the peer; of outputs and input gradients the checked rows.
    """
    device = given.x.device
    rows = max(1, _ELEMENTS[device.type] // case.shape[1])
    weight, bias = (None if p is None else p.detach().double() for p in (given.weight, given.bias))
    gains = [torch.zeros_like(p) for p in (weight, bias) if p is not None] if case.is_differentiated else []
    squares = {name: torch.zeros(len(found), dtype=torch.float64, device=device) for name, found in answers.items()}
    sizes = torch.zeros(len(case.answers), dtype=torch.float64, device=device)

    def compare(position: int, truth: Tensor, part: slice) -> None:
        sizes[position] += truth.square().sum()
        for name, found in answers.items():
            difference = found[position][part].detach().double() - truth
            squares[name][position] += difference.square().sum()

    checked = checked_rows(case)
    start = 0
    for part in torch.split(checked.to(device), rows):
        truth = _truth(case, given, part, weight, bias)
        for position, value in enumerate(truth[: case.sheets]):
            compare(position, value, slice(start, start + len(part)))
        for total, value in zip(gains, truth[case.sheets :], strict=True):
            total += value
        start += len(part)
    if gains:
        is_left = torch.ones(case.shape[0], dtype=torch.bool).index_fill(0, checked, False)
        for part in torch.split(is_left.nonzero().flatten().to(device), rows):
            for total, value in zip(gains, _truth(case, given, part, weight, bias)[case.sheets :], strict=True):
                total += value
    for position, total in enumerate(gains, case.sheets):
        compare(position, total, slice(None))
    scale = sizes.tolist()
    return {
        name: tuple(_relative(square, size) for square, size in zip(found.tolist(), scale, strict=True))
        for name, found in squares.items()
    }


def _relative(square: float, size: float) -> float:
    # NaN is the worst error there is, and max() would pass over it.
    ratio = math.sqrt(square / size) if size else math.sqrt(square)
    return math.inf if math.isnan(ratio) else ratio


def _truth(
    case: Case, given: Arguments, part: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Outputs of some rows, then the gradients of x, residual, weight and bias."""
    inputs = [value.detach()[part].double() for value in (given.x, given.residual) if value is not None]
    if case.adds:
        # The stream is rounded to its dtype before it is normalized, and this is what a gradient passes through.
        rounded = (given.x.detach()[part].float() + _residual(given)[part].float()).to(given.x.dtype).double()
    else:
        rounded = inputs[0]
    with torch.enable_grad():
        leaves = [rounded.requires_grad_(), *(p.detach().requires_grad_() for p in (weight, bias) if p is not None)]
        y = reference.forward(rounded, case.spec, leaves[1], leaves[2] if bias is not None else None)
    outputs = (y.detach(), rounded.detach()) if case.adds else (y.detach(),)
    if not case.is_differentiated:
        return outputs
    dx, *gains = torch.autograd.grad(y, leaves, given.gradients[0][part].double())
    if case.adds:
        dx = dx + given.gradients[1][part].double()
    return (*outputs, *([dx] * len(inputs)), *gains)


def _residual(given: Arguments) -> Tensor:
    return given.x if given.residual is None else given.residual.detach()
