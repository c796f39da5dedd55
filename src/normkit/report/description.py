"""An inspection in words: the one place where its numbers become sentences and tables."""

from __future__ import annotations

import math
from collections import Counter

from normkit.inspection.result import Attention, Block, Inspection, Walk, WalkStep
from normkit.plots.numerals import counted, degrees, percent, percent_spread, significant, spread
from normkit.report.foldedness import FOLDING_METHOD, describe_foldedness, foldedness_facts
from normkit.report.geometry import folded_geometry_table, geometry_facts, geometry_table, selection_table
from normkit.report.parts import Cell, Column, Fact, Formula, Passage, Report, Run, Stage, Table, Verdict
from normkit.report.sites import folded_table, formulas, site_table
from normkit.report.training import RUN_METHOD, describe_training
from normkit.report.wording import PLACEMENTS, SEVERITIES, formula_name, printable, shortened

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
    report = Report(
        title=model.name or model.class_name,
        subtitle=f"{model.class_name}{kind}, {size}{width}",
        source=f"{model.source or 'the given batches'}: {counted(model.tokens, 'token')}{padding}",
        verdict=_verdict(inspection, run),
        run=run,
        glance=_glance(inspection),
        findings=inspection.findings,
        passage=describe_walk(inspection.walk) if inspection.walk else None,
        sites=site_table(inspection),
        folded=folded_table(inspection),
        formulas=formulas(inspection.sites),
        geometry=geometry_table(inspection),
        folded_geometry=folded_geometry_table(inspection),
        selections=selection_table(inspection.selections),
        blocks=_block_table(inspection.blocks),
        attention=_attention_table(inspection.attentions),
        distance=describe_foldedness(inspection),
        checks=inspection.checks,
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
    entries = [value for step in walk.steps for value in step.values if math.isfinite(value)]
    passage = Passage(
        title=f"token {walk.position}, “{walk.token}”, at {walk.path}, n = {walk.features:,}",
        formula=formula,
        stages=tuple(_stage(step) for step in walk.steps),
        lowest=min([-1.0, *entries]),
        highest=max([1.0, *entries]),
        facts=tuple(facts),
    )
    return printable(passage)


def _verdict(inspection: Inspection, run: Run | None) -> Verdict:
    checks = Counter(check.status for check in inspection.checks)
    idle = f", {checks['not applicable']} not applicable" if checks["not applicable"] else ""
    tally = f"{counted(checks['clean'], 'check')} clean, {checks['not checked']} not checked{idle}."
    if inspection.worst:
        counts = Counter(finding.severity for finding in inspection.findings)
        headline = ", ".join(counted(counts[severity], severity) for severity in SEVERITIES if counts[severity])
        return Verdict(tone=inspection.worst, headline=headline, detail=tally)
    if run is not None and run.verdict.tone != "good":
        return Verdict(tone=run.verdict.tone, headline=run.verdict.headline, detail=f"No finding: {tally}")
    if not inspection.sites:
        detail = f"This model has no normalization layer that a spec describes. {tally}"
        return Verdict(tone="neutral", headline="No norms", detail=detail)
    detail = f"Nothing wrong was found in {counted(len(inspection.sites), 'norm')}: {tally}"
    return Verdict(tone="good", headline="Healthy", detail=detail)


def _glance(inspection: Inspection) -> tuple[Fact, ...]:
    """The model's norms in a few lines; what is not there is left out."""
    sites, facts = inspection.sites, []
    if sites:
        names = Counter(formula_name(site.spec) for site in sites)
        parts = [f"{count} {name}" for name, count in names.most_common()]
        facts.append(Fact(label="norms", value="; ".join(parts)))
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
        ones = percent_spread(site.input.mean_energy for site in sites)
        facts.append(Fact(label="input rows", value=f"median rms {rms}; {ones} of their energy along all-ones"))
        cut = percent(max(1 - site.attenuation.median for site in sites))
        share = max(site.attenuation.share_below_99 for site in sites)
        many = f"up to {percent(share)} of rows" if share else "no row"
        facts.append(Fact(label="eps", value=f"shortens median rows by up to {cut}, {many} by over 1 %"))
    if inspection.attentions:
        bound = max(attention.bound for attention in inspection.attentions)
        sampled = max(attention.sampled_max for attention in inspection.attentions)
        facts.append(Fact(label="attention", value=f"logits reach {significant(sampled)}, bound {significant(bound)}"))
    facts += geometry_facts(inspection)
    facts += foldedness_facts(inspection)
    if inspection.recurring_outliers:
        indices = [f"feature {index} at {counted(len(p), 'norm')}" for index, p in inspection.recurring_outliers]
        facts.append(Fact(label="gain outliers", value=shortened(indices)))
    return tuple(facts)


def _stage(step: WalkStep) -> Stage:
    # A mean taken away in float64 leaves its rounding, a few 1e-17 of the entries: that is 0.
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
    )


def _block_table(blocks: tuple[Block, ...]) -> Table:
    columns = (
        Column(key="path", heading="block"),
        Column(key="placement", heading="placement"),
        Column(
            key="output",
            heading="output slope",
            numeric=True,
            meaning="1 where the residual stream passes through, 0 where the block normalizes it",
        ),
        Column(
            key="branch",
            heading="branch slope",
            numeric=True,
            meaning="0 where the branch reads normalized rows, 1 where it does not",
        ),
        Column(key="in", heading="rms in", numeric=True, meaning="of the median row of the residual stream"),
        Column(key="out", heading="rms out", numeric=True),
    )
    rows = tuple(
        (
            Cell(text=block.path),
            Cell(text=PLACEMENTS[block.placement]),
            Cell(text=f"{block.output_slope:.2f}", value=block.output_slope),
            Cell(text=f"{block.branch_slope:.2f}", value=block.branch_slope),
            Cell(text=significant(block.stream_in.rms_median), value=block.stream_in.rms_median),
            Cell(text=significant(block.stream_out.rms_median), value=block.stream_out.rms_median),
        )
        for block in blocks
    )
    empty = "No repeated block was found, so placement was not judged."
    return Table(title="Blocks and placement", columns=columns, rows=rows, empty=empty)


def _attention_table(attentions: tuple[Attention, ...]) -> Table:
    columns = (
        Column(key="path", heading="attention call"),
        Column(key="heads", heading="heads", numeric=True),
        Column(key="bound", heading="bound", numeric=True, meaning="no logit before softmax is larger in magnitude"),
        Column(key="sampled", heading="largest sampled", numeric=True, meaning="magnitude of an exact logit"),
        Column(key="entropy", heading="entropy", numeric=True, meaning="of the sampled rows, in nats"),
        Column(key="sharpest", heading="sharpest head", numeric=True),
        Column(key="uniform", heading="uniform", numeric=True, meaning="the entropy of attention spread evenly"),
    )
    rows = tuple(
        (
            Cell(text=attention.path),
            Cell(text=str(attention.heads), value=attention.heads),
            Cell(text=significant(attention.bound), value=attention.bound),
            Cell(text=significant(attention.sampled_max), value=attention.sampled_max),
            Cell(text=significant(attention.entropy), value=attention.entropy),
            Cell(text=significant(attention.entropy_min), value=attention.entropy_min),
            Cell(text=significant(attention.uniform_entropy), value=attention.uniform_entropy),
        )
        for attention in attentions
    )
    empty = "No attention call was seen."
    return Table(title="Attention", columns=columns, rows=rows, empty=empty)
