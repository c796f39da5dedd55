"""Widths, colours and progress, by what the streams and the environment are."""

from __future__ import annotations

import io
import sys

import pytest
from rich.text import Text

from normkit.cli.terminal import note, one_line, progress, progress_of_tasks, results, shows_progress
from normkit.show.terminal import pairs


def test_a_message_that_floods_is_cut_in_the_middle():
    said = one_line("expected " + "x" * 10**5 + "\n; do this")
    assert len(said) < 2100
    assert said.startswith("expected x")
    assert said.endswith(" ; do this")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def printed(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stdout", stream)
    results().print(Text("word " * 60, "bold red"))
    return stream.getvalue()


def test_a_pipe_gets_a_hundred_columns_without_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, io.StringIO())
    assert 90 < max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_a_pipe_gets_the_columns_that_are_asked_for_and_no_blanks_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("80", 80), ("300", 100), ("", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        text = printed(monkeypatch, io.StringIO())
        assert width - 10 < max(map(len, text.splitlines())) <= width
        results().print(pairs([(Text("label"), Text("short")), (Text("label"), Text("long " * 60))]))
        assert not any(line.endswith(" ") for line in sys.stdout.getvalue().splitlines())  # type: ignore[attr-defined]


def test_a_terminal_gets_colour_and_its_own_width_up_to_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("60", 60), ("300", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        text = printed(monkeypatch, Terminal())
        assert "\x1b[1;31m" in text
        assert results().width == width


def test_no_color_wins_over_a_terminal_and_force_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in printed(monkeypatch, Terminal())


def test_an_empty_no_color_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b" in printed(monkeypatch, Terminal())


def test_brackets_in_a_name_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    results().print("[bold]name[/bold] :smile:")
    assert sys.stdout.getvalue() == "[bold]name[/bold] :smile:\n"


def test_progress_only_where_a_terminal_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shows_progress(quiet=False)
    assert not shows_progress(quiet=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_progress(quiet=False)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_progress(quiet=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not shows_progress(quiet=False)


def test_the_bar_names_the_stage_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(shown=True) as report:
        report("text [1]", 1, 2)
    assert "text [1]" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("\x1b[2K")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    return now


def test_the_rest_takes_as_long_as_the_pace_so_far_says(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_of_tasks({"first": 10.0, "second": 100.0}, shown=True) as begin:
        report = begin("first")
        report("arms", 2, 4)
        for share in (3, 4):
            clock[0] += 10
            report("arms", share, 4)
        # Half of the second was measured in an earlier run: 50 are left, at 2.5 in 10 s.
        begin("second")("2 of [4] arms", 2, 4)
    shown = stream.getvalue()
    assert "second: 2 of [4] arms" in shown
    assert " 55 %" in shown
    assert "0:03:20" in shown
    assert shown.rstrip().endswith("\x1b[2K")


def test_no_bar_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(shown=False) as report:
        report("text", 1, 2)
    with progress_of_tasks({"first": 1.0}, shown=False) as begin:
        begin("first")("words", 0, 0)
    assert stream.getvalue() == ""


def test_a_note_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    note("a\nb\x1b[31m")
    assert capsys.readouterr().err == "normkit: note: a b [31m\n"
    assert one_line("caf\u00e9 \u2014 ok") == "caf\u00e9 \u2014 ok"
