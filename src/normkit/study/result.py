"""A study and its result: arms that are compared, claims with conditions fixed in advance, and their verdicts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev
from typing import Any, Literal

from normkit.files import json_text
from normkit.study.arm_context import ArmContext, Setting, Settings
from normkit.study.chart import Chart
from normkit.study.statistics import Measurement, Paired, Statistic, decision, estimate, holm
from normkit.text import counted

SCHEMA_VERSION = 2

# Fewer seeds than these are called indicative: their intervals hold only if the differences are normal.
SEEDS = 10

_LEVEL = 0.05

BOUNDS = {"ours": "our bound", "paper": "the paper's bound", "theory": "exact"}

Verdict = Literal["reproduced", "reproduced only if", "not reproduced", "undecided", "not testable here", "not run"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the variants that a study compares."""

    name: str
    """Words, unique in the study, as in "post, no warm-up"."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of `Study.measure`, plain JSON values."""
    cost: float = 1.0
    """Expected share of the study's time, in any unit."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A number that decides a claim: over the seeds, the mean of its statistic must lie within the bounds."""

    says: str
    """The condition in words, with its bound."""
    statistic: Statistic
    """NaN if there is no number."""
    low: float = -math.inf
    high: float = math.inf
    published: str = ""
    """The result that the paper reports, in words; empty if it gives no number."""
    regime: str = ""
    """The end of "reproduced only if ..."; empty if the claim is about every case."""
    source: str = ""
    """The reason for the bound."""
    bound: Literal["ours", "paper", "theory"] = "ours"
    """Whose the bound is: set by us, a number of the paper, or exact."""

    def to_json(self) -> dict[str, Any]:
        """Everything but the statistic, which `says` describes."""
        return {
            "says": self.says,
            "published": self.published,
            "source": self.source,
            "regime": self.regime,
            "judged": self.judged,
            "bound": self.bound if self.judged else "none",
            "bounds": (self.low, self.high),
        }

    @property
    def published_and_bound(self) -> str:
        """The published number, and whose the bound is, in words."""
        return f"{self.published or 'no number'}{f'; {BOUNDS[self.bound]}' if self.judged else ''}"

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
    control: Condition | None = None
    """The positive control that must hold for the claim to be testable at this size; None needs none."""

    def to_json(self) -> dict[str, Any]:
        """The conditions that were fixed before anything was run."""
        return {
            "says": self.says,
            "source": self.source,
            "ledger": self.ledger,
            "control": self.control and self.control.to_json(),
            "conditions": [condition.to_json() for condition in self.conditions],
        }


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
    standard: Settings = field(default_factory=dict)
    """Settings that the standard budget changes, beside its ten seeds."""
    arms: Callable[[Settings], tuple[Arm, ...]]
    measure: Callable[[ArmContext, Arm], Measurement]
    """Measures one arm with one seed."""
    charts: Callable[[Settings, list[Paired]], tuple[Chart, ...]]
    """The charts, from the settings and what each seed measured."""
    data: str
    """The data it is trained or measured on, in words."""
    regime: str
    """The sizes at which it was measured, beyond which it says nothing."""
    needs: tuple[str, ...] = ()
    """Packages beyond the core, as in ("sklearn",)."""

    def conditions(self) -> str:
        """The file of conditions, as JSON: claims, controls, bounds and settings, all that is fixed before a run."""
        budgets = {"quick": self.quick, "standard": {"seeds": SEEDS, **self.standard}, "full": self.full}
        content = {
            "study": self.name,
            "question": self.question,
            "budgets": budgets,
            "level": _LEVEL,
            "claims": [claim.to_json() for claim in self.claims],
        }
        return json_text(plain(content))

    @property
    def conditions_sha256(self) -> str:
        """SHA-256 of the file of conditions: equal exactly if nothing that was fixed has changed since."""
        return hashlib.sha256(self.conditions().encode()).hexdigest()


