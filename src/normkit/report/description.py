"""An inspection in words: the only place where its numbers become sentences and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from normkit.inspection.result import Inspection
from normkit.measurement.facts import Block
from normkit.measurement.quantities import Walk, WalkStep
from normkit.report.foldedness import FOLDING_METHOD, describe_foldedness, foldedness_facts
from normkit.report.geometry import geometry_facts, geometry_table, selection_table
from normkit.report.parts import NEEDS_RUN, Formula, Outcome, Passage, Report, Run, Stage
from normkit.report.sites import formulas, site_table
from normkit.report.training import RUN_METHOD, describe_training
from normkit.report.wording import PLACEMENTS, SEVERITIES
from normkit.rules.finding import Check
from normkit.show.formula import formula_name
from normkit.show.grouping import grouped, grouped_paths
from normkit.show.parts import Cell, Column, Fact, Table, Verdict, printable
from normkit.text import counted, degrees, rounded_percent, shortened, significant, spread

_MOST_FACTS = 5
_METHOD = (
    "Every norm was found by what it does, not by its name: its formula, eps and casts were recovered by calling a "
    "copy of it on chosen inputs.",
    "Statistics are over the rows (one token, one head) that entered each norm while the text ran through the model; "
    "padding was left out. Quantiles are read off a histogram of eight bins an octave.",
    "A block's placement was read from how its output grows when its input is scaled, not from its code.",
    "Geometry is that of up to 64 rows a call, spread evenly over the tokens, and of at most 16 batches. "
    "A norm's image is where its rows land with its real gain, were eps 0: an ellipsoid around its bias.",
    "A key can be selected if some query, whichever, has a larger product with it than with every other key of the "
    "text, those that a causal mask would hide included. 16 keys a head were tried, spread evenly over the first text.",
    "The bound on attention logits is the largest |query| times the largest |key| times the softmax scale; sampled "
    "logits are exact. Neither sees what the kernel does inside.",
    "One text on one machine: other inputs can be larger, and what never ran was not seen.",
    "A clean check means that its threshold was not crossed here; a check that lacked its input says so and is no "
    "proof of health.",
)


def describe(inspection: Inspection) -> Report:
    """Everything that is said about an inspection, worded and safe to print."""
    model = inspection.model
    size = f"{counted(model.parameters, 'parameter')} in {model.dtype}"
    width = f", width {model.width:,}" if model.width else ""
    kind = f" ({model.architecture})" if model.architecture else ""
    padding = f", {counted(model.padding, 'padding token')} left out" if model.padding else ""
    found = inspection.worst in ("error", "warning")
    run = describe_training(inspection.training, found=found) if inspection.training else None
    distance, shapes, outliers = describe_foldedness(inspection), geometry_facts(inspection), _outliers(inspection)
    blocks = [block.path for block in inspection.blocks]
    report = Report(
        title=model.name or model.class_name,
        subtitle=f"{model.class_name}{kind}, {size}{width}",
        source=f"{model.source or 'the given batches'}: {counted(model.tokens, 'token')}{padding}",
        verdict=_verdict(inspection, run),
        run=run,
        glance=_glance(inspection),
        findings=tuple(replace(each, sites=grouped_paths(each.sites, blocks)) for each in inspection.findings),
        passage=describe_walk(inspection.walk) if inspection.walk else None,
        sites=site_table(inspection),
        formulas=formulas(inspection.sites),
        geometry=geometry_table(inspection),
        selections=selection_table(inspection),
        blocks=_block_table(inspection.blocks),
        attention=_attention_table(inspection),
        distance=distance,
        outcomes=_outcomes(inspection.checks),
        outliers=outliers,
        shapes=shapes,
        unrecognised=tuple(Fact(label=path, value=reason) for path, reason in inspection.unrecognised),
        method=_METHOD + (FOLDING_METHOD if inspection.foldedness else ()) + (RUN_METHOD if run else ()),
    )
    return printable(report)


def describe_walk(walk: Walk) -> Passage:
    """One token's way through a norm, worded and safe to print."""
    facts = []
    if walk.ellipsoid_depth is not None:
        depth = f"{significant(walk.ellipsoid_depth)} of its size"
        facts.append(Fact(label="depth below the ellipsoid's surface", value=depth))
    if walk.plane_defect is not None:
        facts.append(Fact(label="distance from its hyperplane", value=significant(walk.plane_defect)))
    if math.isfinite(walk.relative_error):
        difference = (
            f"{significant(walk.relative_error)} of the largest entry; one rounding is {significant(walk.rounding)}"
        )
        facts.append(Fact(label="difference from the module's own output", value=difference))
    formula = Formula(name=formula_name(walk.spec), text=str(walk.spec), spec=walk.spec, norms="")
    passage = Passage(
        title=f"token {walk.position}, “{walk.token}”, at {walk.path}, n = {walk.features:,}",
        formula=formula,
        stages=tuple(_stage(step) for step in walk.steps),
        facts=tuple(facts),
    )
    return printable(passage)


