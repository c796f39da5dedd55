"""An inspection for a terminal and as Markdown: every number is shown at any width, and nothing by colour alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding

from normkit.identification.sites import matches
from normkit.inspection.first_text import Walk
from normkit.inspection.report.batch_norms import TERMINAL
from normkit.inspection.report.description import Report, describe, describe_walk
from normkit.rules.finding import Finding
from normkit.show.parts import Fact, Section, Table
from normkit.show.terminal import Words, answer, headed, least_width, lines, marked, pairs, records, widths_of
from normkit.text import numbered, shortened

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection

# Above this number of norms the summary groups similar neighbours; after this number of rows it stops.
_MOST_ROWS = 16
_MOST_FINDINGS = 8
# Columns of Markdown, and those from which on a terminal has room for words beside numbers.
_WIDTH, _WIDE = 100, 76
# Columns that names of norms should have before ranges of numbers are broken into two lines.
_NAME = 20
_IN_TABLE = {"norms", "input rows"}
_COLUMNS = ("path", "formula", "role", "rms", "ones", "eps", "gain")
# Characters that Markdown or GitHub would read as markup, a mention or a link.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~@&!])")


def summary(inspection: Inspection, site: str | None = None) -> RenderableType:
    """The verdict, what to know, the findings, the norms and the checks, on one screen for a small model.

    With `site` only norms whose path this is or matches are listed; findings are those of all norms.
    """
    report = describe(inspection)
    run, steps, norms = report.part("run"), report.part("steps"), report.part("norms")
    head = Words.assemble((report.title, "bold"), "  ", report.gist, "\n", (report.source, "dim"))
    parts: list[RenderableType] = [head, "", answer(report.verdict)]
    why = "why, and " if report.findings and report.findings[0].severity == "note" else ""
    hint = (f"normkit rule {found.rule} says {why}where the limit comes from" for found in report.findings[:1])
    findings = [*map(_finding, report.findings), *hint]
    if run and steps:
        parts += [_run(report, run, steps), ""] if findings else [_run(report, run, steps)]
        watched = [fact for part in steps.sections for fact in part.facts if fact.label != "optimizer"]
        parts += [*findings, "", lines([*report.facts, *watched])]
    else:
        # The table contains the other facts.
        parts.append(lines(fact for fact in report.facts if fact.label not in _IN_TABLE))
        parts += ["", *findings] if findings else []
    for part, keys in ((norms, _COLUMNS), (report.part("batch-norms"), TERMINAL)):
        table = part.tables[0] if part else None
        if part and table and table.rows and not run:
            if site is not None:
                table = replace(table, rows=tuple(row for row in table.rows if matches(row[0].text, site)), groups=())
            parts += ["", Norms(table, part.sections, keys)]
    if norms and norms.facts:
        parts += ["", Words("other norms", "bold"), lines(norms.facts)]
    checks = report.part("checks")
    outcomes = [outcome for outcome in checks.sections if outcome.gist != "finding"] if checks else []
    return Group(*parts, "", lines(Fact(outcome.gist, _rules(outcome)) for outcome in outcomes))


def walk_table(walk: Walk) -> RenderableType:
    """One token's vector, stage by stage: its mean, length and angle, and what is true from there on."""
    passage = describe_walk(walk)
    return Group(
        Words(passage.gist, "bold"), Words(str(passage.formula)), "", _Stages(passage.sections), lines(passage.facts)
    )


