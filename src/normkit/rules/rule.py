"""A rule, its answers, and the helpers that several rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps

from normkit.measurement.facts import RowStatistics
from normkit.measurement.training import Quantity, Training
from normkit.rules.facts import Facts, Subject
from normkit.rules.finding import Severity
from normkit.text import counted

# A reader checks a few sites; the rest are in the site table.
_MOST_LINES = 6
# The same rows, counted twice in float64.
_SAME_ROWS = 1e-9

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""

CAUSES = ("F16", "F17", "F18", "F19", "F20", "F21", "F22", "F23", "F24", "F26", "F27")
"""Rules on the data of a run and on interventions in it: later deviations of the run follow from these."""

WRONG_NORMS = ("A5", "A11", "A12", "B1", "B2", "B6", "B10", "B11", "B12", "B13", "D6", "E5")
"""Faults of single norms that change the model's output: large logits, streams and numbers follow from them."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A rule's answer when something is wrong; all sites of one cause are one hit."""

    severity: Severity
    sites: tuple[str, ...]
    """Paths it applies to, in forward order."""
    measured: str
    """The measured value, in words with its unit."""
    evidence: tuple[str, ...]
    """One line for each of the most telling sites."""
    remedy: tuple[str, ...] | None = None
    """The remedy where it is another one than the rule's."""


@dataclass(frozen=True)
class NotChecked:
    """The answer of a rule that cannot decide."""

    reason: str
    """The reason, in a few words."""
    needs_run: bool = False
    """The fault shows only in a training run or a training step."""


Outcome = Hit | NotChecked | None
"""None: checked, and clean."""

Check = Callable[[Facts], Outcome]

NO_INTENT = NotChecked("neither a config with a stock transformers class nor an intent file tells what is meant")
"""The answer of a rule that needs either."""

NO_TRAINING = NotChecked("it shows in training only: nk.watch, or normkit inspect --train-step", needs_run=True)
"""The answer of a rule that one training step can tell."""

NO_RUN = NotChecked("it takes a training run under nk.watch", needs_run=True)
"""The answer of a rule that one training step cannot tell."""

NO_OPTIMIZER = NotChecked("nothing is known of an optimizer: give it to nk.watch")
"""The answer of a rule that needs the optimizer and its groups."""

NO_TOKENS = NotChecked("it takes a batch of token ids alone, of which the model runs altered copies")
"""The answer of a rule that needs the leaks."""

NO_BASELINE = NotChecked("nothing declares what was meant: give an intent file with --intent or intent=")
"""The answer of a rule that needs a declared intent or an earlier run."""


def _missing_check(facts: Facts) -> Outcome:
    raise NotImplementedError("a rule without a check: put @Rule(...) above the function that checks the facts")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A fault of norms, and the check that finds it: `@Rule(id=..., ...)` above the function that checks the facts."""

    id: str
    """As in "A1": the letter is the group."""
    title: str
    """The fault, in one line."""
    severity: Severity
    """The worst severity that it reports."""
    threshold: str
    """The limits that the measured value is compared with."""
    source: str
    """Source of the threshold and of the fault."""
    why: str
    """Consequence of the fault."""
    remedy: tuple[str, ...]
    """Remedies, the most likely first."""
    confirm: str
    """The test that confirms the remedy."""
    follows: tuple[str, ...] = ()
    """Rules that name the cause where both find something: this one is then listed behind them, unless it is worse than
    they are."""
    looks_at: tuple[Subject, ...] = ("norms",)
    """The subjects that it judges: without any of them the rule is not applicable, and not clean."""
    is_of_text: bool = False
    """The measured value depends on the text too: with too few distinct tokens the finding is a note at most."""
    check: Check = _missing_check
    """The function below: from the facts to an outcome."""

    def __call__(self, check: Check) -> Rule:
        """This rule with its check."""
        return replace(self, check=check)

    @property
    def page(self) -> str:
        """Address of its page in the documentation."""
        return f"https://normkit.github.io/normkit/reference/rules/{self.id}.html"


def of_a_run(without: NotChecked = NO_RUN) -> Callable[[Callable[[Facts, Training], Outcome]], Check]:
    """The decorator of a check that takes the facts and the training run; without a run the answer is `without`."""

    def decorated(check: Callable[[Facts, Training], Outcome]) -> Check:
        @wraps(check)
        def checked(facts: Facts) -> Outcome:
            return without if facts.training is None else check(facts, facts.training)

        return checked

    return decorated


@dataclass(frozen=True)
class Case:
    """One place that deviates: one line of a finding."""

    path: str
    """"" for the model as a whole, which has a name then."""
    severity: Severity
    words: str
    """The deviation; the line is the name of the place, a colon and these words."""
    effect: float = 0.0
    """Size of the deviation: the lines of a finding are sorted by it, the largest first."""
    name: str = ""
    """The name of the place; "" for the path."""

    @property
    def line(self) -> str:
        """The line of the finding."""
        return f"{self.name or self.path}: {self.words}"


def hit(cases: Sequence[Case], measured: str, noun: str = "norm") -> Hit | None:
    """The cases as one hit: sites in forward order, lines by effect; None without a case."""
    if not cases:
        return None
    telling = sorted(cases, key=lambda case: -case.effect)
    return Hit(
        severity=worst([case.severity for case in cases]),
        sites=tuple(dict.fromkeys(case.path for case in cases if case.path)),
        measured=measured,
        evidence=evidence_lines([case.line for case in telling], noun),
    )


def evidence_lines(lines: Sequence[str], noun: str = "norm") -> tuple[str, ...]:
    """The first lines, and the number of the others."""
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    return (*lines[:_MOST_LINES], f"and {counted(len(lines) - _MOST_LINES, f'more {noun}')}")


def worst(severities: Sequence[Severity]) -> Severity:
    """The worst of some severities."""
    return min(severities, key=SEVERITIES.index)


def same_rows(left: RowStatistics, entering: RowStatistics) -> bool:
    """The output of one place is the input of the next."""
    numbers = [(left.rms_min, entering.rms_min), (left.rms_max, entering.rms_max), (left.absmax, entering.absmax)]
    alike = all(abs(a - b) <= _SAME_ROWS * abs(b) for a, b in numbers)
    return alike and left.rows == entering.rows and left.features == entering.features


def measured(training: Training, quantity: Quantity) -> list[tuple[int, float]]:
    """Steps and values of all series of a quantity."""
    return [pair for series in training.of(quantity) for pair in series.pairs()]


def first_values(training: Training, quantity: Quantity) -> dict[str, float]:
    """The value of each series of a quantity in step 0, by path."""
    return {series.path: series.values[0] for series in training.of(quantity) if series.steps[:1] == (0,)}
