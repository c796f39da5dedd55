"""The bar over several tasks: what it writes, and the time that is left."""

from __future__ import annotations

import io
import sys

import pytest

from normkit.cli import pace
from normkit.cli.pace import Pace, duration, paced


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def test_the_rest_takes_as_long_as_the_pace_so_far_says(clock: list[float]) -> None:
    found = Pace({"a": 10, "b": 30})
    found.begin("a")
    found.reach(0.0)
    assert found.left() == ""
    clock[0] = 6.0
    found.reach(0.5)
    assert (found.reached, found.length) == (5.0, 40)
    # 35 of 40 at 6 s for 5.
    assert found.left() == "about 42 s left"


def test_what_a_task_begins_with_tells_nothing_of_the_pace(clock: list[float]) -> None:
    found = Pace({"a": 10, "b": 30})
    found.begin("a")
    found.reach(0.9)
    clock[0] = 2.0
    found.reach(1.0)
    assert found.left() == "about 60 s left"
    found.begin("b")
    found.reach(0.5)
    assert found.reached == 25.0
    # Fifteen that are left, at the pace of one in two seconds.
    assert found.left() == "about 30 s left"


def test_a_task_that_was_not_run_is_passed_over(clock: list[float]) -> None:
    found = Pace({"a": 10, "b": 30})
    found.begin("a")
    found.begin("b")
    found.reach(0.0)
    clock[0] = 1.0
    found.reach(0.5)
    assert (found.reached, found.left()) == (25.0, "about 1 s left")


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (99.4, "99 s"), (100, "2 min"), (3600, "60 min")])
def test_a_length_of_time_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_names_task_and_stage_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with paced({"first": 1.0}, shown=True) as begin:
        begin("first")("2 of [4] arms", 1, 2)
    assert "first: 2 of [4] arms" in stream.getvalue()
    assert " 50 %" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("\x1b[2K")


def test_no_bar_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with paced({"first": 1.0}, shown=False) as begin:
        begin("first")("words", 0, 0)
    assert capsys.readouterr() == ("", "")