def markdown(inspection: Inspection, origin: str) -> str:
    """The verdict, the main facts, the findings in one line each, and the table of norms in a code fence.

    It is short, without colours, with all names escaped: to be pasted into an issue. `origin` is the command and the
    versions that it came from, in a line.

    Returns:
        The text, ending with a line break.
    """
    report = describe(inspection)
    parts = [f"### {_plain(report.verdict.headline)}", f"{_plain(report.title)}: {_plain(report.gist)}"]
    parts.append("\n".join(f"- {fact.label}: {_plain(fact.value)}" for fact in report.facts) or _plain(report.source))
    findings = [
        f"- {found.severity} **{f'[{found.rule}]({found.page})' if found.page else found.rule}** "
        f"{_plain(found.title)}: {_plain(found.measured)}"
        + (f" (at {_plain(shortened(found.sites, 2))})" if found.sites else "")
        for found in report.findings[:_MOST_FINDINGS]
    ]
    if (more := len(report.findings) - _MOST_FINDINGS) > 0:
        findings.append(f"- and {more} more")
    if findings:
        parts.append("\n".join(findings))
    checks = report.part("checks")
    for part, keys in ((report.part("norms"), _COLUMNS), (report.part("batch-norms"), TERMINAL)):
        if not part or not part.tables[0].rows:
            continue
        console = Console(width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
        with console.capture() as capture:
            console.print(Norms(part.tables[0], part.sections, keys))
        text = "\n".join(line.rstrip() for line in capture.get().splitlines())
        # The fence has more backticks than the table contains.
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
        parts.append(f"{fence}text\n{text}\n{fence}")
    said = ", ".join(outcome.title for outcome in (checks.sections if checks else ()) if outcome.gist != "finding")
    parts += [f"{said}; {_plain(report.source)}", _plain(origin)]
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class Norms:
    """The table of norms with its legend: every number is shown at any width, names are shortened."""

    table: Table
    formulas: tuple[Section, ...]
    keys: tuple[str, ...] = _COLUMNS
    """The columns to show."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for a width: numbers in one line each if names keep enough room, else over two."""
        hidden = {"formula"} if len(self.formulas) < 2 else set()
        hidden |= {"role"} if options.max_width < _WIDE else set()
        table = self.table.only(*(key for key in self.keys if key not in hidden))
        rows = table.rows if len(table.rows) <= _MOST_ROWS else table.groups or table.rows
        shown = rows[:_MOST_ROWS]
        names = [row[0].text for row in shown]
        cells = [[cell.text for cell in row[1:]] for row in shown]
        headings = [column.heading for column in table.columns[1:]]
        least = max(map(least_width, names))
        room = options.max_width - sum(2 + width for width in widths_of(headings, *cells))
        if room < max(least, min(_NAME, max(map(len, names)))):
            # A range is broken after its "to", words at the comma.
            breaks = {" to ": " to\n", "at most ": "at most\n", ", ": ",\n"}
            cells = [[_replaced(text, breaks) for text in row] for row in cells]
            headings = [
                "\n".join(wrap(heading, max(width, 7, *map(len, heading.split()))))
                for heading, width in zip(headings, widths_of(*cells), strict=True)
            ]
            room = options.max_width - sum(2 + width for width in widths_of(headings, *cells))
        if room < least and any(column.key == "role" for column in table.columns):
            # The page has the roles; here names are told apart.
            yield from replace(self, keys=tuple(key for key in self.keys if key != "role")).__rich_console__(
                console, options
            )
            return
        if room < least:
            grid = records(
                [column.heading for column in table.columns[1:]], [[cell.text for cell in row] for row in shown]
            )
        else:
            grid = headed(1)
            grid.add_column(
                table.columns[0].heading, width=min(room, max(map(len, [table.columns[0].heading, *names])))
            )
            for column, heading in zip(table.columns[1:], headings, strict=True):
                grid.add_column(heading, justify="right" if column.numeric else "left", no_wrap=True)
            for name, row in zip(names, cells, strict=True):
                grid.add_row(Words(name), *map(Words, row))
        yield grid
        if len(rows) > len(shown):
            yield Words(f"and {len(rows) - len(shown)} rows more", "dim")
        yield Words(table.legend, "dim")
        yield from (Words(f"{each.gist} {each.title}: {each.formula}") for each in self.formulas)


@dataclass(frozen=True)
class _Stages:
    """The stages of a token as a table; in a narrow terminal, what each stage makes true is below the table."""

    stages: tuple[Section, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for a width."""
        beside = options.max_width >= _WIDE
        grid = headed(1)
        grid.add_column("stage", no_wrap=True)
        for fact in self.stages[0].facts:
            heading = fact.label if beside else fact.label.replace(" ", "\n", 1)
            grid.add_column(heading, justify="right", no_wrap=True)
        if beside:
            grid.add_column("what is true now")
        for stage in self.stages:
            numbers = [Words(fact.value) for fact in stage.facts]
            grid.add_row(Words(stage.title), *numbers, *([Words(stage.notes[-1])] if beside else []))
        yield grid
        if not beside:
            yield lines(Fact(stage.title, stage.notes[-1]) for stage in self.stages)


def _replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def _finding(found: Finding) -> RenderableType:
    """A finding with its first evidence, a note without its reason; the page has the rest and the threshold."""
    is_note = found.severity == "note"
    facts = (
        Fact("measured", found.measured),
        Fact("evidence", "".join(found.evidence[:1])),
        Fact("why", "" if is_note else found.why),
        Fact("do", found.remedy[0] if is_note and found.remedy else numbered(found.remedy)),
        Fact("confirm", "" if is_note else found.confirm),
    )
    where = f"  at {shortened(found.sites, 1)}" if found.sites else ""
    rule = (found.rule, f"link {found.page}" if found.page else "")
    title = Words.assemble(marked(found.severity, found.severity), "  ", rule, "  ", (found.title, "bold"), where)
    return Group(title, Padding(lines(fact for fact in facts if fact.value), (0, 0, 0, 2)))


def _run(report: Report, run: Section, steps: Section) -> RenderableType:
    """The lines on the run: the event, its beginning, the questions answered, the first thing to change."""
    parts: list[RenderableType] = []
    if run.verdict and run.verdict.headline != report.verdict.headline:
        parts.append(answer(run.verdict))
    began = {fact.label: fact.value for fact in run.facts}
    if began:
        where = f" at {began['where']}" if "where" in began else ""
        facts = [Fact("began", f"{began['began at']}{where}: {began['measured']}"), *steps.facts]
    else:
        facts = [*steps.facts]
    parts.append(Padding(lines(facts), (0, 0, 0, 2)))
    if answers := run.part("answers"):
        parts += ["", _answers(answers.sections)]
    labels = {"changes": "change first", "confirm": "confirm"}
    last = [Fact(label, numbered(part.notes)) for id, label in labels.items() if (part := run.part(id)) is not None]
    return Group(*parts, *(["", lines(last)] if last else []))


def _answers(answers: Iterable[Section]) -> RenderableType:
    rows = []
    for number, each in enumerate(answers, 1):
        if each.verdict:
            detail = each.verdict.detail
            at = f" At {shortened(each.notes, 2)}." if each.notes and each.notes[0] not in detail else ""
            said = Words.assemble((f"{number}. {each.title}", "bold"), f"  {detail}{at}")
            rows.append((marked(each.verdict.tone, each.verdict.headline), said))
    return pairs(rows)


def _rules(outcome: Section) -> str:
    """The rules that came out so, each reason once."""
    return ", ".join(
        " ".join(fact.label for fact in part.facts) + (f" ({part.gist})" if part.gist else "")
        for part in outcome.sections
    )


def _plain(text: str) -> str:
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
