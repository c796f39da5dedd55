"""Turns, repeats, neighbours and kept bytes; no test asserts a speed."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from normkit.bench import timing
from normkit.bench.timing import Neighbours, Time, saved_bytes, times


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
