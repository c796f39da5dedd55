"""Medians of interleaved rounds, what else ran meanwhile, and the bytes that a forward pass keeps for backward."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Calls = Mapping[str, Callable[[], object]]

# Calls are repeated until a sample is so long: what a call finds in the caches is then its own, not another's.
_SAMPLE_SECONDS = 2e-3
_ROUNDS = (5, 1000)


@dataclass(frozen=True)
class Time:
    """The time of one call."""

    seconds: float
    """Median of the samples."""
    spread: float
    """Interquartile range of the samples over their median."""
    host_seconds: float | None = None
    """On a GPU, the median until the call returns; None on the CPU, where `seconds` is all."""


def rounds(seconds: float) -> Iterator[None]:
    """At least 5, and until so much time is gone."""
    start, done = time.perf_counter(), 0
    while done < _ROUNDS[0] or (time.perf_counter() - start < seconds and done < _ROUNDS[1]):
        yield
        done += 1


def times(calls: Calls, seconds: float) -> dict[str, Time]:
    """Time calls in rounds in which each has its turn, so that what disturbs the machine disturbs all alike.

    A turn: some calls that are not counted, then one sample of at least 2 ms of calls, one after the other.

    Args:
        calls: What to time, by name.
        seconds: For each on average; at least 5 rounds.
    """
    repeats = {name: _repeats(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in rounds(seconds * len(calls)):
        for name, call in calls.items():
            _sample(call, math.ceil(repeats[name] / 4))
            samples[name].append(_sample(call, repeats[name]))
    return {name: summary(found) for name, found in samples.items()}


def _sample(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _repeats(call: Callable[[], object]) -> int:
    call()
    repeats = 1
    while (taken := _sample(call, repeats)) * repeats < _SAMPLE_SECONDS / 4:
        repeats *= 4
    return max(1, math.ceil(_SAMPLE_SECONDS / taken))


def summary(samples: list[float]) -> Time:
    """Median and spread."""
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return Time(seconds=median, spread=(upper - lower) / median)


class Neighbours:
    """What other processes use of this machine from now on."""

    def __init__(self) -> None:
        self._seconds, self._start = _seconds_of_others(), time.perf_counter()

    def share(self) -> float | None:
        """Of all cores, so far; None where the system does not say."""
        now = _seconds_of_others()
        if now is None or self._seconds is None:
            return None
        present = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (now - self._seconds) / present))


def _seconds_of_others() -> float | None:
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, line.split()[1:9])
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def saved_bytes(forward: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes of all tensors that a forward pass keeps for backward, parameters left out, each storage once."""
    sizes: dict[int, int] = {}
    # Kept alive, lest a freed tensor's address be given to the next.
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward()
    del outputs
    for parameter in parameters:
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
