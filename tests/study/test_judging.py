import math

import pytest

from normkit.study.judging import decide, judge
from normkit.study.result import Claim, Condition


def condition(low=-math.inf, high=math.inf, arm="a", **words):
    return Condition(says="it is so", statistic=lambda paired: paired[arm]["value"], low=low, high=high, **words)


def measured(*values, arm="a"):
    return {seed: {arm: {"value": value}} for seed, value in enumerate(values)}


def verdict(conditions, seeds):
    decided = decide(Claim(says="so", source="us", conditions=tuple(conditions)), seeds)
    return decided.verdict, decided.only_if


@pytest.mark.parametrize(
    ("values", "holds"),
    [((1.0, 1.1, 1.2), True), ((0.1, 0.2, 0.3), False), ((0.5, 1.5, 1.6), None), ((1.0, math.nan, 1.0), None)],
)
def test_a_condition_holds_where_its_whole_interval_does(values, holds):
    assert judge(condition(low=1.0), measured(*values)).holds is holds


def test_a_missing_arm_leaves_a_condition_without_a_number():
    assert math.isnan(judge(condition(arm="b"), measured(1.0)).median)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([condition(low=0), condition(high=2)], ("reproduced", "")),
        ([condition(low=2)], ("not reproduced", "")),
        ([condition(low=2), condition(low=0, regime="deep")], ("reproduced only if", "deep")),
        ([condition(low=2, regime="deep"), condition(low=0)], ("not reproduced", "")),
        ([condition(low=2, regime="deep"), condition(low=0, regime="deep"), condition(high=0)], ("not reproduced", "")),
        ([condition(low=0), condition(low=2, judged=False)], ("reproduced", "")),
        ([condition(arm="b")], ("not run", "")),
    ],
)
def test_a_verdict_follows_from_its_conditions(conditions, expected):
    assert verdict(conditions, measured(1.0, 1.0, 1.0)) == expected


def test_an_interval_across_its_bound_leaves_a_claim_open():
    assert verdict([condition(low=1)], measured(0.5, 1.5, 1.6)) == ("undecided", "")
