import json
import math

import pytest

import tiny_study
from normkit.files import json_text
from normkit.study.result import Claim, Condition, StudyResult, decide


def condition(low=-math.inf, high=math.inf, arm="a", **words):
    return Condition(says="it is so", statistic=lambda paired: paired[arm]["value"], low=low, high=high, **words)


def measured(*values, arm="a"):
    return {seed: {arm: {"value": value}} for seed, value in enumerate(values)}


def verdict(conditions, seeds, control=None):
    (decided,) = decide([Claim(says="so", source="us", conditions=tuple(conditions), control=control)], seeds)
    return decided.verdict, decided.only_if


def judge(condition, seeds):
    return decide([Claim(says="so", source="us", conditions=(condition,))], seeds)[0].conditions[0]


@pytest.mark.parametrize(
    ("values", "holds"),
    [((2.0, 2.1, 2.2), True), ((0.1, 0.2, 0.3), False), ((1.0, 1.1, 1.2), None), ((1.0, math.nan, 1.0), None)],
)
def test_a_condition_holds_where_the_seeds_decide_so(values, holds):
    assert judge(condition(low=1.0), measured(*values)).holds is holds


def test_an_interval_across_its_bound_or_a_missing_arm_decides_nothing():
    assert math.isnan(judge(condition(arm="b"), measured(1.0)).middle)
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


def test_a_claim_whose_control_does_not_show_is_not_testable():
    seeds = measured(1.0, 1.1, 1.2)
    assert verdict([condition(low=0)], seeds, control=condition(low=0.1)) == ("reproduced", "")
    assert verdict([condition(low=0)], seeds, control=condition(low=2)) == ("not testable here", "")
    assert verdict([condition(low=0)], seeds, control=condition(low=1.05)) == ("not testable here", "")


def test_the_tests_of_a_study_share_their_chance_of_an_error():
    # One test of three seeds at t = 19 has p = 0.0027 and decides; twenty together do not.
    seeds, claim = measured(1.0, 1.1, 1.2), Claim(says="so", source="us", conditions=(condition(low=0),))
    assert decide([claim], seeds)[0].conditions[0].p_value == pytest.approx(0.00274, rel=0.01)
    assert {each.verdict for each in decide([claim] * 20, seeds)} == {"undecided"}
    judged = decide([claim], seeds)[0].conditions[0]
    assert (judged.within, judged.effect_size) == (3, pytest.approx(11.0))


def result(**changes):
    measured = {
        seed: {name: {"value": float(seed + place)} for place, name in enumerate(tiny_study.NAMES)} for seed in (0, 1)
    }
    given = {
        "study": tiny_study.STUDY,
        "settings": tiny_study.STUDY.quick,
        "measured": measured,
        "decided": decide(tiny_study.STUDY.claims, measured),
        "seconds": 12.5,
        "where": {"torch": "2"},
    }
    return StudyResult(**{**given, **changes})


def test_its_json_holds_what_was_decided_and_measured_and_no_time():
    content = result(trouble={"a [seed 0]": "why"}).to_json()
    assert (content["schema_version"], content["study"], content["settings"]["widths"]) == (2, "tiny", [2, 4])
    assert (content["indicative"], content["tests"]) == ("indicative, 2 seeds", 1)
    file = json.loads(tiny_study.STUDY.conditions())
    assert (file["budgets"]["standard"]["seeds"], file["claims"][0]["conditions"][0]["bounds"]) == (2, [1.0, "inf"])
    assert content["conditions_sha256"] == tiny_study.STUDY.conditions_sha256
    assert (content["where"], content["trouble"]) == ({"torch": "2"}, {"a [seed 0]": "why"})
    assert content["measurements"]["1"]["right"] == {"value": 3.0}
    (claim,) = content["claims"]
    assert (claim["says"], claim["verdict"], claim["only_if"]) == ("the right one is more", "reproduced", "")
    judged, shown = claim["conditions"]
    assert (judged["values"], judged["mean"], judged["interval"]) == ({"0": 2.0, "1": 2.0}, 2.0, [2.0, 2.0])
    assert (judged["bounds"], judged["holds"], judged["judged"]) == ([1.0, "inf"], True, True)
    assert (shown["values"], shown["mean"], shown["holds"]) == ({"0": "nan", "1": "nan"}, "nan", None)
    text = json_text(result().to_json())
    assert json.loads(text) == result(seconds=99.0).to_json()
    assert "second" not in text
    content = result(measured={}, decided=decide(tiny_study.STUDY.claims, {})).to_json()
    assert content["claims"][0]["verdict"] == "not run"
    assert content["claims"][0]["conditions"][0]["values"] == {}
    assert math.isinf(-float(content["claims"][0]["conditions"][1]["bounds"][0]))
