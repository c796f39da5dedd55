"""Medians of interleaved rounds on the CPU and on a GPU, what else ran meanwhile, and the bytes kept for backward.

A call on a GPU returns before its work is done, so it has two times. Its device time lies between two events in the
stream, one before and one after it. Its host time is that until it returns, with an empty queue before it and nothing
waited for. In a long row of calls host and GPU work at the same time, and each call adds the larger of the two: for
one to some hundred rows the host's, for thousands the GPU's.

Three things make device times comparable. The stream is held while the host queues the calls of a turn, so that the GPU
never waits for the host between the kernels of a call. Before each call something four times as large as the L2 cache
is read, so that every call finds none of its tensors there, as in a model where other layers run between; reading
leaves nothing to be written back, which a buffer that is zeroed (as in triton.testing.do_bench) leaves to the
next one. And all calls take turns. What two events cost is in every device time, that of the copy too.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
    """The use of this machine by other processes from now on."""

    def __init__(self) -> None:
        self._seconds, self._start = _seconds_of_others(), time.perf_counter()

    def share(self) -> float | None:
        """The share of all cores that other processes have used so far; None where the system does not say."""
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


# A turn of a call lasts so long, but has at most so many calls: a queue that is full would make the host wait.
_TURN_SECONDS = 2e-3
_TURN_CALLS = 10
# The host may take this much longer than it did before; a hold that is too short shows as a gap, never as an error.
_MARGIN = 1.5
_LONGEST_HOLD = 20e-3
# A GPU that was idle while its next kernels were compiled is slow at first.
_WARM_UP = 50e-3
_CACHE_SIZES = 4


class Stream(Protocol):
    """A queue of calls, and the clocks of host and device."""

    def now(self) -> float:
        """The host's clock, in seconds."""

    def wait(self) -> None:
        """Return when all that was queued is done."""

    def hold(self, seconds: float) -> None:
        """Queue a pause."""

    def clear_cache(self) -> None:
        """Queue what leaves nothing of other tensors in the cache."""

    def mark(self) -> Any:
        """Queue a mark."""

    def between(self, first: Any, last: Any) -> float:
        """Seconds on the device between two marks that are passed."""


class CudaStream:
    """The current stream of the current CUDA device."""

    def __init__(self) -> None:
        size = _CACHE_SIZES * torch.cuda.get_device_properties().L2_cache_size
        self._buffer = torch.ones(max(size // 4, 1), device="cuda")
        self._total = torch.zeros((), device="cuda")
        cycles = 10_000_000
        _spin(cycles)
        first = self.mark()
        _spin(cycles)
        last = self.mark()
        self.wait()
        self._cycles_per_second = cycles / self.between(first, last)

    def now(self) -> float:
        """The host's clock, in seconds."""
        return time.perf_counter()

    def wait(self) -> None:
        """Return when all that was queued is done."""
        torch.cuda.synchronize()

    def hold(self, seconds: float) -> None:
        """Queue a pause."""
        _spin(int(seconds * self._cycles_per_second))

    def clear_cache(self) -> None:
        """Queue what leaves nothing of other tensors in the cache."""
        torch.sum(self._buffer, 0, out=self._total)

    def mark(self) -> Any:
        """Queue a mark."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds on the device between two marks that are passed."""
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def device_times(calls: Calls, seconds: float, stream: Stream) -> dict[str, Time]:
    """Time calls in rounds in which each has its turn: some calls for the host's time, then as many for the device's.

    Args:
        calls: What to time, by name; each has been called before.
        seconds: For each on average; at least 5 rounds.
        stream: Where they are carried out.

    Returns:
        By name: median and spread of the device's times, and the median of the host's.
    """
    stream.hold(_WARM_UP)
    repeats = {name: _device_repeats(call, stream) for name, call in calls.items()}
    hosts: dict[str, list[float]] = {name: [] for name in calls}
    devices: dict[str, list[float]] = {name: [] for name in calls}
    for _ in rounds(seconds * len(calls)):
        for name, call in calls.items():
            hosts[name] += _host_times(call, repeats[name], stream)
            devices[name] += _device_times(call, repeats[name], stream)
    stream.wait()
    found = {name: summary(samples) for name, samples in devices.items()}
    return {name: Time(one.seconds, one.spread, statistics.median(hosts[name])) for name, one in found.items()}


def _device_repeats(call: Callable[[], object], stream: Stream) -> int:
    call()
    stream.wait()
    start = stream.now()
    call()
    stream.wait()
    return min(_TURN_CALLS, max(1, math.ceil(_TURN_SECONDS / max(stream.now() - start, 1e-9))))


def _host_times(call: Callable[[], object], repeats: int, stream: Stream) -> list[float]:
    stream.wait()
    found = []
    for _ in range(repeats):
        start = stream.now()
        call()
        found.append(stream.now() - start)
    return found


def _device_times(call: Callable[[], object], repeats: int, stream: Stream) -> list[float]:
    def queue() -> list[tuple[Any, Any]]:
        marks = []
        for _ in range(repeats):
            stream.clear_cache()
            first = stream.mark()
            call()
            marks.append((first, stream.mark()))
        return marks

    # Not counted, but for how long the host takes.
    stream.wait()
    start = stream.now()
    queue()
    host = stream.now() - start
    stream.wait()
    stream.hold(min(_MARGIN * host, _LONGEST_HOLD))
    marks = queue()
    stream.wait()
    return [stream.between(first, last) for first, last in marks]