def _verdict(inspection: Inspection, run: Run | None) -> Verdict:
    tally = f"{', '.join(outcome.said for outcome in _outcomes(inspection.checks) if outcome.label != 'finding')}."
    counts = Counter(finding.severity for finding in inspection.findings)
    if faults := counts["error"] + counts["warning"]:
        more = f", and {counted(faults - 1, 'more fault')}" if faults > 1 else ""
        severities = ", ".join(counted(counts[severity], severity) for severity in SEVERITIES if counts[severity])
        headline = f"{inspection.findings[0].title}{more}"
        return Verdict(tone=inspection.findings[0].severity, headline=headline, detail=f"{severities}; {tally}")
    if run is not None and run.verdict.tone != "good":
        found = f"{counted(counts['note'], 'note')}; " if counts["note"] else "No finding: "
        return Verdict(tone=run.verdict.tone, headline=run.verdict.headline, detail=f"{found}{tally}")
    if not inspection.sites:
        detail = f"This model has no normalization layer that a spec describes. {tally}"
        return Verdict(tone="neutral", headline="No norms", detail=detail)
    notes = f"; {counted(counts['note'], 'thing')} to know" if counts["note"] else ""
    detail = f"{counted(len(inspection.sites), 'norm')} looked at: {tally}"
    return Verdict(tone="good", headline=f"No fault found{notes}", detail=detail)


def _glance(inspection: Inspection) -> tuple[Fact, ...]:
    """At most five facts to know of the model first; facts that are not known are left out."""
    sites, model, facts = inspection.sites, inspection.model, []
    if math.isfinite(model.loss):
        facts.append(Fact(label="loss", value=_loss(model.loss)))
    facts += [fact for fact in foldedness_facts(inspection) if fact.label == "centred oddly"]
    if sites:
        names = Counter(formula_name(site.spec) for site in sites)
        facts.append(Fact(label="norms", value="; ".join(f"{count} {name}" for name, count in names.most_common())))
    if inspection.blocks:
        placements = Counter(PLACEMENTS[block.placement] for block in inspection.blocks)
        parts = [f"{count} {name}" for name, count in placements.most_common()]
        if inspection.final_norm:
            parts.append(f"final norm {inspection.final_norm}")
        elif any(block.placement != "post" for block in inspection.blocks):
            parts.append("no final norm")
        facts.append(Fact(label="blocks", value="; ".join(parts)))
    if sites:
        rms = spread(site.input.rms_median for site in sites)
        cut = rounded_percent(max(1 - site.attenuation.median for site in sites))
        facts.append(Fact(label="input rows", value=f"median rms {rms}; eps shortens median rows by up to {cut}"))
    if inspection.attentions:
        bound = max(attention.bound for attention in inspection.attentions)
        sampled = max(attention.sampled_max for attention in inspection.attentions)
        facts.append(Fact(label="attention", value=f"logits reach {significant(sampled)}, bound {significant(bound)}"))
    return tuple(facts[:_MOST_FACTS])


def _loss(loss: float) -> str:
    # A perplexity above that of random guessing with any vocabulary says nothing more.
    perplexity = f", perplexity {significant(math.exp(loss))}" if loss < 20 else ""
    return f"{loss:.3f} nats per token on this text{perplexity}"


def _outliers(inspection: Inspection) -> tuple[Fact, ...]:
    indices = [f"feature {index} at {counted(len(p), 'norm')}" for index, p in inspection.recurring_outliers]
    return (Fact(label="gain outliers", value=shortened(indices)),) if indices else ()


