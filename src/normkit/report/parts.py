"""The parts of a report: frozen, worded and formatted, without a trace of the medium they will stand in.

Strings are ready to print (no control characters) but not escaped for any markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from normkit.inspection.result import Check, Finding, Severity
from normkit.spec import NormSpec

Tone = Severity | Literal["good", "neutral"]

NEEDS_RUN = "need a training run"
"""The label of rules that only a training run or a training step can tell."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A line of "what: how much".

    Attributes:
        label: What.
        value: How much, in words.
    """

    label: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer, before any detail.

    Attributes:
        tone: The severity of the worst finding, "good" without one, "neutral" where there was nothing to judge.
        headline: A few words.
        detail: A sentence or two.
    """

    tone: Tone
    headline: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        key: Identifier, so that a backend can choose columns.
        heading: A word or three.
        numeric: Cells are numbers, to be aligned right and sorted by value.
        meaning: A line for the legend; may be empty.
        words: Of one or more numbers, the text of the cell that holds them; None where cells hold no numbers.
    """

    key: str
    heading: str
    numeric: bool = False
    meaning: str = ""
    words: Callable[[Sequence[float]], str] | None = None

    def cell(self, values: Sequence[float]) -> Cell:
        """A cell of this column that holds these numbers; "none" without one."""
        text = self.words(values) if self.words and values else "none"
        return Cell(text=text, value=values[0] if values else None, values=tuple(values))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of a table.

    Attributes:
        text: As it is read.
        value: What it is sorted by, where that is a number.
        values: The numbers that it says, for a row that says those of several.
    """

    text: str
    value: float | None = None
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns, with what a reader needs to read them.

    Attributes:
        title: What the rows are.
        columns: From left to right.
        rows: One tuple of cells a row, as many as there are columns; the first cell names the row.
        empty: What to say when there are no rows.
        groups: The rows again, those that say the same of several blocks as one; empty where that is none fewer.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    empty: str
    groups: tuple[tuple[Cell, ...], ...] = ()

    @property
    def legend(self) -> str:
        """What the headings mean, on one line."""
        return " ".join(f"{column.heading}: {column.meaning}." for column in self.columns if column.meaning)

    def only(self, *keys: str) -> Table:
        """The same table with some columns, in the order of `keys`."""
        places = [next(i for i, column in enumerate(self.columns) if column.key == key) for key in keys]
        return Table(
            title=self.title,
            columns=tuple(self.columns[place] for place in places),
            rows=tuple(tuple(row[place] for place in places) for row in self.rows),
            empty=self.empty,
            groups=tuple(tuple(row[place] for place in places) for row in self.groups),
        )


