"""The messages of a watch, each once, and the files that it writes."""

from __future__ import annotations

import errno
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from normkit import files
from normkit.errors import InputError
from normkit.inspection.result import Inspection, facts_of, judged, plain
from normkit.measurement.facts import Attention, Block, Site
from normkit.measurement.layout import MeasuredStep
from normkit.measurement.training import Training
from normkit.text import first_line
from normkit.watching.answers import answer
from normkit.watching.onset import origin
from normkit.watching.startup import WatchedModel
from normkit.watching.step_recorder import StepRecorder
from normkit.watching.time_series import RunHistory


class ReportFiles:
    """The files of one watch: report.html, report.json and history.jsonl in a folder, which the first of them makes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, history: RunHistory) -> None:
        """Append all series as they were at the last report to history.jsonl, as one line that is written whole."""
        values: dict[str, dict[str, object]] = {}
        step = -1 if history.last is None else history.last.step
        for series in history.series():
            # Losses of later steps are known before the next report.
            known = bisect_right(series.steps, step)
            if known:
                values.setdefault(series.quantity, {})[series.path] = plain(series.values[known - 1])
        content = f"{json.dumps({'step': step, **values}, ensure_ascii=False)}\n".encode()
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "history.jsonl").open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise

    def write(self, inspection: Inspection) -> Path:
        """Write report.json and report.html, each whole or not at all, and return the page's path."""
        files.write_text(self._folder / "report.json", files.json_text(inspection.to_json()))
        return inspection.write_html(self._folder / "report.html")


class Messages:
    """The messages of one watch.

    `say` is called with each line. One of several processes speaks and writes; all of them keep remarks.
    """

    def __init__(self, say: Callable[[str], None] | None, reports: ReportFiles | None, *, is_reporting: bool) -> None:
        self.remarks: list[str] = []
        self.reports, self.is_reporting = reports, is_reporting
        self._say = say or _to_stderr
        self._told: set[str] = set()

    def is_new(self, topic: str) -> bool:
        """Whether a topic comes up for the first time."""
        is_new = topic not in self._told
        self._told.add(topic)
        return is_new

    def remark(self, line: str, topic: str = "") -> None:
        """Say what cannot be watched, and keep it for the report; once for each topic, by default the line itself."""
        if self.is_new(topic or line):
            self.remarks.append(line)
            self.tell(line)

    def tell(self, line: str) -> None:
        """Say one line."""
        if self.is_reporting:
            self._say(f"normkit: {line}")

    def guarded(self, what: str, run: Callable[..., None], *args: object) -> None:
        """Run a side task; if it raises, training continues and one warning is recorded."""
        try:
            run(*args)
        # A device that ran out of memory, a full disk, a rule that meets a case that it does not know.
        except Exception as error:
            self.remark(f"{what} could not be taken in: {first_line(error)}", what)

    def write(self, inspection: Inspection) -> Path | None:
        """Write the report and return the page's path; None where no report is wanted, or it cannot be written."""
        try:
            return None if self.reports is None else self.reports.write(inspection)
        except (OSError, InputError) as error:
            self.remark(f"the report is not written: {first_line(error)}", "report")
            return None


def _to_stderr(line: str) -> None:
    # A process without a terminal may have none, or a closed one.
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{line}\n")


def inspection_of_run(
    watched: WatchedModel,
    recorder: StepRecorder | None,
    history: RunHistory,
    *,
    name: str,
    steps: int,
    every: int,
    reason: str,
    observer: str,
    remarks: Sequence[str],
    optimizers: tuple[str, ...],
    ranks: int,
    noticed: Mapping[str, int],
) -> Inspection:
    """Judge a run as far as it was measured; without a recorder nothing was.

    The keywords are fields of `Training`, but for the name of the run and `noticed`, the step in which an error of each
    rule was first told.
    """
    structure = watched.structure
    sites: tuple[Site, ...] = ()
    blocks: tuple[Block, ...] = ()
    attentions: tuple[Attention, ...] = ()
    if structure is not None and recorder is not None and history.last is not None:
        measured = MeasuredStep(layout=recorder.layout, reader=history.last, features=recorder.instruments.features)
        with recorder.norms_at(history.last.tables):
            sites = measured.sites(structure, watched.gradient_errors)
        blocks, attentions = measured.blocks(structure), measured.attentions()
    training = Training(
        steps=steps,
        every=every,
        reports=history.reports,
        reason=reason,
        reason_step=history.reason_step if history.reason else max(steps - 1, 0),
        ranks=ranks,
        observer=observer,
        remarks=tuple(remarks),
        optimizers=optimizers,
        series=history.series(),
        parameters=history.parameters,
        vocabulary=watched.vocabulary,
        broken=history.broken,
        tokens=history.tokens,
        changes=tuple(history.tracker.changes),
        settings=tuple(history.tracker.settings),
        stopped=history.tracker.stopped,
        skipped=tuple(history.skipped),
    )
    training = replace(training, origin=origin(training))
    if ranks > 1 or not training.tokens:
        # Each process counts its own tokens: for several, take those of the measured step times the steps.
        training = replace(training, tokens=max((site.input.rows for site in sites), default=0) * steps)
    facts = facts_of(
        watched.model,
        structure,
        sites,
        blocks,
        attentions,
        name=name,
        text={"source": f"{steps} steps of training", "tokens": training.tokens, "padding": 0},
        data=None if recorder is None else recorder.batch_norms,
        modulations=None if recorder is None else recorder.modulations.found(),
        # Norms that were not measured are not known to be missing.
        intent=watched.intent if sites else None,
        baseline=watched.baseline if sites else None,
        training=training,
        shared=watched.shared,
    )
    inspection = judged(facts)
    findings = inspection.findings
    training = replace(training, worst=findings[0].severity if findings else "")
    if not training.was_noticed and findings and findings[0].severity == "error":
        step = min((noticed[each.rule] for each in findings if each.rule in noticed), default=training.reason_step)
        training = replace(training, reason=findings[0].title, reason_step=step)
    told = answer(training, findings, sites, blocks, attentions, len(facts.batch_norms), facts.others)
    return replace(inspection, training=told)
