"""From what was measured of a run to an `Inspection`: series, parameters, findings, the beginning, the four answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from normkit.inspection import rules
from normkit.inspection.inspecting import model_facts
from normkit.inspection.result import Attention, Block, Inspection, Site
from normkit.inspection.running_statistics import ungathered
from normkit.inspection.spectrum import recurring_outliers
from normkit.inspection.training import Training
from normkit.watching.answers import answer
from normkit.watching.chronicle import Chronicle
from normkit.watching.gauging import Gauging
from normkit.watching.onset import origin
from normkit.watching.readings import Reader
from normkit.watching.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What is said of a run as a whole; the names are those of `Training`."""

    name: str
    steps: int
    every: int
    reason: str
    observer: str
    remarks: tuple[str, ...]
    optimizers: tuple[str, ...]
    ranks: int
    noticed: Mapping[str, int]
    """The step in which each error of a rule was said to be there."""


def judged(subject: Subject, gauging: Gauging | None, chronicle: Chronicle, run: Circumstances) -> Inspection:
    """Judge a run as far as it was measured.

    Args:
        subject: What is known of the model.
        gauging: What measures it; None if nothing does.
        chronicle: What was measured so far.
        run: The rest.
    """
    sites, blocks, attentions = _measured(subject, gauging, chronicle)
    structure = subject.structure
    training = Training(
        steps=run.steps,
        every=run.every,
        reports=chronicle.reports,
        reason=run.reason,
        reason_step=chronicle.reason_step if chronicle.reason else max(run.steps - 1, 0),
        ranks=run.ranks,
        observer=run.observer,
        remarks=run.remarks,
        optimizers=run.optimizers,
        series=chronicle.series(),
        parameters=chronicle.parameters,
        vocabulary=subject.vocabulary,
        broken=chronicle.broken,
        tokens=chronicle.tokens,
        changes=tuple(chronicle.motions.changes),
        settings=tuple(chronicle.motions.settings),
        stopped=chronicle.motions.stopped,
        skipped=tuple(chronicle.skipped),
    )
    training = replace(training, origin=origin(training))
    seen = max((site.input.rows for site in sites), default=0)
    # Processes count each their own: of many, those of a measured step times the steps.
    tokens = training.tokens if run.ranks == 1 and training.tokens else seen * run.steps
    training = replace(training, tokens=tokens)
    facts = rules.Facts(
        model=model_facts(subject.model, run.name, f"{run.steps} steps of training", tokens, 0, sites, blocks),
        sites=sites,
        blocks=blocks,
        attentions=attentions,
        final_norm=None if structure is None else structure.final_norm,
        # Of norms that were not measured nothing says that they are missing.
        intent=subject.intent if sites else None,
        passports={} if structure is None else {site.path: site.passport for site in structure.sites},
        others=() if structure is None else structure.others,
        baseline=subject.baseline if sites else None,
        training=training,
        shared=subject.shared,
        ungathered=() if structure is None else ungathered(subject.model, structure.others),
        handwritten=() if structure is None else structure.handwritten,
    )
    findings, checks = rules.check(facts)
    training = replace(training, worst=findings[0].severity if findings else "")
    if not training.was_noticed and findings and findings[0].severity == "error":
        step = min(
            (run.noticed[each.rule] for each in findings if each.rule in run.noticed), default=training.reason_step
        )
        training = replace(training, reason=findings[0].title, reason_step=step)
    return Inspection(
        model=facts.model,
        sites=sites,
        blocks=blocks,
        attentions=attentions,
        final_norm=facts.final_norm,
        recurring_outliers=recurring_outliers({site.path: site.gain for site in sites if site.gain is not None}),
        walk=None,
        findings=findings,
        checks=checks,
        unrecognised=(
            *((other.path, other.reason) for other in facts.others),
            *((norm.path, norm.reason) for norm in facts.handwritten),
        ),
        training=answer(training, findings, sites, blocks, attentions),
    )


def _measured(
    subject: Subject, gauging: Gauging | None, chronicle: Chronicle
) -> tuple[tuple[Site, ...], tuple[Block, ...], tuple[Attention, ...]]:
    """Norms, blocks and attentions as the last report has them; nothing before the first."""
    structure, reading = subject.structure, chronicle.reading
    if structure is None or gauging is None or reading is None:
        return (), (), ()
    reader = Reader(structure=structure, plan=gauging.plan, gradient_errors=subject.gradient_errors)
    with gauging.norms_at(reading.tables):
        sites = reader.sites(reading)
    return sites, reader.blocks(reading), reader.attentions(reading)
