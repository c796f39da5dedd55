"""What a watch says: each thing once, by one process, and never at the cost of the training."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normkit.watching.journal import Journal
from normkit.watching.voice import Voice


def voice(speaks: bool = True, journal: Any = None) -> tuple[Voice, list[str]]:
    said: list[str] = []
    return Voice(said.append, journal, speaks=speaks), said


def test_a_remark_is_said_once_a_topic():
    ours, said = voice()
    for line in ("one of 3", "one of 4"):
        ours.remark(line, "places")
        ours.remark("late")
    assert ours.remarks == ["one of 3", "late"]
    assert said == ["normkit: one of 3", "normkit: late"]
    assert [ours.is_new(topic) for topic in ("late", "A1", "A1")] == [False, True, False]


def test_who_does_not_speak_keeps_remarks():
    ours, said = voice(speaks=False)
    ours.remark("late")
    ours.tell("step 3")
    assert (ours.remarks, said) == (["late"], [])


def test_what_fails_is_remarked_and_goes_no_further():
    ours, said = voice()

    def fail(number: int) -> None:
        raise MemoryError(f"{number} bytes\nand a trace")

    ours.guarded("a step", fail, 7)
    ours.guarded("a step", fail, 8)
    assert said == ["normkit: a step could not be taken in: 7 bytes"]
    with pytest.raises(KeyboardInterrupt):
        ours.guarded("a step", interrupt)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_report_that_cannot_be_written_is_remarked(tmp_path: Path):
    def full(_inspection: object) -> Path:
        raise OSError(28, "No space left on device")

    assert voice()[0].write(None) is None
    ours, said = voice(journal=SimpleNamespace(write=full))
    assert ours.write(None) is None
    assert ours.write(None) is None
    assert len(said) == 1
    assert "the report is not written: " in said[0]
    assert "No space left" in said[0]
    page = tmp_path / "report.html"
    assert voice(journal=SimpleNamespace(write=lambda _: page))[0].write(None) == page


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_without_a_listener_lines_go_to_the_terminal_if_there_is_one(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(sys, "stderr", stream)
    Voice(None, Journal(tmp_path), speaks=True).tell("step 3")
    if stream is not None:
        assert stream.getvalue() == "normkit: step 3\n"
        stream.close()
        Voice(None, None, speaks=True).tell("step 4")
