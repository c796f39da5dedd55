"""What a study is and what comes of it: arms, conditions with numbers, verdicts. Nothing here computes a norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from normkit.study.chart import Chart
    from normkit.study.laboratory import Laboratory

Setting = bool | int | float | str | tuple[int, ...] | tuple[float, ...]
"""A choice that `--set` can change; its default tells its type."""

Settings = Mapping[str, Setting]


def integer(settings: Settings, name: str) -> int:
    """A setting that is a whole number."""
    value = settings[name]
    assert isinstance(value, int)
    return value


def numbers(settings: Settings, name: str) -> tuple[float, ...]:
    """A setting that is several numbers."""
    values = settings[name]
    assert isinstance(values, tuple)
    return values


Measurement = Mapping[str, Any]
"""What one arm gave with one seed: names -> numbers or lists of numbers, ready for JSON; None is no finite number."""

Paired = Mapping[str, Measurement]
"""Name of an arm -> what it gave; all of one seed, so that differences between arms are paired."""

Verdict = Literal["reproduced", "reproduced only if", "not reproduced", "undecided", "not run"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One thing that is compared with others.

    Attributes:
        name: Words, unique in the study, as in "post, no warm-up".
        choices: What `measure` needs to know, plain JSON values.
        cost: Expected share of the study's time, in any unit.
    """

    name: str
    choices: Mapping[str, Any] = field(default_factory=dict)
    cost: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A number that a claim stands or falls with: the statistic of each seed, whose interval must lie within bounds.

    Attributes:
        says: The condition in words, with its bound.
        statistic: From all arms of one seed to the number; NaN where it has none.
        low: The least value with which it holds.
        high: The greatest.
        published: What the paper reports, in words; empty where it gives no number.
        regime: The end of "reproduced only if ..."; empty for what the claim says of every case.
        judged: False for a number that is shown and decides nothing.
        source: Of the bound: theory, the paper, or why this number.
    """

    says: str
    statistic: Callable[[Paired], float]
    low: float = -math.inf
    high: float = math.inf
    published: str = ""
    regime: str = ""
    judged: bool = True
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published statement and the conditions that make it a matter of numbers.

    Attributes:
        says: The statement, in our words.
        source: Authors, year, identifier and place.
        conditions: What must hold. All hold: reproduced. Only those of some regimes: reproduced only if these.
        ledger: Rows of docs/explanation/claims.md that it decides.
    """

    says: str
    source: str
    conditions: tuple[Condition, ...]
    ledger: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A controlled experiment: what is claimed, what is compared, what is measured, what is drawn.

    Attributes:
        name: As typed after `normkit study`.
        title: A few words.
        question: One sentence that it answers.
        claims: What it decides.
        quick: Settings of the quick budget; they hold "seeds".
        full: Settings that the full budget changes.
        arms: From settings to what is compared.
        measure: One arm with one seed; called once for each.
        charts: From settings and the measurements of each seed to what is drawn.
        data: What it is trained or measured on, in words.
        needs: Packages beyond the core, as in ("sklearn",).
        regime: Where it was measured, and for what more it does not speak.
    """

    name: str
    title: str
    question: str
    claims: tuple[Claim, ...]
    quick: Settings
    full: Settings
    arms: Callable[[Settings], tuple[Arm, ...]]
    measure: Callable[[Laboratory, Arm], Measurement]
    charts: Callable[[Settings, Mapping[int, Paired]], tuple[Chart, ...]]
    data: str
    regime: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A condition with what was measured.

    Attributes:
        condition: What must hold.
        values: The statistic of each seed, in the order of the seeds.
        median: Their median.
        low: Lower end of its interval.
        high: Upper end.
        holds: Whether the whole interval lies within the bounds; None if only a part does.
    """

    condition: Condition
    values: tuple[float, ...]
    median: float
    low: float
    high: float
    holds: bool | None


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A claim with its verdict.

    Attributes:
        claim: What was claimed.
        conditions: Each with its numbers.
        verdict: In a word.
        only_if: Regimes of "reproduced only if", joined; empty otherwise.
    """

    claim: Claim
    conditions: tuple[Judged, ...]
    verdict: Verdict
    only_if: str = ""


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A study that has run.

    Attributes:
        study: What was run.
        settings: With what.
        measured: Seed -> arm -> what it gave.
        decided: Each claim with its verdict.
        seconds: Computing time of all arms together.
        where: Machine, threads, device, dtype, versions, in words.
        trouble: Arms that could not be run, each with one line why.
    """

    study: Study
    settings: Settings
    measured: Mapping[int, Paired]
    decided: tuple[Decided, ...]
    seconds: float
    where: Mapping[str, str]
    trouble: Mapping[str, str] = field(default_factory=dict)

    @property
    def charts(self) -> tuple[Chart, ...]:
        """What is to be drawn, of the seeds that are whole."""
        arms = self.study.arms(self.settings)
        whole = {seed: paired for seed, paired in self.measured.items() if len(paired) == len(arms)}
        return self.study.charts(self.settings, whole) if whole else ()
