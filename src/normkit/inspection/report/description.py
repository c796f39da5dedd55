"""An inspection in words: the only place where its numbers become sentences and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from normkit.inspection.first_text import Walk, WalkStep
from normkit.inspection.report.batch_norms import batch_norm_glance, describe_batch_norms
from normkit.inspection.report.run import RUN_METHOD, describe_run, describe_steps
from normkit.inspection.report.tables import (
    FOLDING_METHOD,
    PLACEMENTS,
    attention_table,
    block_table,
    describe_foldedness,
    formulas,
    geometry_table,
    norm_table,
    placed,
    selection_table,
)
from normkit.rules.finding import Check, Finding, Severity
from normkit.show import embedding
from normkit.show.drawing import Drawing
from normkit.show.embedding import bars
from normkit.show.grouping import grouped_paths
from normkit.show.parts import Fact, Section, Verdict, formula_name, printable
from normkit.text import (
    counted,
    degree_spread,
    degrees,
    percent_spread,
    rounded_percent,
    shortened,
    significant,
    spread,
)

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection

NEEDS_RUN = "need a training run"
"""The label of rules that only a training run or a training step can tell."""
_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
_MOST_FACTS = 5
_HERE = Path(__file__).parent
_FRAME_HEIGHT = 760
# Beginning of a figure's name -> the section that it belongs to.
_SECTIONS = {"run": "steps", "attention": "attention", "ellipsoid": "geometry", "": "depth"}
_METHOD = (
    "Every norm was found by what it does, not by its name: its formula, eps and casts were recovered by calling a "
    "copy of it on chosen inputs.",
    "Statistics are over the rows (one token, patch, pixel or frame, one head) that entered each norm while the model "
    "ran; "
    "padding was left out. Quantiles are read off a histogram of eight bins an octave.",
    "A block's placement was read from how its output grows when its input is scaled, not from its code.",
    "Geometry is that of up to 64 rows a call, spread evenly over them, and of at most 16 batches. "
    "A norm's image is where its rows land with its real gain, were eps 0: an ellipsoid around its bias.",
    "A key can be selected if some query, whichever, has a larger product with it than with every other key of the "
    "input, those that a causal mask would hide included. 16 keys a head were tried, spread evenly over the first one.",
    "The bound on attention logits is the largest |query| times the largest |key| times the softmax scale; sampled "
    "logits are exact. Neither sees what the kernel does inside.",
    "One input on one machine: other inputs can be larger, and what never ran was not seen.",
    "A clean check means that its threshold was not crossed here; a check that lacked its input says so and is no "
    "proof of health.",
)


@dataclass(frozen=True, kw_only=True)
class Report(Section):
    """Everything that is said about one inspection; its facts are at most five about the model."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    """Worst first, with places grouped by block."""

    def fact(self, label: str) -> str:
        """The value of a fact; "" if there is none of that label."""
        return next((fact.value for fact in self.facts if fact.label == label), "")


def describe(inspection: Inspection) -> Report:
    """Everything that is said about an inspection, worded and safe to print."""
    model, training, blocks = inspection.model, inspection.training, [block.path for block in inspection.blocks]
    size = f"{counted(model.parameters, 'parameter')} in {model.dtype}"
    width = f", width {model.width:,}" if model.width else ""
    # A model in memory is called by its class.
    is_named = model.name not in ("", model.class_name)
    kind = [model.class_name] * is_named + [f"({model.architecture})"] * bool(model.architecture)
    said_once = f"{' '.join(kind)}, " if kind else ""
    padding = f", {counted(model.padding, 'padding token')} left out" if model.padding else ""
    rows = _rows(inspection)
    run = describe_run(training, found=inspection.worst in ("error", "warning")) if training else None
    folding = describe_foldedness(inspection)
    outcomes = _outcomes(inspection)
    tally = ", ".join(outcome.title for outcome in outcomes)
    odd = [fact for fact in folding.facts if fact.label == "centred oddly"] if folding else []
    glance = _glance(inspection, odd)
    said = {fact.label: fact.value for fact in glance}
    kinds = formulas(inspection.sites)
    attention, placement, shapes = attention_table(inspection), block_table(inspection), _shapes(inspection)
    geometry = geometry_table(inspection), selection_table(inspection)
    method = _METHOD + (FOLDING_METHOD if inspection.foldedness else ()) + (RUN_METHOD if run else ())
    outliers = [f"feature {index} at {counted(len(p), 'norm')}" for index, p in inspection.recurring_outliers]
    batch_norms, known = describe_batch_norms(inspection), {norm.path for norm in inspection.batch_norms}
    norms = Section(
        id="norms",
        title="The norms",
        gist="; ".join(f"{each.gist} {each.title}" for each in kinds),
        tables=(norm_table(inspection),),
        sections=kinds,
        facts=tuple(Fact(path, reason) for path, reason in inspection.unrecognised if path not in known),
    )
    sections = [
        *([norms] if inspection.sites or norms.facts or not batch_norms else []),
        *([batch_norms] if batch_norms else []),
        Section(
            id="depth",
            title="Over depth",
            facts=(Fact("gain outliers", shortened(outliers)),) if outliers else (),
        ),
        Section(id="attention", title="Attention", gist=said.get("attention") or attention.empty, tables=(attention,)),
        Section(
            id="blocks",
            title="Blocks and placement",
            gist=said.get("blocks") or placement.empty,
            tables=(placement,),
        ),
        Section(id="checks", title="Checks", gist=tally, sections=outcomes),
        Section(
            id="method",
            title="Method and limits",
            gist="what was measured and how, and what was not",
            notes=method,
        ),
    ]
    if not inspection.sites and batch_norms:
        # Rows, attention and placement are told of norms that have rows.
        sections = [section for section in sections if section.id not in ("attention", "blocks")]
        folding = None
    # A watch samples no rows: where nothing was tried there is nothing to say.
    elif run is None or any(table.rows for table in geometry):
        gist = shapes[0].value if shapes else ""
        place = next(place for place, section in enumerate(sections) if section.id == "attention")
        sections.insert(place, Section(id="geometry", title="Geometry", gist=gist, facts=shapes, tables=geometry))
    if folding:
        sections.insert(-2, folding)
    if inspection.walk:
        sections.insert(0, describe_walk(inspection.walk))
    if run and training:
        sections = [run, describe_steps(training), *sections]
    report = Report(
        title=model.name or model.class_name,
        gist=f"{said_once}{size}{width}",
        source=f"{model.source or 'the given batches'}: {counted(model.tokens, model.unit)}{padding}{rows}",
        verdict=_verdict(inspection, run),
        facts=glance,
        sections=tuple(sections),
        findings=tuple(replace(each, sites=grouped_paths(each.sites, blocks)) for each in inspection.findings),
    )
    return printable(report)


def _rows(inspection: Inspection) -> str:
    """The unit that the norms see of images or of sound; nothing where all see tokens."""
    kinds = Counter(site.row for site in inspection.sites).most_common()
    if not kinds or kinds == [("token", len(inspection.sites))]:
        return ""
    if len(kinds) == 1:
        return f"; one row of a norm is one {kinds[0][0]}"
    each = (f"{counted(0, kind).removeprefix('0 ')} at {counted(count, 'norm')}" for kind, count in kinds)
    return f"; rows are {', '.join(each)}"


def describe_walk(walk: Walk) -> Section:
    """One token's way through a norm, stage by stage, worded and safe to print."""
    facts = []
    if walk.ellipsoid_depth is not None:
        depth = f"{significant(walk.ellipsoid_depth)} of its size"
        facts.append(Fact("depth below the ellipsoid's surface", depth))
    if walk.plane_defect is not None:
        facts.append(Fact("distance from its hyperplane", significant(walk.plane_defect)))
    if math.isfinite(walk.relative_error):
        difference = (
            f"{significant(walk.relative_error)} of the largest entry; one rounding is {significant(walk.rounding)}"
        )
        facts.append(Fact("difference from the module's own output", difference))
    passage = Section(
        id="walk",
        title="One token",
        gist=f"token {walk.position}, “{walk.token}”, at {walk.path}, n = {walk.features:,}",
        formula=walk.spec,
        sections=tuple(map(_stage, walk.steps)),
        facts=tuple(facts),
    )
    return printable(passage)


