"""From measurements to verdicts: each condition over the paired seeds, each claim from its conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from normkit.study.result import Claim, Condition, Decided, Judged, Paired, Verdict
from normkit.study.statistics import interval


def decide(claim: Claim, measured: Mapping[int, Paired]) -> Decided:
    """The verdict on a claim.

    All judged conditions hold: reproduced. Some of them fail, and those that hold name regimes: reproduced only if
    these. None holds, or none that names a regime: not reproduced. An interval that crosses a bound, or a number that
    is missing, leaves its condition open, and without a regime that holds the claim is undecided.

    Args:
        claim: What is claimed.
        measured: Seed -> arm -> what it gave.
    """
    judged = tuple(judge(condition, measured) for condition in claim.conditions)
    counted = [each for each in judged if each.condition.judged]
    verdict, only_if = _verdict(counted)
    return Decided(claim=claim, conditions=judged, verdict=verdict, only_if=only_if)


def judge(condition: Condition, measured: Mapping[int, Paired]) -> Judged:
    """The condition's statistic for each seed, its median and interval, and whether it holds."""
    values = tuple(_value(condition, paired) for _, paired in sorted(measured.items()))
    median, low, high = interval(values)
    return Judged(
        condition=condition, values=values, median=median, low=low, high=high, holds=_holds(condition, low, high)
    )


def _value(condition: Condition, paired: Paired) -> float:
    try:
        return condition.statistic(paired)
    except (KeyError, TypeError, ZeroDivisionError):
        # An arm that was not run, or a number that was not finite, leaves the statistic without a value.
        return math.nan


def _holds(condition: Condition, low: float, high: float) -> bool | None:
    if math.isnan(low):
        return None
    if condition.low <= low and high <= condition.high:
        return True
    return False if high < condition.low or low > condition.high else None


def _verdict(judged: list[Judged]) -> tuple[Verdict, str]:
    if not judged or all(math.isnan(each.median) for each in judged):
        return "not run", ""
    if all(each.holds for each in judged):
        return "reproduced", ""
    regimes = list(dict.fromkeys(each.condition.regime for each in judged if each.condition.regime))
    held = [regime for regime in regimes if all(each.holds for each in judged if each.condition.regime == regime)]
    failed = [each for each in judged if each.holds is False]
    if held and failed:
        return "reproduced only if", "; ".join(held)
    return ("not reproduced", "") if failed else ("undecided", "")
