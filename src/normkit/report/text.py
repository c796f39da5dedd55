"""A report for a terminal: rich renderables that need no colour and show every number at any width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from normkit.identification.sites import matches
from normkit.inspection.result import Inspection
from normkit.measurement.quantities import Walk
from normkit.report.description import describe, describe_walk
from normkit.report.parts import Formula, Outcome, Reply, Run, Stage
from normkit.rules.finding import Finding
from normkit.show.parts import Fact, Table, Verdict
from normkit.show.terminal import fitting, lines, marked
from normkit.text import numbered, shortened

# Above this number of norms the summary groups similar neighbours; after this number of rows it stops.
_MOST_ROWS = 16
# From this width on, a terminal has room for words beside numbers.
_WIDE = 76
# Columns that names of norms should have before numbers are broken into two lines, and their least width.
_NAME, _LEAST_NAME = 20, 12
_IN_TABLE = {"norms", "input rows"}


def summary(inspection: Inspection, site: str | None = None) -> RenderableType:
    """The verdict, what to know, the findings, the norms and the checks, on one screen for a small model.

    Args:
        inspection: What was found.
        site: List only norms whose path this is or matches; findings are those of all norms.
    """
    report = describe(inspection)
    head = Text.assemble((report.title, "bold"), "  ", report.subtitle, "\n", (report.source, "dim"))
    parts: list[RenderableType] = [head, "", _verdict(report.verdict)]
    hint = (f"normkit rule {found.rule} says where the limit comes from" for found in report.findings[:1])
    findings = [*map(finding, report.findings), *hint]
    if report.run:
        parts += [_run(report.run, report.verdict), ""] if report.findings else [_run(report.run, report.verdict)]
        facts = [*report.glance, *(fact for fact in report.run.facts if fact.label != "optimizer")]
        parts += [*findings, "", lines(facts)]
    else:
        # The table contains the other facts.
        parts.append(lines(fact for fact in report.glance if fact.label not in _IN_TABLE))
        parts += ["", *findings] if findings else []
    if report.sites.rows and not report.run:
        parts += ["", Norms(_only(report.sites, site), report.formulas)]
    if report.unrecognised:
        parts += ["", Text("not identified", "bold"), lines(report.unrecognised)]
    return Group(*parts, "", _checks(report.outcomes))


def walk_table(walk: Walk) -> RenderableType:
    """One token's vector, stage by stage: its mean, length and angle, and what is true from there on."""
    passage = describe_walk(walk)
    head = (Text(passage.title, "bold"), Text(passage.formula.text), "")
    return Group(*head, Stages(passage.stages), lines(passage.facts))


@dataclass(frozen=True)
class Stages:
    """The stages of a token as a table; what is true stands below it where there is no room beside the numbers."""

    stages: tuple[Stage, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for a width."""
        beside = options.max_width >= _WIDE
        grid = _ruled()
        grid.add_column("stage", no_wrap=True)
        for fact in self.stages[0].facts:
            heading = fact.label if beside else fact.label.replace(" ", "\n", 1)
            grid.add_column(heading, justify="right", no_wrap=True)
        if beside:
            grid.add_column("what is true now")
        truths = [Fact(label=stage.name, value=stage.holds or stage.does) for stage in self.stages]
        for stage, truth in zip(self.stages, truths, strict=True):
            numbers = [Text(fact.value) for fact in stage.facts]
            grid.add_row(Text(stage.name), *numbers, *([Text(truth.value)] if beside else []))
        yield grid
        if not beside:
            yield lines(truths)


def finding(found: Finding) -> RenderableType:
    """A finding with its first evidence; the page has the rest and the threshold."""
    facts = (
        Fact(label="measured", value=found.measured),
        Fact(label="evidence", value="".join(found.evidence[:1])),
        Fact(label="why", value=found.why),
        Fact(label="do", value=numbered(found.remedy)),
        Fact(label="confirm", value=found.confirm),
    )
    where = f"  at {shortened(found.sites, 1)}" if found.sites else ""
    head = marked(found.severity, found.severity)
    rule = (found.rule, f"link {found.page}" if found.page else "")
    title = Text.assemble(head, "  ", rule, "  ", (found.title, "bold"), where)
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
    last = (Fact(label="change first", value=numbered(run.first_change)), Fact(label="confirm", value=run.confirm))
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


@dataclass(frozen=True)
class Norms:
    """The table of norms with its legend: every number is shown at any width, names are shortened."""

    table: Table
    formulas: tuple[Formula, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for a width: numbers in one line each if names keep enough room, else over two."""
        keys = ["path", "formula", "role", "rms", "ones", "eps", "gain"]
        if len(self.formulas) < 2:
            keys.remove("formula")
        if options.max_width < _WIDE:
            keys.remove("role")
        table = self.table.only(*keys)
        rows = table.rows if len(table.rows) <= _MOST_ROWS else table.groups or table.rows
        shown = rows[:_MOST_ROWS]
        names = [row[0].text for row in shown]
        cells = [[cell.text for cell in row[1:]] for row in shown]
        headings = [column.heading for column in table.columns[1:]]
        room = _room(options.max_width, headings, cells)
        if room < min(_NAME, max(map(len, names))):
            cells = [[_over_lines(text) for text in row] for row in cells]
            widths = [
                max(len(line) for text in column for line in text.split("\n")) for column in zip(*cells, strict=True)
            ]
            headings = [
                "\n".join(wrap(heading, max(width, 7))) for heading, width in zip(headings, widths, strict=True)
            ]
            room = max(_room(options.max_width, headings, cells), _LEAST_NAME)
        grid = _ruled()
        grid.add_column(table.columns[0].heading, overflow="fold")
        for column, heading in zip(table.columns[1:], headings, strict=True):
            grid.add_column(heading, justify="right" if column.numeric else "left", no_wrap=True)
        for name, row in zip(fitting(names, room), cells, strict=True):
            grid.add_row(Text(name), *map(Text, row))
        yield grid
        if len(rows) > len(shown):
            yield Text(f"and {len(rows) - len(shown)} rows more", "dim")
        yield Text(table.legend, "dim")
        yield from (Text(f"{formula.norms} {formula.name}: {formula.text}") for formula in self.formulas)


def _only(table: Table, site: str | None) -> Table:
    if site is None:
        return table
    return replace(table, rows=tuple(row for row in table.rows if matches(row[0].text, site)), groups=())


def _room(width: int, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """The columns that are left for names, each other column being two more than its longest line."""
    columns = zip(headings, *cells, strict=True)
    return width - sum(2 + max(len(line) for text in column for line in text.split("\n")) for column in columns)


def _over_lines(text: str) -> str:
    """A cell in two lines: a range is broken after its "to", words at the comma."""
    return text.replace(" to ", " to\n").replace("at most ", "at most\n").replace(", ", ",\n")


def _checks(outcomes: Sequence[Outcome]) -> RenderableType:
    """The rules by how they came out; those with a finding are shown above."""
    facts = []
    for outcome in outcomes:
        said = ", ".join(
            " ".join(check.rule for check in checks) + (f" ({reason})" if reason else "")
            for reason, checks in outcome.reasons
        )
        if outcome.label != "finding":
            facts.append(Fact(label=outcome.label, value=said))
    return lines(facts)
