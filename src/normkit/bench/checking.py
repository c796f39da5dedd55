"""How far the answers of a peer are from the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from normkit import units
from normkit.bench.cases import DTYPES, Arguments, Case
from normkit.units import Exact

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


class Error(NamedTuple):
    """The error of one answer of a peer."""

    relative: float
    """||answer - exact|| / ||exact||."""
    excess: float
    """The largest error of an element in units of `normkit.units`, over what plain code may err by."""


def errors(case: Case, given: Arguments, answers: dict[str, tuple[Tensor, ...]]) -> dict[str, tuple[Error, ...]]:
    """The errors of each peer, one each of `case.answers`; infinite for NaN.

    Args:
        case: What was asked.
        given: Its tensors.
        answers: What `case.answers` names, by the name of the peer; of outputs and input gradients the checked rows.
    """
    device = given.x.device
    rows = max(1, _ELEMENTS[device.type] // case.shape[1])
    dtype, names = DTYPES[case.dtype], case.answers
    # By peer and answer: the squares of the differences, and the largest excess. The squares of the exact answers.
    squares = {name: torch.zeros(len(names), dtype=torch.float64, device=device) for name in answers}
    excesses = {name: torch.zeros(len(names), dtype=torch.float64, device=device) for name in answers}
    sizes = torch.zeros(len(names), dtype=torch.float64, device=device)

    def compare(position: int, exact: Exact, part: slice) -> None:
        of: Literal["y", "dx", "sum"] = "sum" if position >= case.sheets else "y" if position < case.outputs else "dx"
        limit = units.plain_limit(of, dtype, case.shape[0])
        sizes[position] += exact.value.square().sum()
        for name, found in answers.items():
            answer = found[position][part]
            squares[name][position] += (answer.detach().double() - exact.value).square().sum()
            excess = exact.units(answer).max() / limit
            excesses[name][position] = torch.maximum(excesses[name][position], excess)

    checked = checked_rows(case)
    is_left = torch.ones(case.shape[0], dtype=torch.bool).index_fill(0, checked, False)
    sums: list[Exact] = []
    start = 0
    for part in torch.split(checked.to(device), rows):
        exact = _exact(case, given, part)
        for position, each in enumerate(exact[: case.sheets]):
            compare(position, each, slice(start, start + len(part)))
        sums = _added(sums, exact[case.sheets :])
        start += len(part)
    if sums:
        for part in torch.split(is_left.nonzero().flatten().to(device), rows):
            sums = _added(sums, _exact(case, given, part)[case.sheets :])
    for position, total in enumerate(sums, case.sheets):
        compare(position, total, slice(None))
    return {
        name: tuple(
            Error(_relative(square, size), excess)
            for square, size, excess in zip(
                squares[name].tolist(), sizes.tolist(), excesses[name].tolist(), strict=True
            )
        )
        for name in answers
    }


def _added(sums: list[Exact], parts: Sequence[Exact]) -> list[Exact]:
    """Sums over the rows so far, with those over further rows."""
    if not sums:
        return list(parts)
    added = []
    for total, part in zip(sums, parts, strict=True):
        value = total.value + part.value
        added.append(Exact(value, torch.maximum(torch.hypot(total.size, part.size), value.abs())))
    return added


def _relative(square: float, size: float) -> float:
    # NaN is the worst error there is, and max() would pass over it.
    ratio = math.sqrt(square / size) if size else math.sqrt(square)
    return math.inf if math.isnan(ratio) else ratio


def _exact(case: Case, given: Arguments, part: Tensor) -> tuple[Exact, ...]:
    """Outputs of some rows, then the gradients of x, residual, weight and bias."""
    x, weight, bias = given.x.detach()[part], given.weight, given.bias
    if case.adds:
        # The stream is rounded to its dtype before it is normalized, and this is what a gradient passes through.
        x = (x.float() + _residual(given)[part].float()).to(x.dtype)
    outputs = [units.output(x, case.spec, weight, bias, plain=True)]
    if case.adds:
        outputs.append(Exact(x.double(), x.double().abs()))
    if not case.is_differentiated:
        return tuple(outputs)
    dx, *gains = units.gradients(x, given.gradients[0][part], case.spec, weight, bias, plain=True)
    if case.adds:
        added = given.gradients[1][part].double()
        dx = Exact(dx.value + added, torch.hypot(dx.size, added))
    inputs = 1 + (given.residual is not None)
    return (*outputs, *([dx] * inputs), *(gain for gain in gains if gain is not None))


def _residual(given: Arguments) -> Tensor:
    return given.x if given.residual is None else given.residual.detach()
