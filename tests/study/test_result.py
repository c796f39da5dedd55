import json
import math

import pytest

import tiny_study
from normkit.files import json_text
from normkit.study.result import Claim, Condition, StudyResult, decide, judge


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


def test_an_interval_across_its_bound_or_a_missing_arm_decides_nothing():
    assert math.isnan(judge(condition(arm="b"), measured(1.0)).median)
    assert verdict([condition(low=1)], measured(0.5, 1.5, 1.6)) == ("undecided", "")


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([condition(low=0), condition(high=2)], ("reproduced", "")),
        ([condition(low=2)], ("not reproduced", "")),
        ([condition(low=2), condition(low=0, regime="deep")], ("reproduced only if", "deep")),
        ([condition(low=2, regime="deep"), condition(low=0)], ("not reproduced", "")),
        ([condition(low=2, regime="deep"), condition(low=0, regime="deep"), condition(high=0)], ("not reproduced", "")),
        ([condition(low=0), condition()], ("reproduced", "")),
        ([condition(arm="b")], ("not run", "")),
    ],
)
def test_a_verdict_follows_from_its_conditions(conditions, expected):
    assert verdict(conditions, measured(1.0, 1.0, 1.0)) == expected


def result(**changes):
    measured = {
        seed: {name: {"value": float(seed + place)} for place, name in enumerate(tiny_study.NAMES)} for seed in (0, 1)
    }
    given = {
        "study": tiny_study.STUDY,
        "settings": tiny_study.STUDY.quick,
        "measured": measured,
        "decided": tuple(decide(claim, measured) for claim in tiny_study.STUDY.claims),
        "seconds": 12.5,
        "where": {"torch": "2"},
    }
    return StudyResult(**{**given, **changes})


def test_its_json_holds_what_was_decided_and_measured_and_no_time():
    content = result(trouble={"a [seed 0]": "why"}).to_json()
    assert (content["schema_version"], content["study"], content["settings"]["widths"]) == (1, "tiny", [2, 4])
    assert (content["where"], content["trouble"]) == ({"torch": "2"}, {"a [seed 0]": "why"})
    assert content["measurements"]["1"]["right"] == {"value": 3.0}
    (claim,) = content["claims"]
    assert (claim["says"], claim["verdict"], claim["only_if"]) == ("the right one is more", "reproduced", "")
    judged, shown = claim["conditions"]
    assert (judged["values"], judged["median"], judged["interval"]) == ({"0": 2.0, "1": 2.0}, 2.0, [2.0, 2.0])
    assert (judged["bounds"], judged["holds"], judged["judged"]) == ([1.0, "inf"], True, True)
    assert (shown["values"], shown["median"], shown["holds"]) == ({"0": "nan", "1": "nan"}, "nan", None)
    text = json_text(result().to_json())
    assert json.loads(text) == result(seconds=99.0).to_json()
    assert "second" not in text
    content = result(measured={}, decided=tuple(decide(claim, {}) for claim in tiny_study.STUDY.claims)).to_json()
    assert content["claims"][0]["verdict"] == "not run"
    assert content["claims"][0]["conditions"][0]["values"] == {}
    assert math.isinf(-float(content["claims"][0]["conditions"][1]["bounds"][0]))
