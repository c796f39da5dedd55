"""Turns, repeats, neighbours and kept bytes; no test asserts a speed."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from normkit.bench import timing
from normkit.bench.timing import Neighbours, Time, device_times, saved_bytes, times


def test_all_take_turns_for_at_least_five_rounds():
    order = []
    found = times({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0.0)
    assert set(found) == {"a", "b"}
    assert min(taken.seconds for taken in found.values()) > 0
    turns = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert turns == ["a", "b"] * 6


def test_median_and_spread(monkeypatch):
    # In each turn a sample that is not counted comes first.
    samples = itertools.chain(*((100.0, taken) for taken in (3.0, 1.0, 5.0, 2.0, 4.0)))
    monkeypatch.setattr(timing, "_repeats", lambda _call: 1)
    monkeypatch.setattr(timing, "_sample", lambda _call, _repeats: next(samples))
    assert times({"a": list}, seconds=0.0) == {"a": Time(seconds=3.0, spread=pytest.approx(2 / 3))}


@pytest.mark.parametrize(("seconds", "repeats"), [(1e-4, 20), (3e-3, 1)])
def test_short_calls_are_repeated(monkeypatch, seconds, repeats):
    monkeypatch.setattr(timing, "_sample", lambda _call, _repeats: seconds)
    assert timing._repeats(lambda: None) == repeats


def test_what_others_use(monkeypatch):
    clock = SimpleNamespace(perf_counter=iter((0.0, 2.0)).__next__, process_time=iter((1.0, 2.5)).__next__)
    busy = iter(("cpu  100 0 0 9 9 0 0 0 0 0\ncpu0", "cpu  300 10 10 99 99 10 10 60 0 0\ncpu0"))
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(os, "sysconf", lambda _name: 100)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: next(busy))
    # 3 seconds of both cores in 2 seconds, half of them this process's own.
    assert Neighbours().share() == pytest.approx(1.5 / 4)


def test_a_system_that_does_not_say_what_others_use(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert Neighbours().share() is None


def test_bytes_kept_for_backward():
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    assert saved_bytes(lambda: x * weight, (weight,)) == x.nbytes
    # One storage, kept twice.
    assert saved_bytes(lambda: x * x, ()) == x.nbytes
    assert saved_bytes(lambda: x + 1, ()) == 0


MICRO = 1e-6
MARK, CLEAR = 1 * MICRO, 70 * MICRO


class Pretended:
    """A host and a device: what is queued starts when it is queued and all before it is done."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.order: list[str] = []

    def now(self) -> float:
        return self.host

    def wait(self) -> None:
        self.host = max(self.host, self.device)
        self.order.append("wait")

    def queue(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device

    def hold(self, seconds: float) -> None:
        self.queue(0.0, seconds)
        self.order.append("hold")

    def clear_cache(self) -> None:
        self.queue(MICRO, CLEAR)
        self.order.append("clear")

    def mark(self) -> float:
        self.queue(MARK, 0.0)
        return self.device

    def between(self, first: float, last: float) -> float:
        return last - first

    def call(self, name: str, *kernels: tuple[float, float]):
        def run() -> None:
            self.order.append(name)
            for host, device in kernels:
                self.queue(host * MICRO, device * MICRO)

        return run


def test_a_slow_host_leaves_no_gap_in_the_device_time():
    stream = Pretended()
    found = device_times({"a": stream.call("a", (40, 3), (90, 5), (30, 2))}, 0.0, stream)["a"]
    assert found.seconds == pytest.approx(10 * MICRO)
    assert found.host_seconds == pytest.approx(160 * MICRO)
    assert found.spread == pytest.approx(0, abs=1e-6)


def test_without_the_hold_the_gaps_would_be_counted(monkeypatch):
    stream = Pretended()
    monkeypatch.setattr(stream, "hold", lambda _seconds: None)
    found = device_times({"a": stream.call("a", (40, 3), (90, 5), (30, 2))}, 0.0, stream)["a"]
    assert found.seconds > 50 * MICRO


def test_a_slow_device_is_not_waited_for_in_the_host_time():
    stream = Pretended()
    found = device_times({"a": stream.call("a", (20, 5000))}, 0.0, stream)["a"]
    assert (found.seconds, found.host_seconds) == (pytest.approx(5000 * MICRO), pytest.approx(20 * MICRO))


def test_all_take_turns_with_an_empty_cache_for_each_timed_call():
    stream = Pretended()
    device_times({"a": stream.call("a", (1, 3000)), "b": stream.call("b", (1, 3000))}, 0.0, stream)
    # What warms up, and two calls to see how long each takes; then one call in each part of a turn.
    turns = stream.order[1 + 2 * 4 :]
    one = ["wait", "{}", "wait", "clear", "{}", "wait", "hold", "clear", "{}", "wait"]
    assert turns == [word.format(name) for _ in range(5) for name in "ab" for word in one] + ["wait"]


@pytest.mark.parametrize(("device", "repeats"), [(3000, 1), (900, 3), (1, 10)])
def test_short_calls_are_repeated_but_the_queue_stays_short(device, repeats):
    stream = Pretended()
    assert timing._device_repeats(stream.call("a", (1, device)), stream) == repeats


def test_a_host_that_is_very_slow_does_not_make_the_device_wait_forever():
    stream = Pretended()
    held = []
    stream.hold = held.append
    device_times({"a": stream.call("a", (10**6, 10))}, 0.0, stream)
    assert set(held[1:]) == {timing._LONGEST_HOLD}
