"""What a watch says, once and by one process; what it writes, in whole lines and pages; neither ends a training."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normkit.watching.messages import Messages, ReportFiles
from normkit.watching.time_series import RunHistory
from small_training import Run


def made(is_reporting: bool = True, reports: Any = None) -> tuple[Messages, list[str]]:
    said: list[str] = []
    return Messages(said.append, reports, is_reporting=is_reporting), said


def test_a_remark_is_said_once_a_topic():
    ours, said = made()
    for line in ("one of 3", "one of 4"):
        ours.remark(line, "places")
        ours.remark("late")
    assert ours.remarks == ["one of 3", "late"]
    assert said == ["normkit: one of 3", "normkit: late"]
    assert [ours.is_new(topic) for topic in ("late", "A1", "A1")] == [False, True, False]


def test_a_process_that_does_not_report_keeps_remarks():
    ours, said = made(is_reporting=False)
    ours.remark("late")
    ours.tell("step 3")
    assert (ours.remarks, said) == (["late"], [])


def test_a_failing_side_task_is_remarked_and_goes_no_further():
    ours, said = made()

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

    assert made()[0].write(None) is None
    ours, said = made(reports=SimpleNamespace(write=full))
    assert ours.write(None) is None
    assert ours.write(None) is None
    assert len(said) == 1
    assert "the report is not written: " in said[0]
    assert "No space left" in said[0]
    page = tmp_path / "report.html"
    assert made(reports=SimpleNamespace(write=lambda _: page))[0].write(None) == page


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_without_a_listener_lines_go_to_the_terminal_if_there_is_one(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(sys, "stderr", stream)
    Messages(None, ReportFiles(tmp_path), is_reporting=True).tell("step 3")
    if stream is not None:
        assert stream.getvalue() == "normkit: step 3\n"
        stream.close()
        Messages(None, None, is_reporting=True).tell("step 4")


@pytest.mark.slow
def test_each_report_is_one_line_and_the_end_a_page(tmp_path: Path):
    run = Run().go(steps=5, out=tmp_path / "new")
    lines = [json.loads(line) for line in (tmp_path / "new" / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert lines[0]["loss"][""] == pytest.approx(run.losses[0], rel=1e-5)
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (report["training"]["steps"], report["training"]["reason"]) == (5, "end of the run")
    assert "</html>" in (tmp_path / "new" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("blank_pages")
def test_a_line_holds_headroom_and_z_score(tmp_path: Path):
    inspection = Run().go(steps=18, every=17, out=tmp_path).watch.inspection()
    line = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[-1])
    assert line["headroom"] == {site.path: site.headroom_bits for site in inspection.sites}
    assert line["loss z"] == {"": inspection.training.of("loss z")[0].values[1]}


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reports = ReportFiles(tmp_path)
    reports.add(RunHistory())
    whole = (tmp_path / "history.jsonl").read_bytes()

    class Short(io.FileIO):
        def write(self, content: bytes) -> int:
            return super().write(content[:3])

    monkeypatch.setattr(Path, "open", lambda path, mode, **_: Short(path, mode))
    with pytest.raises(OSError, match="space"):
        reports.add(RunHistory())
    assert (tmp_path / "history.jsonl").read_bytes() == whole
