"""What a study is: arms that are compared, and claims whose conditions are fixed before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart
from normkit.study.statistics import Measurement, Paired, Statistic


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
    judged: bool = True
    """False for a number that is shown and decides nothing."""
    source: str = ""
    """The reason for the bound: theory, the paper, or our own."""


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
    charts: Callable[[Settings, Mapping[int, Paired]], tuple[Chart, ...]]
    """The charts, from the settings and what each seed measured."""
    data: str
    """What it is trained or measured on, in words."""
    regime: str
    """The sizes at which it was measured, beyond which it says nothing."""
    needs: tuple[str, ...] = ()
    """Packages beyond the core, as in ("sklearn",)."""
