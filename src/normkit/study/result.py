"""A study and its result: arms that are compared, claims with conditions fixed in advance, and their verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from normkit.study.arm_context import ArmContext, Setting, Settings
from normkit.study.chart import Chart
from normkit.study.statistics import Measurement, Paired, Statistic, interval

SCHEMA_VERSION = 1

Verdict = Literal["reproduced", "reproduced only if", "not reproduced", "undecided", "not run"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the variants that a study compares."""

    name: str
    """Words, unique in the study, as in "post, no warm-up"."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """What `Study.measure` needs to know, plain JSON values."""
    cost: float = 1.0
    """Expected share of the study's time, in any unit."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A number that decides a claim: the interval of its statistic over the seeds must lie within the bounds."""

    says: str
    """The condition in words, with its bound."""
    statistic: Statistic
    """NaN if there is no number."""
    low: float = -math.inf
    high: float = math.inf
    published: str = ""
    """What the paper reports, in words; empty if it gives no number."""
    regime: str = ""
    """The end of "reproduced only if ..."; empty if the claim is about every case."""
    source: str = ""
    """The reason for the bound: theory, the paper, or our own."""

    @property
    def judged(self) -> bool:
        """Whether it has a bound; a number without one is shown and decides nothing."""
        return math.isfinite(self.low) or math.isfinite(self.high)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published statement, and the conditions that let numbers decide it."""

    says: str
    """The statement, in our words."""
    source: str
    """Authors, year, identifier and place."""
    conditions: tuple[Condition, ...]
    """If all hold, the claim is reproduced; if only those of some regimes hold, it is reproduced only in these."""
    ledger: tuple[str, ...] = ()
    """Rows of docs/explanation/claims.md that it decides."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A controlled experiment."""

    name: str
    """As typed after `normkit study`."""
    title: str
    question: str
    """One sentence."""
    claims: tuple[Claim, ...]
    quick: Settings
    """Settings of the quick budget, "seeds" among them."""
    full: Settings
    """Settings that the full budget changes."""
    arms: Callable[[Settings], tuple[Arm, ...]]
    measure: Callable[[ArmContext, Arm], Measurement]
    """Measures one arm with one seed."""
    charts: Callable[[Settings, list[Paired]], tuple[Chart, ...]]
    """The charts, from the settings and what each seed measured."""
    data: str
    """What it is trained or measured on, in words."""
    regime: str
    """The sizes at which it was measured, beyond which it says nothing."""
    needs: tuple[str, ...] = ()
    """Packages beyond the core, as in ("sklearn",)."""


def budget(**settings: Setting) -> Settings:
    """The settings of a budget, by name."""
    return settings


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A condition with its numbers."""

    condition: Condition
    values: tuple[float, ...]
    """The statistic of each seed, in the order of the seeds."""
    median: float
    low: float
    """Lower end of the interval of the median."""
    high: float
    """Upper end."""
    holds: bool | None
    """Whether the whole interval lies within the bounds; None if only a part does."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A claim with its verdict."""

    claim: Claim
    conditions: tuple[Judged, ...]
    verdict: Verdict
    only_if: str = ""
    """Regimes of "reproduced only if", joined; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A study that has run."""

    study: Study
    settings: Settings
    measured: Mapping[int, Paired]
    """Seed -> arm -> measurement."""
    decided: tuple[Decided, ...]
    seconds: float
    """Computing time of all arms together."""
    where: Mapping[str, str]
    """Machine, threads, device, dtype, versions, in words."""
    trouble: Mapping[str, str] = field(default_factory=dict)
    """Arms that could not be run, with the reason in one line."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        """The charts, from the seeds with which all arms were measured."""
        arms = self.study.arms(self.settings)
        whole = [paired for paired in self.measured.values() if len(paired) == len(arms)]
        return self.study.charts(self.settings, whole) if whole else ()

    def to_json(self) -> dict[str, Any]:
        """All measurements and verdicts, ready for JSON, without times: the same numbers are the same bytes.

        NaN and infinities are strings.
        """
        study, seeds = self.study, list(self.measured)
        content = {
            "schema_version": SCHEMA_VERSION,
            "study": study.name,
            "title": study.title,
            "question": study.question,
            "data": study.data,
            "regime": study.regime,
            "settings": dict(self.settings),
            "where": dict(self.where),
            "claims": [
                {
                    "says": decided.claim.says,
                    "source": decided.claim.source,
                    "ledger": decided.claim.ledger,
                    "verdict": decided.verdict,
                    "only_if": decided.only_if,
                    "conditions": [
                        {
                            "says": judged.condition.says,
                            "published": judged.condition.published,
                            "source": judged.condition.source,
                            "regime": judged.condition.regime,
                            "judged": judged.condition.judged,
                            "bounds": (judged.condition.low, judged.condition.high),
                            "values": dict(zip(map(str, seeds), judged.values, strict=True)),
                            "median": judged.median,
                            "interval": (judged.low, judged.high),
                            "holds": judged.holds,
                        }
                        for judged in decided.conditions
                    ],
                }
                for decided in self.decided
            ],
            "trouble": dict(self.trouble),
            "measurements": {str(seed): dict(paired) for seed, paired in self.measured.items()},
        }
        document: dict[str, Any] = plain(content)
        return document


def plain(value: Any, of_not_finite: Callable[[float], Any] = str) -> Any:
    """A value as JSON has it: mappings with text as names, lists, and a replacement for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): plain(member, of_not_finite) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member, of_not_finite) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return of_not_finite(value)
    return value


def decide(claim: Claim, measured: Mapping[int, Paired]) -> Decided:
    """The verdict on a claim.

    If all judged conditions hold, it is reproduced. If some fail, and all conditions of a regime hold, it is reproduced
    only in that regime. If none of these, it is not reproduced. A condition whose interval crosses a bound, or that
    lacks a number, is open; if no condition fails, an open one leaves the claim undecided.
    """
    conditions = tuple(judge(condition, measured) for condition in claim.conditions)
    judged = [each for each in conditions if each.condition.judged]
    regimes = list(dict.fromkeys(each.condition.regime for each in judged if each.condition.regime))
    held = [regime for regime in regimes if all(each.holds for each in judged if each.condition.regime == regime)]
    has_failed = any(each.holds is False for each in judged)
    verdict: Verdict
    if all(math.isnan(each.median) for each in judged):
        verdict = "not run"
    elif all(each.holds for each in judged):
        verdict = "reproduced"
    elif has_failed:
        verdict = "reproduced only if" if held else "not reproduced"
    else:
        verdict = "undecided"
    only_if = "; ".join(held) if verdict == "reproduced only if" else ""
    return Decided(claim=claim, conditions=conditions, verdict=verdict, only_if=only_if)


def judge(condition: Condition, measured: Mapping[int, Paired]) -> Judged:
    """The condition's statistic for each seed, its median and interval, and whether it holds."""
    values = []
    for _, paired in sorted(measured.items()):
        try:
            values.append(condition.statistic(paired))
        except (KeyError, TypeError, ZeroDivisionError):
            # An arm was not run, or a number was not finite.
            values.append(math.nan)
    median, low, high = interval(values)
    holds: bool | None = None
    if condition.low <= low and high <= condition.high:
        holds = True
    elif high < condition.low or low > condition.high:
        holds = False
    return Judged(condition=condition, values=tuple(values), median=median, low=low, high=high, holds=holds)
