"""A report for a terminal: rich renderables that fit 100 columns and say everything without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from normkit.inspection.result import Check, Finding, Inspection, Walk
from normkit.report.description import describe, describe_walk
from normkit.report.grids import lines, marked
from normkit.report.parts import Fact, Formula, Reply, Run, Table, Verdict
from normkit.report.wording import shortened, tail

WIDTH = 100
"""Columns that tables are laid out for."""

# Past this many norms the summary folds alike neighbours; past as many rows it stops.
_MOST_ROWS = 16


def summary(inspection: Inspection) -> RenderableType:
    """The verdict, the findings, the norms and the checks, on one screen for a small model."""
    report = describe(inspection)
    head = Text.assemble((report.title, "bold"), "  ", report.subtitle, "\n", (report.source, "dim"))
    parts: list[RenderableType] = [head, "", _verdict(report.verdict)]
    if report.run:
        parts += [_run(report.run, report.verdict), ""] if report.findings else [_run(report.run, report.verdict)]
    parts += map(finding, report.findings)
    # The table says the rest of what stands at a glance; what is wrong needs the room of what is merely so. With a run
    # the table stands in the page only.
    left_out = set() if report.run else {"norms", "input rows", "eps"}
    left_out |= {"geometry", "images", "keys", "folding"} if report.findings or report.run else set()
    glance = [fact for fact in report.glance if fact.label not in left_out]
    if report.run:
        glance += [fact for fact in report.run.facts if fact.label != "optimizer"]
    if glance:
        parts += ["", lines(glance)]
    if report.sites.rows and not report.run:
        table = report.sites if len(report.sites.rows) <= _MOST_ROWS else report.folded
        parts += ["", _norms(table, report.formulas)]
    if report.unrecognised:
        parts += ["", Text("not identified", "bold"), lines(report.unrecognised)]
    return Group(*parts, "", _checks(report.checks))


def walk_table(walk: Walk) -> RenderableType:
    """One token's vector, stage by stage: its mean, length and angle, and what is true from there on."""
    passage = describe_walk(walk)
    grid = _ruled()
    grid.add_column("stage", no_wrap=True)
    for fact in passage.stages[0].facts:
        grid.add_column(fact.label, justify="right", no_wrap=True)
    grid.add_column("what is true now")
    for stage in passage.stages:
        holds = stage.holds or stage.does
        grid.add_row(Text(stage.name), *(Text(fact.value) for fact in stage.facts), Text(holds))
    return Group(Text(passage.title, "bold"), Text(passage.formula.text), "", grid, lines(passage.facts))


def side_by_side(inspections: Sequence[Inspection]) -> RenderableType:
    """The verdicts of several models, one row each."""
    grid = _ruled()
    for heading in ("model", "norms", "verdict", "findings"):
        grid.add_column(heading)
    for inspection in inspections:
        report = describe(inspection)
        norms = next((fact.value for fact in report.glance if fact.label == "norms"), "none")
        found = "\n".join(f"{finding.rule} {finding.title}" for finding in report.findings) or "none"
        grid.add_row(Text(report.title), Text(norms), marked(report.verdict.tone, report.verdict.headline), Text(found))
    return grid


def finding(found: Finding) -> RenderableType:
    """The finding with its most telling evidence; the rest of it and the threshold stand in the page."""
    steps = found.remedy if len(found.remedy) < 2 else [f"{n}. {step}" for n, step in enumerate(found.remedy, 1)]
    facts = (
        Fact(label="measured", value=found.measured),
        Fact(label="evidence", value="".join(found.evidence[:1])),
        Fact(label="why", value=found.why),
        Fact(label="do", value="\n".join(steps)),
        Fact(label="confirm", value=found.confirm),
    )
    places = found.sites[0] if len(found.sites) == 1 else f"{len(found.sites)} places"
    where = f"  at {places}" if found.sites else ""
    head = marked(found.severity, found.severity)
    title = Text.assemble(head, f"  {found.rule}  ", (found.title, "bold"), where)
    return Group(title, Padding(lines(fact for fact in facts if fact.value), (0, 0, 0, 2)))


def _ruled() -> Grid:
    return Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")


def _verdict(verdict: Verdict) -> RenderableType:
    return Text.assemble(marked(verdict.tone, verdict.headline), "  ", verdict.detail)


def _run(run: Run, verdict: Verdict) -> RenderableType:
    """What happened, where it began, the questions answered, what to change first."""
    parts: list[RenderableType] = []
    if run.verdict.headline != verdict.headline:
        parts.append(_verdict(run.verdict))
    began = []
    if run.onset:
        where = f" at {run.onset.path}" if run.onset.path else ""
        began = [Fact(label="began", value=f"{run.onset.what}{where}: {run.onset.detail}")]
    parts.append(Padding(lines([*began, *run.glance]), (0, 0, 0, 2)))
    if run.replies:
        parts += ["", _replies(run.replies)]
    steps = run.first_change if len(run.first_change) < 2 else [f"{n}. {s}" for n, s in enumerate(run.first_change, 1)]
    last = (Fact(label="change first", value="\n".join(steps)), Fact(label="confirm", value=run.confirm))
    if said := [fact for fact in last if fact.value]:
        parts += ["", lines(said)]
    return Group(*parts)


def _replies(replies: Sequence[Reply]) -> RenderableType:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for number, reply in enumerate(replies, 1):
        at = f" At {shortened(reply.places, 2)}." if reply.places and reply.places[0] not in reply.detail else ""
        answer = Text.assemble((f"{number}. {reply.question}", "bold"), f"  {reply.detail}{at}")
        grid.add_row(marked(reply.tone, reply.verdict), answer)
    return grid


def _norms(table: Table, formulas: Sequence[Formula]) -> RenderableType:
    keys = ("path", "formula", "role", "rms", "ones", "eps", "gain")
    shown = table.only(*(key for key in keys if key != "formula" or len(formulas) > 1))
    parts = [_grid(shown)]
    if len(shown.rows) > _MOST_ROWS:
        parts.append(Text(f"and {len(shown.rows) - _MOST_ROWS} rows more", "dim"))
    parts.append(Text(shown.legend, "dim"))
    parts += [Text(f"{formula.norms} {formula.name}: {formula.text}") for formula in formulas]
    return Group(*parts)


def _grid(table: Table) -> RenderableType:
    rows = table.rows[:_MOST_ROWS]
    # Two columns of space between columns; the names of rows get what the numbers leave.
    taken = sum(2 + max(len(text) for text in (column.heading, *(row[place].text for row in rows)))
                for place, column in enumerate(table.columns) if place)  # fmt: skip
    grid = _ruled()
    for column in table.columns:
        grid.add_column(column.heading, justify="right" if column.numeric else "left", no_wrap=True)
    for name, *cells in rows:
        grid.add_row(Text(tail(name.text, max(12, WIDTH - taken))), *(Text(cell.text) for cell in cells))
    return grid


def _checks(checks: Sequence[Check]) -> RenderableType:
    """The rules by what became of them; those with a finding stand above."""
    clean = " ".join(check.rule for check in checks if check.status == "clean")
    parts = [f"clean {clean}" if clean else ""]
    for status in ("not checked", "not applicable"):
        reasons: dict[str, list[str]] = {}
        for check in checks:
            if check.status == status:
                reasons.setdefault(check.reason, []).append(check.rule)
        told = ", ".join(f"{' '.join(rules)} ({reason})" for reason, rules in reasons.items())
        parts.append(f"{status} {told}" if told else "")
    return lines([Fact(label="checks", value="; ".join(part for part in parts if part) or "none")])
