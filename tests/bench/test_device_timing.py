"""Host time and device time are told apart, on a pretended GPU whose two clocks are known."""

from __future__ import annotations

import pytest

from normkit.bench import device_timing
from normkit.bench.device_timing import times

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
    found = times({"a": stream.call("a", (40, 3), (90, 5), (30, 2))}, 0.0, stream)["a"]
    assert found.seconds == pytest.approx(10 * MICRO)
    assert found.host_seconds == pytest.approx(160 * MICRO)
    assert found.spread == pytest.approx(0, abs=1e-6)


def test_without_the_hold_the_gaps_would_be_counted(monkeypatch):
    stream = Pretended()
    monkeypatch.setattr(stream, "hold", lambda _seconds: None)
    found = times({"a": stream.call("a", (40, 3), (90, 5), (30, 2))}, 0.0, stream)["a"]
    assert found.seconds > 50 * MICRO


def test_a_slow_device_is_not_waited_for_in_the_host_time():
    stream = Pretended()
    found = times({"a": stream.call("a", (20, 5000))}, 0.0, stream)["a"]
    assert (found.seconds, found.host_seconds) == (pytest.approx(5000 * MICRO), pytest.approx(20 * MICRO))


def test_all_take_turns_with_an_empty_cache_for_each_timed_call():
    stream = Pretended()
    times({"a": stream.call("a", (1, 3000)), "b": stream.call("b", (1, 3000))}, 0.0, stream)
    # What warms up, and two calls to see how long each takes; then one call in each part of a turn.
    turns = stream.order[1 + 2 * 4 :]
    one = ["wait", "{}", "wait", "clear", "{}", "wait", "hold", "clear", "{}", "wait"]
    assert turns == [word.format(name) for _ in range(5) for name in "ab" for word in one] + ["wait"]


@pytest.mark.parametrize(("device", "repeats"), [(3000, 1), (900, 3), (1, 10)])
def test_short_calls_are_repeated_but_the_queue_stays_short(device, repeats):
    stream = Pretended()
    assert device_timing._repeats(stream.call("a", (1, device)), stream) == repeats


def test_a_host_that_is_very_slow_does_not_make_the_device_wait_forever():
    stream = Pretended()
    held = []
    stream.hold = held.append
    times({"a": stream.call("a", (10**6, 10))}, 0.0, stream)
    assert set(held[1:]) == {device_timing._LONGEST_HOLD}
