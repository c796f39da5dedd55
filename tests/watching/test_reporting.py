"""What a watch says, once and by one process; what it writes, in whole lines and pages; neither ends a training."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normkit import specs
from normkit.inspection.inspecting import inspect
from normkit.measurement.row_counters import GRADIENT_SUMS, RowCounter, TableReader, Tables, gradient_table, row_tables
from normkit.watching.reporting import Messages, ReportFiles
from normkit.watching.time_series import RunHistory
from normkit.watching.watcher import watch
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


@pytest.mark.slow
def test_a_run_is_an_inspection_with_json():
    run = Run().go(steps=3, name="a run")
    inspection = run.watch.inspection()
    document = json.loads(json.dumps(inspection.to_json(), allow_nan=False))
    assert document["training"]["steps"] == 3
    assert (inspection.model.name, len(inspection.sites), inspection.final_norm) == ("a run", 9, "norm")
    assert inspection.walk is None
    assert {check.rule for check in inspection.checks}


def test_before_the_first_call_there_is_nothing_to_judge():
    run = Run()
    with watch(run.model, run.optimizer) as seen:
        inspection = seen.inspection()
    assert (inspection.sites, inspection.training.steps, inspection.training.reports) == ((), 0, 0)
    assert seen.findings == ()


def test_statistics_of_no_rows_are_not_known():
    tables = Tables([*row_tables(1), gradient_table(1)], torch.device("cpu"))
    reader = TableReader(step=0, tables=tables.unpacked(tables.packed()))
    rows = reader.rows(0, 8)
    assert (rows.rows, rows.absmax, rows.histogram) == (0, 0.0, ())
    for value in (rows.rms_min, rows.rms_max, *rows.rms_quantiles, rows.kurtosis, rows.mean_energy):
        assert math.isnan(value)
    assert math.isnan(reader.gradient(0))


def test_a_gradient_that_is_not_finite_is_not_known():
    tables = Tables([gradient_table(1)], torch.device("cpu"))
    tables["activation gradients"][0] = torch.tensor([4.0, 1.0, 0.0])
    reader = TableReader(step=0, tables=tables.unpacked(tables.packed()))
    assert reader.gradient(0) == 0.5
    reader.tables["activation gradients"][0, GRADIENT_SUMS.index("nonfinite")] = 1
    assert math.isnan(reader.gradient(0))


@pytest.mark.slow
def test_blocks_follow_each_other_and_attentions_have_their_heads():
    inspection = Run().go(steps=1).watch.inspection()
    first, second = inspection.blocks
    assert second.stream_in == first.stream_out
    assert first.stream_in.rows == first.stream_out.rows == 16
    assert [(each.path, each.block, each.heads, len(each.bounds)) for each in inspection.attentions] == [
        ("blocks.0.attention", 0, 2, 2),
        ("blocks.1.attention", 1, 2, 2),
    ]
    for each in inspection.attentions:
        assert each.bound >= each.sampled_max > 0
        assert each.sampled_rows == 2 * 2 * 8
        assert 0 < each.entropy < each.uniform_entropy
        assert each.uniform_entropy == pytest.approx(sum(math.log(keys) for keys in range(1, 9)) / 8)


@pytest.mark.slow
def test_a_watched_norm_is_an_inspected_norm():
    """At evaluation mode, where a watch and an inspection see the same rows."""
    run = Run()
    run.model.eval()
    batch = run.batch(rows=4, tokens=9)[:, :-1]
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[2, 3:] = 0
    with watch(run.model, every=1) as seen:
        F.cross_entropy(run.model(tokens=batch, attention_mask=mask).flatten(0, 1), batch.flatten()).backward()
        seen.step(None)
    inspected = inspect(run.model, [{"tokens": batch, "attention_mask": mask}])
    watched = seen.inspection()
    assert [site.path for site in watched.sites] == [site.path for site in inspected.sites]
    for one, other in zip(watched.sites, inspected.sites, strict=True):
        assert (one.role, one.block, one.spec, one.dtype, one.calls) == (
            *(other.role, other.block, other.spec, other.dtype, other.calls),
        )
        for ours, theirs in ((one.input, other.input), (one.output, other.output)):
            assert (ours.rows, ours.features, ours.zero_rows, ours.nonfinite) == (
                *(theirs.rows, theirs.features, theirs.zero_rows, theirs.nonfinite),
            )
            numbers = [
                (each.rms_min, *each.rms_quantiles, each.rms_max, each.angle_to_ones, each.absmax)
                for each in (ours, theirs)
            ]
            # Sums in float32 over up to 16 features.
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
            assert ours.mean_energy == pytest.approx(theirs.mean_energy, rel=1e-4, abs=1e-12)
        assert one.input.histogram == other.input.histogram
        assert one.attenuation.smallest == pytest.approx(other.attenuation.smallest, rel=1e-5)
        assert one.attenuation.share_below_99 == pytest.approx(other.attenuation.share_below_99)
        assert one.headroom_bits == pytest.approx(other.headroom_bits, rel=1e-5)
    for ours, theirs in zip(watched.blocks, inspected.blocks, strict=True):
        assert ours.placement == theirs.placement
        assert ours.stream_out.rms_median == pytest.approx(theirs.stream_out.rms_median, rel=1e-5)
    for ours, theirs in zip(watched.attentions, inspected.attentions, strict=True):
        assert (ours.path, ours.heads, ours.head_dim) == (theirs.path, theirs.heads, theirs.head_dim)
        assert ours.bound == pytest.approx(theirs.bound, rel=1e-5)


def test_the_summary_has_the_numbers_of_each_row_counter():
    x = torch.randn(40, 16) * torch.logspace(-4, 3, 40)[:, None]
    constant = torch.full((3, 16), 0.5)
    given = (x, x[:1], x[:0], torch.zeros(2, 16), constant, x.masked_fill(x > 0.5, math.nan))
    tables = Tables(row_tables(len(given)), torch.device("cpu"))
    for place, rows in enumerate(given):
        RowCounter(place=place, spec=specs.TORCH_LAYER_NORM, enters_norm=True).add(tables, rows, None)
    reader = TableReader(step=0, tables=tables.unpacked(tables.packed()))
    site = SimpleNamespace(spec=specs.TORCH_LAYER_NORM)
    for place, found in enumerate(zip(*reader.summary(), strict=True)):
        rows = reader.rows(place, 16)
        share = reader.attenuation(place, site.spec).share_below_99
        expected = (rows.rms_median, rows.kurtosis, share, rows.absmax)
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True), place