def _stage(step: WalkStep) -> Section:
    """One stage: what is done, then what is true from here on; the gist is the range of the first entries."""
    # After a mean is subtracted in float64, rounding errors of a few 1e-17 of the entries remain; they count as 0.
    mean = 0.0 if abs(step.mean) < 1e-14 * step.norm_over_sqrt_n else step.mean
    return Section(
        title=step.name,
        gist=spread(value for value in step.values if math.isfinite(value)),
        notes=(step.does, *([step.holds] if step.holds else [])),
        figure=bars(step.values, step.mean),
        facts=(
            Fact("mean", significant(mean)),
            Fact("length", significant(step.norm)),
            Fact("length / √n", significant(step.norm_over_sqrt_n)),
            Fact("angle to 1", degrees(step.angle_to_ones)),
        ),
    )


def _verdict(inspection: Inspection, run: Section | None) -> Verdict:
    told = [outcome.title for outcome in _outcomes(inspection) if outcome.gist not in ("finding", "not applicable")]
    tally = f"{', '.join(told)}."
    counts = Counter(finding.severity for finding in inspection.findings)
    if faults := counts["error"] + counts["warning"]:
        more = f", and {counted(faults - 1, 'more fault')}" if faults > 1 else ""
        severities = ", ".join(counted(counts[severity], severity) for severity in _SEVERITIES if counts[severity])
        headline = f"{inspection.findings[0].title}{more}"
        return Verdict(tone=inspection.findings[0].severity, headline=headline, detail=f"{severities}; {tally}")
    if run is not None and run.verdict is not None and run.verdict.tone != "good":
        found = f"{counted(counts['note'], 'note')}; " if counts["note"] else "No finding: "
        return replace(run.verdict, detail=f"{found}{tally}")
    num_others = 0 if inspection.sites else len(_other_norms(inspection))
    numbers = ((len(inspection.sites), "norm"), (len(inspection.batch_norms), "batch norm"), (num_others, "other norm"))
    looked_at = [counted(number, noun) for number, noun in numbers if number]
    if not looked_at:
        detail = f"This model has no normalization layer that a spec describes. {tally}"
        return Verdict(tone="neutral", headline="No norms", detail=detail)
    notes = f"; {counted(counts['note'], 'thing')} to know" if counts["note"] else ""
    detail = f"{' and '.join(looked_at)} looked at: {tally}"
    return Verdict(tone="good", headline=f"No fault found{notes}", detail=detail)


