"""Cases -> Benchmark: each is answered, compared with the reference in float64, then timed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config
from torch.autograd.graph import get_gradient_edge

from normkit import units
from normkit.bench.cases import DTYPES, Arguments, Case, arguments
from normkit.bench.devices import CPU, Device
from normkit.bench.peers import AbsentError, Call, Peer, reason
from normkit.bench.results import Benchmark, Cell, Machine, Measurement
from normkit.bench.timing import Neighbours, saved_bytes
from normkit.errors import InputError
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
        residual = given.x if given.residual is None else given.residual.detach()
        x = (x.float() + residual[part].float()).to(x.dtype)
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


_FLOOR = "copy"


def measure(
    cases: Sequence[Case],
    *,
    device: Device = CPU,
    seconds: float = 0.5,
    peers: Sequence[Peer] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Benchmark:
    """Check and time every peer in every case, with torch's current number of threads.

    Args:
        cases: What to measure.
        device: Where.
        seconds: Time for each peer in each case on average, at least 5 rounds.
        peers: Who takes part; by default all that there are for the device.
        progress: Called with the case in words, cases done, and their number.

    Raises:
        InputError: If a case does not fit into the memory.
    """
    peers = device.peers if peers is None else peers
    for case in cases:
        check_memory(case, device, len(peers))
    cells = []
    for position, case in enumerate(cases):
        if progress is not None:
            progress(str(case), position, len(cases))
        cells.append(measure_case(case, device, seconds, peers))
    return Benchmark(machine=machine(device), cells=tuple(cells))


def machine(device: Device = CPU) -> Machine:
    """This machine, now."""
    return device.machine()


def check_memory(case: Case, device: Device, peers: int) -> None:
    """Refuse what the memory cannot hold, before anything is allocated.

    Raises:
        InputError: If it cannot.
    """
    rows = case.shape[0]
    checked = min(rows, len(checked_rows(case))) / rows
    # x and what belongs to it, what is checked of each peer, and what the most wasteful of them needs on the way.
    needed = case.bytes * (2 * case.sheets + peers * case.sheets * checked + 4)
    present = device.memory()
    if present is not None and needed > present:
        gibibytes = 1 << 30
        raise InputError(
            f"{case} needs about {needed / gibibytes:.0f} GiB and this {device.noun} has {present / gibibytes:.0f}; "
            "choose a smaller shape"
        )


class _Entry(NamedTuple):
    """One peer, ready to be timed."""

    call: Callable[[], object]
    answers: tuple[Tensor, ...]
    saved_bytes: int | None


def measure_case(case: Case, device: Device, seconds: float, peers: Sequence[Peer]) -> Cell:
    """Check and time every peer in one case; one that raises is left out, with what it raised.

    Raises:
        RuntimeError: If a peer has left a GPU in a state in which nothing runs any more.
    """
    # Objects of earlier cases in reference cycles still hold memory.
    gc.collect()
    given = arguments(case, device.name)
    rows = checked_rows(case).to(given.x.device)
    entries: dict[str, _Entry] = {}
    left_out = []
    # A backward pass that is timed alone runs many times on what one forward pass kept.
    with torch.set_grad_enabled(case.is_differentiated), config.patch(donated_buffer=case.direction != "backward"):
        for peer in peers:
            try:
                entries[peer.name] = _enter(peer, case, given, rows)
            except AbsentError as absent:
                left_out.append((peer.name, str(absent)))
            except Exception as error:  # whatever a library raises in a case that it cannot do
                why = f"raised {reason(error)}"
                if not _is_usable(given):
                    raise RuntimeError(f"{peer.name} {why}, and left the {device.noun} unusable") from None
                left_out.append((peer.name, why))
        found = errors(case, given, {name: entry.answers for name, entry in entries.items()})
        kept = {name: entry.saved_bytes for name, entry in entries.items()}
        calls = {name: entry.call for name, entry in entries.items()}
        del entries
        target, source = torch.empty_like(given.x), given.x.detach()
        calls[_FLOOR] = lambda: target.detach().copy_(source)
        apart = {peer.name: calls.pop(peer.name) for peer in peers if peer.has_own_threads and peer.name in calls}
        neighbours = Neighbours()
        taken = device.times(calls, seconds) | device.times(apart, seconds)
        others = neighbours.share()
    fresh = {peer.name for peer in peers if case.direction == "forward-out" and not peer.has_out}

    def measurement(name: str) -> Measurement:
        pairs = zip(found[name], case.answers, strict=True)
        error, worst = max(pairs, key=lambda pair: (pair[0].excess > 1.0, pair[0].relative))
        return Measurement(
            peer=name,
            seconds=taken[name].seconds,
            spread=taken[name].spread,
            error=error.relative,
            worst=worst,
            is_wrong=error.excess > 1.0,
            is_fresh=name in fresh,
            saved_bytes=kept[name],
            bytes_per_second=case.moved_bytes / taken[name].seconds,
            host_seconds=taken[name].host_seconds,
        )

    return Cell(
        case=case,
        floor_seconds=taken[_FLOOR].seconds * case.copies,
        floor_spread=taken[_FLOOR].spread,
        others=others,
        input_bytes=case.bytes,
        measurements=tuple(measurement(name) for name in kept),
        left_out=tuple(left_out),
    )


def _is_usable(given: Arguments) -> bool:
    """Whether tensors can still be read: after some errors on a GPU nothing can, until the process ends."""
    try:
        given.x.detach().flatten()[0].item()
    except RuntimeError:
        return False
    return True


def _enter(peer: Peer, case: Case, given: Arguments, rows: Tensor) -> _Entry:
    forward = peer.prepare(case, given)
    outputs = forward()
    gradients = torch.autograd.grad(outputs, given.leaves, given.gradients) if case.is_differentiated else ()
    found = (*(output.detach() for output in outputs), *gradients)
    answers = (*(sheet[rows] for sheet in found[: case.sheets]), *found[case.sheets :])
    del outputs, gradients, found
    # Errors of a GPU are raised when it is waited for.
    answers[0].flatten()[0].item()
    kept = saved_bytes(forward, given.leaves[1 + case.adds :]) if case.is_differentiated else None
    return _Entry(_timed(case.direction, forward, given), answers, kept)


def _timed(direction: str, forward: Call, given: Arguments) -> Callable[[], object]:
    if direction in ("forward", "forward-out"):
        return forward
    if direction == "forward+backward":
        return lambda: torch.autograd.grad(forward(), given.leaves, given.gradients)
    # Not the outputs themselves: of a large case, those of all peers would fill the memory.
    edges = [get_gradient_edge(output) for output in forward()]
    return lambda: torch.autograd.grad(edges, given.leaves, given.gradients, retain_graph=True)
