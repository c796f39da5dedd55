"""From what was measured of a run to an `Inspection`: norms, blocks, attentions, findings, the origin, the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from normkit.inspection.build_inspection import facts_of, judged
from normkit.inspection.result import Inspection
from normkit.measurement.facts import Attention, Block, Site
from normkit.measurement.layout import MeasuredStep
from normkit.measurement.training import Training
from normkit.watching.answers import answer
from normkit.watching.onset import origin
from normkit.watching.startup import WatchedModel
from normkit.watching.step_recorder import StepRecorder
from normkit.watching.time_series import RunHistory


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
        source=f"{steps} steps of training",
        tokens=training.tokens,
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
    return replace(inspection, training=answer(training, findings, sites, blocks, attentions))