def _other_norms(inspection: Inspection) -> dict[str, str]:
    """The norms that no spec describes and that are no batch norms, as gated ones: path -> what they are."""
    known = {norm.path for norm in inspection.batch_norms}
    return {path: reason for path, reason in inspection.unrecognised if path not in known}


def _glance(inspection: Inspection, odd: Sequence[Fact]) -> tuple[Fact, ...]:
    """At most five facts to know of the model first; facts that are not known are left out."""
    sites, model, facts = inspection.sites, inspection.model, []
    if math.isfinite(model.loss):
        # A perplexity above that of random guessing with any vocabulary says nothing more.
        perplexity = f", perplexity {significant(math.exp(model.loss))}" if model.loss < 20 else ""
        facts.append(Fact("loss", f"{model.loss:.3f} nats per token on this text{perplexity}"))
    facts += odd
    if sites:
        names = Counter(formula_name(site.spec) for site in sites)
        facts.append(Fact("norms", "; ".join(f"{count} {name}" for name, count in names.most_common())))
    if inspection.batch_norms:
        facts.append(batch_norm_glance(inspection))
    if (others := _other_norms(inspection)) and not sites:
        # The reason begins with the class.
        classes = Counter(reason.partition(":")[0] for reason in others.values())
        kinds = "; ".join(f"{count} {name}" for name, count in classes.most_common())
        facts.append(Fact("other norms", f"{kinds}, which no spec describes"))
    if inspection.blocks:
        placements = Counter(PLACEMENTS[block.placement] for block in inspection.blocks)
        parts = [placed(count, name) for name, count in placements.most_common()]
        if inspection.final_norm:
            parts.append(f"final norm {inspection.final_norm}")
        elif any(block.placement != "post" for block in inspection.blocks):
            parts.append("no final norm")
        facts.append(Fact("blocks", "; ".join(parts)))
    if sites:
        rms = spread(site.input.rms_median for site in sites)
        cut = rounded_percent(max(1 - site.attenuation.median for site in sites))
        facts.append(Fact("input rows", f"median rms {rms}; eps shortens median rows by up to {cut}"))
    if inspection.attentions:
        bound = max(attention.bound for attention in inspection.attentions)
        sampled = max(attention.sampled_max for attention in inspection.attentions)
        facts.append(Fact("attention", f"logits reach {significant(sampled)}, bound {significant(bound)}"))
    return tuple(facts[:_MOST_FACTS])


