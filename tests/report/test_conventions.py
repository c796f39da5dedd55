"""Conventions in words, and how two norms differ in one."""

from __future__ import annotations

from typing import Any

import pytest

from normkit import specs
from normkit.comparison.pairing import Change
from normkit.identification.passport import CONVENTIONS, value_of
from normkit.report.conventions import LABELS, difference, in_words, is_ordinary
from normkit.spec import NormSpec


def change(reading: str, given: dict[str, Any], expected: dict[str, Any], base: NormSpec = specs.LLAMA) -> str:
    values = [value_of(base.replace(**changes), reading) for changes in (given, expected)]
    return difference(Change(reading=reading, given=values[0], expected=values[1]))


@pytest.mark.parametrize(
    ("reading", "given", "expected", "words"),
    [
        ("eps", {"eps": 1e-6}, {"eps": 1e-5}, "eps 1e-06 instead of 1e-05, inside the root both"),
        ("eps", {"eps_placement": "outside"}, {}, "eps outside the root instead of inside the root, 1e-06 both"),
        ("eps", {"eps": 0.0}, {}, "eps none instead of 1e-06, inside the root"),
        ("eps", {"eps": None}, {}, "eps the machine epsilon instead of 1e-06, inside the root both"),
        ("divisor", {"correction": 1}, {}, "squares divided by n - 1 instead of divided by n"),
        ("divisor", {"reduction": "sum", "multiplier": "sqrt_n"}, {},
         "squares not divided (L2), the row multiplied by sqrt(n) instead of divided by n"),
        ("gain", {}, {"weight_offset": 1.0}, "gain weight instead of 1 + weight"),
        ("gain", {"has_weight": False}, {}, "gain none instead of weight"),
        ("bias", {"has_bias": True}, {}, "bias added instead of none"),
        ("casts", {"cast": "late"}, {}, "in 16 bits rounded once at the end instead of rounded before the gain"),
        ("casts", {"statistics_dtype": "input"}, {},
         "in 16 bits statistics in the input's dtype instead of statistics in float32"),
        ("rows", {"axes": (1,)}, {}, "a row is axis 1 instead of the last axis"),
        ("rows", {"groups": 8}, {}, "a row is the last axis, in 8 groups instead of the last axis"),
        ("centring", {"centre_numerator": True}, {},
         "mean subtracted, but not for the statistics instead of not subtracted"),
    ],
)  # fmt: skip
def test_a_difference_says_only_what_differs(
    reading: str, given: dict[str, Any], expected: dict[str, Any], words: str
) -> None:
    assert change(reading, given, expected) == words


@pytest.mark.parametrize("name", [name for name, value in vars(specs).items() if isinstance(value, NormSpec)])
def test_every_convention_of_every_preset_has_words(name: str) -> None:
    spec = getattr(specs, name)
    for reading in CONVENTIONS:
        words = in_words(reading, value_of(spec, reading))
        assert words
        assert not {"{", "None", "True", "False"} & set(words.split())
        assert LABELS[reading]


def test_what_is_ordinary_and_what_is_not() -> None:
    ordinary = {
        "input": "kept",
        "repeatable": True,
        "training": {"output": "as in eval", "updates": []},
        "time": [{"axis": 1, "coupling": "none"}, {"axis": 2, "coupling": "none"}],
        "degenerate rows": {"zeros": "finite", "constant": "finite"},
        "conditioning": {"mean_over_std": 1e3, "error": 1e-7, "cancels": False},
    }
    odd = {
        "input": "overwritten",
        "training": {"output": "as in eval", "updates": ["steps"]},
        "time": [{"axis": 1, "coupling": "causal"}],
        "degenerate rows": {"zeros": "NaN", "constant": "finite"},
        "conditioning": {"mean_over_std": 1e3, "error": 0.1, "cancels": True},
        "never heard of": "anything",
    }
    assert all(is_ordinary(reading, value) for reading, value in ordinary.items())
    assert not any(is_ordinary(reading, value) for reading, value in odd.items())


def test_another_reading_is_told_as_it_is() -> None:
    found = difference(Change(reading="input", given="overwritten", expected="kept"))
    assert found == "its input overwritten instead of kept"
    training = [{"output": output, "updates": []} for output in ("random", "as in eval")]
    found = difference(Change(reading="training", given=training[0], expected=training[1]))
    assert found == "in training output random instead of output as in eval"
    assert difference(Change(reading="features", given=16, expected=8)) == "features 16 instead of 8"