def budget(**settings: Setting) -> Settings:
    """The settings of a budget, by name."""
    return settings


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A condition with its numbers."""

    condition: Condition
    values: tuple[float, ...]
    """The statistic of each seed, in the order of the seeds."""
    middle: float
    """Mean over the seeds; the median if a value is infinite."""
    low: float
    """Lower end of the 95 % interval."""
    high: float
    """Upper end."""
    p_value: float
    """The p-value of the decision, corrected for all tests of the study (Holm)."""
    holds: bool | None
    """Whether the mean lies within the bounds; None if the corrected p-value is above 0.05."""

    @property
    def within(self) -> int:
        """How many seeds lie within the bounds."""
        return sum(self.condition.low <= value <= self.condition.high for value in self.values)

    @property
    def effect_size(self) -> float:
        """Distance of the mean from the nearest bound, over the standard deviation of the seeds."""
        bounds = [bound for bound in (self.condition.low, self.condition.high) if math.isfinite(bound)]
        if len(self.values) < 2 or not bounds or not all(map(math.isfinite, self.values)):
            return math.nan
        distance, spread = min(abs(self.middle - bound) for bound in bounds), stdev(self.values)
        return distance / spread if spread else math.inf

    def to_json(self, seeds: Sequence[int]) -> dict[str, Any]:
        """The condition with its numbers."""
        return {
            **self.condition.to_json(),
            "values": dict(zip(map(str, seeds), self.values, strict=True)),
            "mean": self.middle,
            "interval": (self.low, self.high),
            "within": self.within,
            "effect_size": self.effect_size,
            "p_value": self.p_value,
            "holds": self.holds,
        }


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A claim with its verdict."""

    claim: Claim
    control: Judged | None
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
    def indicative(self) -> str:
        """A warning in words if there are fewer than ten seeds; empty otherwise."""
        count = len(self.measured)
        return f"indicative, {counted(count, 'seed')}" if 0 < count < SEEDS else ""

    @property
    def tests(self) -> int:
        """How many conditions, controls among them, share the chance of 5 % of a wrong decision."""
        judged = [each for decided in self.decided for each in (decided.control, *decided.conditions)]
        return sum(each is not None and each.condition.judged for each in judged)

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
            "conditions_sha256": study.conditions_sha256,
            "indicative": self.indicative,
            "tests": self.tests,
            "claims": [
                {
                    **decided.claim.to_json(),
                    "verdict": decided.verdict,
                    "only_if": decided.only_if,
                    "control": decided.control and decided.control.to_json(seeds),
                    "conditions": [judged.to_json(seeds) for judged in decided.conditions],
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


def decide(claims: Sequence[Claim], measured: Mapping[int, Paired]) -> tuple[Decided, ...]:
    """The verdicts on the claims of a study.

    Each condition is tested, and the p-values of all tests are corrected together (Holm), so that the chance of one
    wrong decision is at most 5 %. If all judged conditions of a claim hold, it is reproduced. If some fail, and all
    conditions of a regime hold, it is reproduced only in that regime. If none of these, it is not reproduced. A
    condition that is not decided is open; if no condition fails, an open one leaves the claim undecided. A claim whose
    control does not hold is not testable here, whatever its conditions.
    """
    asked = [condition for claim in claims for condition in (claim.control, *claim.conditions) if condition is not None]
    values = [_values(condition, measured) for condition in asked]
    results = [
        decision(each, condition.low, condition.high) if condition.judged else (False, math.nan)
        for condition, each in zip(asked, values, strict=True)
    ]
    places = [place for place, condition in enumerate(asked) if condition.judged]
    corrected = dict(zip(places, holm([results[place][1] for place in places]), strict=True))
    judged = []
    for place, (condition, each, (is_within, _)) in enumerate(zip(asked, values, results, strict=True)):
        p_value = corrected.get(place, math.nan)
        numbers = dict(zip(("middle", "low", "high"), estimate(each), strict=True))
        holds = is_within if p_value <= _LEVEL else None
        judged.append(Judged(condition=condition, values=each, p_value=p_value, holds=holds, **numbers))
    left = iter(judged)
    return tuple(
        _decided(claim, next(left) if claim.control else None, tuple(next(left) for _ in claim.conditions))
        for claim in claims
    )


def _values(condition: Condition, measured: Mapping[int, Paired]) -> tuple[float, ...]:
    """The condition's statistic for each seed; NaN where an arm was not run, or a number was not finite."""
    values = []
    for _, paired in sorted(measured.items()):
        try:
            values.append(condition.statistic(paired))
        except (KeyError, TypeError, ZeroDivisionError):
            values.append(math.nan)
    return tuple(values)


def _decided(claim: Claim, control: Judged | None, conditions: tuple[Judged, ...]) -> Decided:
    judged = [each for each in conditions if each.condition.judged]
    regimes = list(dict.fromkeys(each.condition.regime for each in judged if each.condition.regime))
    held = [regime for regime in regimes if all(each.holds for each in judged if each.condition.regime == regime)]
    verdict: Verdict = "undecided"
    if all(math.isnan(each.middle) for each in judged):
        verdict = "not run"
    elif control is not None and not control.holds:
        verdict = "not testable here"
    elif all(each.holds for each in judged):
        verdict = "reproduced"
    elif any(each.holds is False for each in judged):
        verdict = "reproduced only if" if held else "not reproduced"
    only_if = "; ".join(held) if verdict == "reproduced only if" else ""
    return Decided(claim=claim, control=control, conditions=conditions, verdict=verdict, only_if=only_if)