@dataclass(frozen=True, kw_only=True)
class Formula:
    """What some of the norms compute.

    Attributes:
        name: As it stands in the table.
        text: On one line.
        spec: The conventions themselves.
        norms: How many norms compute it, in words.
        classes: The classes of these norms, in words.
    """

    name: str
    text: str
    spec: NormSpec
    norms: str
    classes: str = ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a vector on its way through a norm.

    Attributes:
        name: "raw", "centred", "scaled" or "gain and bias".
        does: What is done, in a few words.
        facts: Mean, length and angle.
        holds: What is true from here on; may be empty.
        values: The first entries, for drawing.
        mean: Of all entries, for drawing.
        span: The smallest and the largest of the first entries, in words.
    """

    name: str
    does: str
    facts: tuple[Fact, ...]
    holds: str
    values: tuple[float, ...]
    mean: float
    span: str


@dataclass(frozen=True, kw_only=True)
class Passage:
    """One token's vector taken through one norm.

    Attributes:
        title: Which token, at which norm.
        formula: What the norm computes.
        stages: From raw to the last.
        facts: What holds at the end, each with its measured defect.
    """

    title: str
    formula: Formula
    stages: tuple[Stage, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True, kw_only=True)
class Onset:
    """Where and when a run began to fail.

    Attributes:
        what: The step, and what moved first.
        path: Where; "" where only the whole model tells.
        detail: The measured values.
    """

    what: str
    path: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One of the questions a run is asked, answered.

    Attributes:
        tone: "warning" for yes: there is something to do; "good" or "neutral" for no; "note" for unknown.
        verdict: "yes", "no" or "unknown".
        question: As it is asked.
        detail: The numbers.
        places: Paths it is about, the worst first.
    """

    tone: Tone
    verdict: str
    question: str
    detail: str
    places: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that is said about a watched training run.

    Attributes:
        verdict: What happened, and how much was seen of it.
        onset: Where and when it began, or None where nothing moved.
        replies: The questions in order, answered.
        first_change: What to change first, most likely cure first.
        confirm: How to confirm it; may be empty.
        glance: Loss, gradient norm, updates and attention in a line each.
        parameters: One row a parameter, worst first.
        worst: The first of these rows.
        facts: Optimizers, what the watch proved of itself, what it could not see.
    """

    verdict: Verdict
    onset: Onset | None
    replies: tuple[Reply, ...]
    first_change: tuple[str, ...]
    confirm: str
    glance: tuple[Fact, ...]
    parameters: Table
    worst: Table
    facts: tuple[Fact, ...]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far the weights are from a folded and a centred model.

    Attributes:
        facts: In a line each.
        norms: One row for norms that are alike; None where nothing is known.
        writers: One row for tensors that are alike and add to alike sums; None likewise.
        left: What cannot be folded or centred as it stands, and why.
        unknown: Why nothing is known; "" where it is.
    """

    facts: tuple[Fact, ...]
    norms: Table | None
    writers: Table | None
    left: tuple[Fact, ...]
    unknown: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The rules of which the same became.

    Attributes:
        label: What became of them: the checks' status, or that they need a training run.
        checks: In the rules' order.
    """

    label: str
    checks: tuple[Check, ...]

    @property
    def said(self) -> str:
        """How many there are, as in "12 checks clean"."""
        number = len(self.checks)
        one = number == 1
        match self.label:
            case "clean":
                return f"{number} check{'' if one else 's'} clean"
            case "finding":
                return f"{number} finding{'' if one else 's'}"
            case _ if self.label == NEEDS_RUN:
                return f"{number} need{'s' if one else ''} a training run"
            case _:
                return f"{number} {self.label}"

    @property
    def reasons(self) -> tuple[tuple[str, tuple[Check, ...]], ...]:
        """Each reason once, with the checks that have it."""
        texts = dict.fromkeys(check.reason for check in self.checks)
        return tuple((text, tuple(check for check in self.checks if check.reason == text)) for text in texts)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that is said about one inspection.

    Attributes:
        title: The model, as the user called it.
        subtitle: Its class and size.
        source: What was run through it.
        verdict: The answer.
        run: The training run that was watched, or None.
        glance: What to know of the model: five facts at most.
        findings: Worst first, their places grouped by block.
        passage: One token's way, or None.
        sites: One row a norm.
        formulas: Each formula once.
        geometry: One row a norm of which rows were sampled.
        selections: One row an attention call whose keys were tried.
        blocks: One row a block.
        attention: One row an attention call.
        distance: From folded and centred, or None where nobody asked.
        outcomes: The rules, by what became of them.
        outliers: Gain outliers that recur.
        shapes: What the norms do to vectors, in a line each.
        unrecognised: What behaves like a norm but could not be identified.
        method: What was measured and how, and what was not.
    """

    title: str
    subtitle: str
    source: str
    verdict: Verdict
    run: Run | None
    glance: tuple[Fact, ...]
    findings: tuple[Finding, ...]
    passage: Passage | None
    sites: Table
    formulas: tuple[Formula, ...]
    geometry: Table
    selections: Table
    blocks: Table
    attention: Table
    distance: Distance | None
    outcomes: tuple[Outcome, ...]
    outliers: tuple[Fact, ...]
    shapes: tuple[Fact, ...]
    unrecognised: tuple[Fact, ...]
    method: tuple[str, ...]

    def fact(self, label: str) -> str:
        """What a fact at a glance says; "" where it is not there."""
        return next((fact.value for fact in self.glance if fact.label == label), "")