def _shapes(inspection: Inspection) -> tuple[Fact, ...]:
    """Rotation, lengths, images and keys, one line each; what was not measured is left out."""
    shapes = [site.geometry for site in inspection.sites if site.geometry]
    facts = []
    if shapes:
        turn = degree_spread(shape.rotation[1] for shape in shapes)
        before, after = spread(shape.spread_in for shape in shapes), spread(shape.spread_out for shape in shapes)
        facts.append(Fact("geometry", f"median rows turn {turn}; lengths differ {before}-fold in, {after} out"))
    ratios = [shape.elongation for shape in shapes if shape.semi_axes]
    are_spheres = all(shape.is_unit_sphere for shape in shapes if shape.semi_axes)
    words = ["spheres, as no gain differs from 1" if are_spheres else f"{spread(ratios)} times as long as thick"]
    words = words if ratios else []
    if dead := [site.path for site in inspection.sites if site.geometry and site.geometry.vanishing_gains]:
        count = sum(shape.vanishing_gains for shape in shapes)
        words.append(f"{counted(count, 'gain')} as good as 0 at {shortened(dead, 1)}")
    if words:
        facts.append(Fact("ellipsoids", "; ".join(words)))
    if shares := [share for selection in inspection.selections for _, share in selection.heads]:
        most = max(selection.sampled for selection in inspection.selections)
        some = percent_spread([min(shares), max(shares)])
        heads = counted(len(shares), "head")
        facts.append(Fact("keys", f"{some} of {most} sampled in each of {heads} can be selected"))
    return tuple(facts)


def _outcomes(inspection: Inspection) -> tuple[Section, ...]:
    """The rules grouped by how they came out (the gist), in the order in which a reader asks, and then by reason."""
    groups: dict[str, list[Check]] = {"finding": [], "clean": [], NEEDS_RUN: [], "not checked": []}
    for check in inspection.checks:
        groups.setdefault(NEEDS_RUN if check.needs_run else check.status, []).append(check)
    severities = {finding.rule: finding.severity for finding in reversed(inspection.findings)}
    outcomes = []
    for label, checks in groups.items():
        number = len(checks)
        titles = {
            "clean": f"{counted(number, 'check')} clean",
            "finding": counted(number, "finding"),
            NEEDS_RUN: f"{number} need{'s' if number == 1 else ''} a training run",
        }
        reasons: dict[str, list[Fact]] = {}
        for check in checks:
            tone = severities.get(check.rule, "warning") if check.status == "finding" else "neutral"
            fact = Fact(check.rule, check.title, tone="good" if check.status == "clean" else tone)
            reasons.setdefault(check.reason, []).append(fact)
        if checks:
            parts = tuple(Section(gist=reason, facts=tuple(facts)) for reason, facts in reasons.items())
            outcomes.append(Section(title=titles.get(label, f"{number} {label}"), gist=label, sections=parts))
    return tuple(outcomes)


def render(inspection: Inspection) -> str:
    """The page as text, self-contained."""
    # A terminal has neither figures nor templates.
    from normkit.inspection.figures import drawings
    from normkit.show.html import html_page

    figures: dict[str, list[Drawing]] = {section: [] for section in _SECTIONS.values()}
    for figure in printable(drawings(inspection)):
        section = next(section for start, section in _SECTIONS.items() if figure.name.startswith(start))
        figures[section].append(figure)
    return html_page(
        _HERE / "inspection.html",
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
        kind="inspection",
        start="verdict",
        report=describe(inspection),
        figures=figures,
        document=embedding.packed_json(inspection.to_json()),
    )


def frame(inspection: Inspection) -> str:
    """The page in a sandboxed frame, for notebooks."""
    title = f"normkit inspection of {describe(inspection).title}"
    return embedding.frame(render(inspection), title, height=_FRAME_HEIGHT)
