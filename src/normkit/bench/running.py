"""Cases -> Benchmark: each is answered, checked, then timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch import config
from torch.autograd.graph import get_gradient_edge

from normkit.bench.cases import Arguments, Case, arguments
from normkit.bench.checking import checked_rows, errors
from normkit.bench.devices import CPU, Device
from normkit.bench.peers import AbsentError, Call, Peer, reason
from normkit.bench.results import Benchmark, Cell, Machine, Measurement
from normkit.bench.timing import Neighbours, saved_bytes
from normkit.errors import InputError

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
    # What earlier cases left in cycles still holds memory.
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
    # What goes wrong on a GPU is told when it is waited for.
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