def _outcomes(checks: Sequence[Check]) -> tuple[Outcome, ...]:
    """The rules grouped by how they came out, in the order in which a reader asks."""
    groups: dict[str, list[Check]] = {"finding": [], "clean": [], NEEDS_RUN: [], "not checked": []}
    for check in checks:
        groups.setdefault(NEEDS_RUN if check.needs_run else check.status, []).append(check)
    return tuple(Outcome(label=label, checks=tuple(members)) for label, members in groups.items() if members)


def _stage(step: WalkStep) -> Stage:
    # After a mean is subtracted in float64, rounding errors of a few 1e-17 of the entries remain; they count as 0.
    mean = 0.0 if abs(step.mean) < 1e-14 * step.norm_over_sqrt_n else step.mean
    return Stage(
        name=step.name,
        does=step.does,
        facts=(
            Fact(label="mean", value=significant(mean)),
            Fact(label="length", value=significant(step.norm)),
            Fact(label="length / √n", value=significant(step.norm_over_sqrt_n)),
            Fact(label="angle to 1", value=degrees(step.angle_to_ones)),
        ),
        holds=step.holds,
        values=step.values,
        mean=step.mean,
        span=spread(value for value in step.values if math.isfinite(value)),
    )


def _slopes(values: Sequence[float]) -> str:
    """A slope to two digits, which is all its precision; a rounded -0 is 0."""
    low, high = (f"{round(value, 2) + 0.0:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


_BLOCK_COLUMNS = (
    Column(key="path", heading="block"),
    Column(key="placement", heading="placement"),
    Column(
        key="output",
        heading="output slope",
        numeric=True,
        meaning="1 where the residual stream passes through, 0 where the block normalizes it",
        words=_slopes,
    ),
    Column(
        key="branch",
        heading="branch slope",
        numeric=True,
        meaning="0 where the branch reads normalized rows, 1 where it does not",
        words=_slopes,
    ),
    Column(key="in", heading="rms in", numeric=True, meaning="of the median row of the residual stream", words=spread),
    Column(key="out", heading="rms out", numeric=True, words=spread),
)
_ATTENTION_COLUMNS = (
    Column(key="path", heading="attention call"),
    Column(key="heads", heading="heads"),
    Column(
        key="bound",
        heading="bound",
        numeric=True,
        meaning="no logit before softmax is larger in magnitude",
        words=spread,
    ),
    Column(key="sampled", heading="largest sampled", numeric=True, meaning="magnitude of an exact logit", words=spread),
    Column(key="entropy", heading="entropy", numeric=True, meaning="of the sampled rows, in nats", words=spread),
    Column(key="sharpest", heading="sharpest head", numeric=True, words=spread),
    Column(
        key="uniform", heading="uniform", numeric=True, meaning="the entropy of attention spread evenly", words=spread
    ),
)


def _block_table(blocks: tuple[Block, ...]) -> Table:
    rows = []
    for block in blocks:
        numbers = (block.output_slope, block.branch_slope, block.stream_in.rms_median, block.stream_out.rms_median)
        cells = [column.cell([number]) for column, number in zip(_BLOCK_COLUMNS[2:], numbers, strict=True)]
        rows.append((Cell(text=block.path), Cell(text=PLACEMENTS[block.placement]), *cells))
    empty = "No repeated block was found, so placement was not judged."
    table = Table(title="Blocks and placement", columns=_BLOCK_COLUMNS, rows=tuple(rows), empty=empty)
    return grouped(table, [block.path for block in blocks])


def _attention_table(inspection: Inspection) -> Table:
    rows = []
    for call in inspection.attentions:
        numbers = (call.bound, call.sampled_max, call.entropy, call.entropy_min, call.uniform_entropy)
        cells = [column.cell([number]) for column, number in zip(_ATTENTION_COLUMNS[2:], numbers, strict=True)]
        rows.append((Cell(text=call.path), Cell(text=str(call.heads)), *cells))
    empty = "No attention call was seen."
    table = Table(title="Attention", columns=_ATTENTION_COLUMNS, rows=tuple(rows), empty=empty)
    return grouped(table, [block.path for block in inspection.blocks])
