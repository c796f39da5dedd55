import json
import math

import tiny_study
from normkit.files import json_text
from normkit.study.document import document
from normkit.study.judging import decide
from normkit.study.result import StudyResult


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


def test_it_holds_what_was_decided_and_measured():
    content = document(result(trouble={"a [seed 0]": "why"}))
    assert (content["schema_version"], content["study"], content["settings"]["widths"]) == (1, "tiny", [2, 4])
    assert (content["where"], content["trouble"]) == ({"torch": "2"}, {"a [seed 0]": "why"})
    assert content["measurements"]["1"]["right"] == {"value": 3.0}
    (claim,) = content["claims"]
    assert (claim["says"], claim["verdict"], claim["only_if"]) == ("the right one is more", "reproduced", "")
    judged, shown = claim["conditions"]
    assert (judged["values"], judged["median"], judged["interval"]) == ({"0": 2.0, "1": 2.0}, 2.0, [2.0, 2.0])
    assert (judged["bounds"], judged["holds"], judged["judged"]) == ([1.0, "inf"], True, True)
    assert (shown["values"], shown["median"], shown["holds"]) == ({"0": "nan", "1": "nan"}, "nan", None)


def test_it_is_json_and_holds_no_time():
    text = json_text(document(result()))
    assert json.loads(text) == document(result(seconds=99.0))
    assert "second" not in text


def test_what_was_not_run_is_said():
    content = document(result(measured={}, decided=tuple(decide(claim, {}) for claim in tiny_study.STUDY.claims)))
    assert content["claims"][0]["verdict"] == "not run"
    assert content["claims"][0]["conditions"][0]["values"] == {}
    assert math.isinf(-float(content["claims"][0]["conditions"][1]["bounds"][0]))
