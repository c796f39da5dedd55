"""Threads that count together and end together."""

from __future__ import annotations

import threading
import time

import pytest

from normkit.checkpoint.folding import Workers


def test_results_come_in_the_order_of_the_tasks():
    workers = Workers(3)
    assert workers.map([lambda number=number: number**2 for number in range(50)]) == [number**2 for number in range(50)]
    assert workers.map([]) == []


def test_bytes_are_counted_over_all_threads():
    seen = []
    workers = Workers(4, lambda *call: seen.append(call))
    workers.begin("counting", 4000)
    workers.map([lambda: [workers.step(10) for _ in range(100)] for _ in range(4)])
    assert seen[-1] == ("counting", 4000, 4000)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


def test_progress_is_told_a_thousand_times_at_most():
    seen = []
    workers = Workers(1, lambda *call: seen.append(call))
    workers.begin("counting", 10_000)
    workers.map([lambda: [workers.step(1) for _ in range(10_000)]])
    assert len(seen) == 1000


def test_the_first_error_ends_all():
    workers = Workers(2)
    begun, ended = threading.Event(), []

    def fail():
        begun.wait(10)
        raise ValueError("this one")

    def go_on():
        begun.set()
        try:
            for _ in range(10_000):
                workers.step(1)
                time.sleep(0.001)
        finally:
            ended.append(True)

    started = time.monotonic()
    with pytest.raises(ValueError, match="this one"):
        workers.map([go_on, fail, *[go_on] * 50])
    # Those that ran were stopped on their way, and most of those that waited were never begun.
    assert 1 <= len(ended) < 10
    assert time.monotonic() - started < 5
