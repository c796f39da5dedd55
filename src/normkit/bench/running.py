"""Cases -> Benchmark: each is answered, checked, then timed."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._functorch import config

from normkit.bench.cases import Arguments, Case, arguments
from normkit.bench.checking import bound, errors
from normkit.bench.peers import PEERS, AbsentError, Call, Peer
from normkit.bench.results import Benchmark, Cell, Machine, Measurement
from normkit.bench.timing import Neighbours, saved_bytes, times
from normkit.errors import InputError
from normkit.kernels import cpu

_FLOOR = "copy"


def measure(
    cases: Sequence[Case],
    *,
    seconds: float = 0.5,
    peers: Sequence[Peer] = PEERS,
    progress: Callable[[str, int, int], None] | None = None,
) -> Benchmark:
    """Check and time every peer in every case, with torch's current number of threads.

    Args:
        cases: What to measure.
        seconds: Time for each peer in each case on average, at least 5 rounds.
        peers: Who takes part.
        progress: Called with the case in words, cases done, and their number.

    Raises:
        InputError: If a case does not fit into this machine's memory.
    """
    for case in cases:
        _check_memory(case, len(peers))
    cells = []
    for position, case in enumerate(cases):
        if progress is not None:
            progress(str(case), position, len(cases))
        # A backward pass that is timed alone runs many times on what one forward pass kept.
        with config.patch(donated_buffer=case.direction != "backward"):
            cells.append(_cell(case, seconds, peers))
    return Benchmark(machine=machine(), cells=tuple(cells))


def machine() -> Machine:
    """This machine, now."""
    reason = cpu.load()
    kernels = f"C++ kernels, {cpu.instructions()}" if reason is None else f"plain torch ({reason})"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Machine(_cpu_name(), torch.get_num_threads(), torch.__version__, kernels, date)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _check_memory(case: Case, peers: int) -> None:
    """Refuse what this machine cannot hold, before anything is allocated."""
    sheets = sum(not name.startswith(("dweight", "dbias")) for name in case.answers)
    # x and what belongs to it, an answer of each peer, and what the most wasteful of them needs on the way.
    needed = case.bytes * (2 * sheets + peers * sheets + 4)
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else needed
    if needed > present:
        gibibytes = 1 << 30
        raise InputError(
            f"{case} needs about {needed / gibibytes:.0f} GiB and this machine has {present / gibibytes:.0f}; "
            "choose a smaller shape"
        )


def _cell(case: Case, seconds: float, peers: Sequence[Peer]) -> Cell:
    given = arguments(case)
    forwards: dict[str, Call] = {}
    left_out = []
    for peer in peers:
        try:
            forwards[peer.name] = peer.prepare(case, given)
        except AbsentError as reason:
            left_out.append((peer.name, str(reason)))
    with torch.set_grad_enabled(case.is_differentiated):
        answers = {name: _answer(case, forward, given) for name, forward in forwards.items()}
        found = errors(case, given, answers)
        del answers
        kept = {
            name: saved_bytes(forward, given.leaves[1 + case.adds :]) if case.is_differentiated else None
            for name, forward in forwards.items()
        }
        target, source = torch.empty_like(given.x), given.x.detach()
        calls: dict[str, Callable[[], object]] = {
            name: _timed(case.direction, forward, given) for name, forward in forwards.items()
        }
        calls[_FLOOR] = lambda: target.detach().copy_(source)
        apart = {peer.name: calls.pop(peer.name) for peer in peers if peer.has_own_threads and peer.name in calls}
        neighbours = Neighbours()
        taken = times(calls, seconds) | times(apart, seconds)
        others = neighbours.share()
    fresh = {peer.name for peer in peers if case.direction == "forward-out" and not peer.has_out}

    def measurement(name: str) -> Measurement:
        error, worst = max(zip(found[name], case.answers, strict=True))
        return Measurement(
            peer=name,
            seconds=taken[name].seconds,
            spread=taken[name].spread,
            error=error,
            worst=worst,
            is_wrong=error > bound(case),
            is_fresh=name in fresh,
            saved_bytes=kept[name],
        )

    return Cell(
        case=case,
        floor_seconds=taken[_FLOOR].seconds * case.copies,
        floor_spread=taken[_FLOOR].spread,
        others=others,
        input_bytes=case.bytes,
        measurements=tuple(map(measurement, forwards)),
        left_out=tuple(left_out),
    )


def _answer(case: Case, forward: Call, given: Arguments) -> tuple[Tensor, ...]:
    outputs = forward()
    gradients = torch.autograd.grad(outputs, given.leaves, given.gradients) if case.is_differentiated else ()
    return (*(output.detach().clone() for output in outputs), *gradients)


def _timed(direction: str, forward: Call, given: Arguments) -> Callable[[], object]:
    if direction in ("forward", "forward-out"):
        return forward
    if direction == "forward+backward":
        return lambda: torch.autograd.grad(forward(), given.leaves, given.gradients)
    outputs = forward()
    return lambda: torch.autograd.grad(outputs, given.leaves, given.gradients, retain_graph=True)
