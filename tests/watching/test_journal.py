"""Files of a watch: whole lines and whole pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normkit.watching.chronicle import Chronicle
from normkit.watching.journal import Journal
from small_training import Run


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
    journal = Journal(tmp_path)
    journal.add(Chronicle())
    whole = (tmp_path / "history.jsonl").read_bytes()
    original = Path.open

    class Short:
        def __init__(self, file: object) -> None:
            self.file = file

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, content: bytes) -> int:
            return self.file.write(content[:3])

    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: Short(original(*args, **kwargs)))
    with pytest.raises(OSError, match="space"):
        journal.add(Chronicle())
    assert (tmp_path / "history.jsonl").read_bytes() == whole
