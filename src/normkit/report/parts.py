"""The parts of an inspection's report: frozen, worded and formatted, independent of the output medium."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.rules.finding import Check, Finding
from normkit.show.parts import Fact, Table, Tone, Verdict
from normkit.spec import NormSpec

NEEDS_RUN = "need a training run"
"""The label of rules that only a training run or a training step can tell."""


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A formula, and the norms that compute it."""

    name: str
    """Its name in the table of norms."""
    text: str
    """The formula on one line."""
    spec: NormSpec
    norms: str
    """How many norms compute it, in words."""
    classes: str = ""
    """The classes of these norms, in words."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a vector on its way through a norm."""

    name: str
    """"raw", "centred", "scaled" or "gain and bias"."""
    does: str
    """What is done, in a few words."""
    facts: tuple[Fact, ...]
    """Mean, length and angle."""
    holds: str
    """What is true from here on, or ""."""
    values: tuple[float, ...]
    """The first entries, for drawing."""
    mean: float
    """Mean of all entries, for drawing."""
    span: str
    """The smallest and the largest of the first entries, in words."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """One token's vector taken through one norm."""

    title: str
    """Which token, at which norm."""
    formula: Formula
    stages: tuple[Stage, ...]
    """From raw to the last."""
    facts: tuple[Fact, ...]
    """What holds at the end, each with its measured defect."""


@dataclass(frozen=True, kw_only=True)
class Onset:
    """Where and when a run began to fail."""

    what: str
    """The step, and what moved first."""
    path: str
    """Where; "" if only the whole model tells."""
    detail: str
    """The measured values."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One question about a run, with its answer."""

    tone: Tone
    """"warning" for yes: there is something to do; "good" or "neutral" for no; "note" for unknown."""
    verdict: str
    """"yes", "no" or "unknown"."""
    question: str
    detail: str
    """The numbers."""
    places: tuple[str, ...]
    """Paths that the answer is about, the worst first."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that is said about a watched training run."""

    verdict: Verdict
    """What happened, and how much of it was seen."""
    onset: Onset | None
    """Where and when it began; None if nothing moved."""
    replies: tuple[Reply, ...]
    first_change: tuple[str, ...]
    """What to change first, most likely cure first."""
    confirm: str
    """How to confirm the cure, or ""."""
    glance: tuple[Fact, ...]
    """Loss, gradient norm, updates and attention, one line each."""
    parameters: Table
    """One row per parameter, worst first."""
    worst: Table
    """The first of these rows."""
    facts: tuple[Fact, ...]
    """Optimizers, what the watch proved of itself, what it could not see."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far the weights are from a folded and a centred model."""

    facts: tuple[Fact, ...]
    """One line each."""
    norms: Table | None
    """One row for norms that are alike; None if nothing is known."""
    writers: Table | None
    """One row for tensors that are alike and add to alike sums; None if nothing is known."""
    left: tuple[Fact, ...]
    """What cannot be folded or centred as it is, and why."""
    unknown: str
    """Why nothing is known, or ""."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The rules that came out the same."""

    label: str
    """How they came out: the status of the checks, or that they need a training run."""
    checks: tuple[Check, ...]
    """In the rules' order."""

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
    """Everything that is said about one inspection."""

    title: str
    """The model, as the user called it."""
    subtitle: str
    """Class and size of the model."""
    source: str
    """What was run through the model."""
    verdict: Verdict
    run: Run | None
    """The training run that was watched, or None."""
    glance: tuple[Fact, ...]
    """At most five facts about the model."""
    findings: tuple[Finding, ...]
    """Worst first, with places grouped by block."""
    passage: Passage | None
    """One token at one norm, or None."""
    sites: Table
    """One row per norm."""
    formulas: tuple[Formula, ...]
    """Each formula once."""
    geometry: Table
    """One row per norm of which rows were sampled."""
    selections: Table
    """One row per attention call whose keys were tried."""
    blocks: Table
    """One row per block."""
    attention: Table
    """One row per attention call."""
    distance: Distance | None
    """Distance from a folded and centred model; None if nobody asked."""
    outcomes: tuple[Outcome, ...]
    """The rules, grouped by how they came out."""
    outliers: tuple[Fact, ...]
    """Gain outliers that recur."""
    shapes: tuple[Fact, ...]
    """What the norms do to vectors, one line each."""
    unrecognised: tuple[Fact, ...]
    """What behaves like a norm but could not be identified."""
    method: tuple[str, ...]
    """What was measured and how, and what was not."""

    def fact(self, label: str) -> str:
        """The value of a fact in `glance`; "" if there is none of that label."""
        return next((fact.value for fact in self.glance if fact.label == label), "")
