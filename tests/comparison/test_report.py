"""A comparison on a screen: what comes first, how it is said, what is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import screens
from normkit import specs
from normkit.comparison.differences import Comparison, Conventions, Pair, ParameterChange, Unmatched
from normkit.comparison.effects import Effect, Observed
from normkit.comparison.pairing import Change, changes
from normkit.comparison.report import describe_comparison, difference
from normkit.comparison.rows import Birth, Rows, Step
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of
from normkit.identification.book import Entry
from normkit.identification.passport import Passport, Reading
from normkit.identification.spec_readings import value_of
from normkit.show.terminal import section
from normkit.spec import NormSpec
from planted_gains import gains

PORT = specs.LLAMA.replace(eps=1e-5)


def entry(path: str, spec: NormSpec = specs.LLAMA) -> Entry:
    passport = Passport(verdict="norm", spec=spec, readings={"kind": Reading(value="norm")}, shape=(2, 8))
    return Entry(path=path, class_name="N", features=8, passport=passport)


def pair(path: str, spec: NormSpec = specs.LLAMA, worst: float | None = None, **more: Any) -> Pair:
    observed = None
    dtypes = more.pop("dtypes", ("float32",))
    if worst is not None:
        effects = tuple(Effect(dtype=dtype, median=worst / 2, worst=worst) for dtype in dtypes)
        observed = Observed(rows=64, rms=(0.5, 1.0, 2.0), effects=effects)
    here, there = entry(path, spec), entry(more.pop("reference", path))
    values = {"matched_by": "path", "changes": changes(here, there), "undecided": {}, "parameters": ()}
    return Pair(entry=here, reference=there, **{**values, "observed": observed, **more})


def comparison(*pairs: Pair, **more: Any) -> Comparison:
    of_norms = {key: more.pop(key) for key in ("unmatched", "left_out") if key in more}
    values = {
        "port": "port",
        "reference": "stock",
        "forms": ("folder", "folder"),
        "source": "a text",
        "conventions": Conventions(pairs=pairs, **of_norms),
        "rows": Rows(compared=len(pairs)),
    }
    return Comparison(**{**values, **more})


def told(*pairs: Pair, **more: Any) -> str:
    return screens.words(describe_comparison(comparison(*pairs, **more)))


def test_the_verdict_is_that_all_is_the_same_or_that_there_is_nothing_to_compare() -> None:
    text = told(pair("a"), pair("b"))
    assert "+ the same All 2 norms compute the same formulas." in text
    assert "looked at metadata, values, conventions, rows, wiring" in text
    assert "Side by side they agree to the bit at 2 norms and in their output." in text
    assert "- nothing to compare Neither of the two has a norm." in told()
    text = told(pair("a"), not_looked_at={"values": "no tensors", "rows": "no room", "metadata": "no tensors"})
    assert "looked at conventions, wiring in part not looked at metadata and values: no tensors" in text
    assert "not looked at rows: no room" in text
    assert "Side by side" not in text


def test_the_largest_effect_comes_first_and_alike_changes_stand_together() -> None:
    other = PORT.replace(cast="late")
    described = describe_comparison(
        comparison(pair("a", PORT, 0.1), pair("b"), pair("c", PORT, 0.3), pair("d", other, 0.2))
    )
    assert [each.title for each in described.sections[1:]] == [
        "2 norms: eps 1e-05 instead of 1e-06, inside the root both",
        "d: 2 conventions differ",
    ]
    assert [row[0].text for row in described.sections[1].tables[0].rows] == ["c", "a"]
    assert described.sections[2].notes == (
        "eps 1e-05 instead of 1e-06, inside the root both",
        "in 16 bits rounded once at the end instead of rounded before the gain",
    )
    assert described.verdict.detail == (
        "2 of 4 norms do not compute what the reference's do: eps 1e-05 instead of 1e-06, inside the root both."
    )
    assert described.notes[0].startswith("Besides: d does not compute what the reference's does: eps 1e-05")


def test_each_dtype_has_its_columns() -> None:
    found = comparison(pair("a", PORT, 0.1, dtypes=("float32", "bfloat16")))
    table = describe_comparison(found).sections[1].tables[0]
    assert [column.heading for column in table.columns] == [
        *("norm", "row rms", "float32 median", "float32 worst", "bfloat16 median", "bfloat16 worst")
    ]
    assert [cell.text for cell in table.rows[0]] == ["a", "1.00", "0.0500", "0.100", "0.0500", "0.100"]


@pytest.mark.parametrize(
    ("note", "with_it", "without"),
    [
        (
            "Casts make a difference in 16 bits; in float32 it is the last bit at most.",
            [pair("a", specs.LLAMA.replace(cast="late"), 6e-8)],
            [pair("a", PORT, 0.1), pair("a", PORT.replace(cast="late"), 0.1)],
        ),
        ("Without gain and bias", [pair("a", PORT, 0.1, with_parameters=False)], [pair("a", PORT, 0.1)]),
        ("No effect was measured: gain and bias", [pair("a", PORT, with_parameters=False)], [pair("a", PORT)]),
    ],
)
def test_a_note_is_there_where_it_applies(note: str, with_it: list[Pair], without: list[Pair]) -> None:
    assert all(note in told(each) for each in with_it)
    assert not any(note in told(each) for each in without)


@pytest.mark.parametrize(
    ("birth", "expected"),
    [
        (
            Birth(where="at", path="a", since=None, agreed=3e-7, differs=0.04),
            "appears at a: its input agrees to 3e-7, its output differs by 0.0400 in the worst row.",
        ),
        (
            Birth(where="before", path="b", since="a", agreed=0.0, differs=0.5),
            "appears between two norms: what leaves a agrees to the bit, what enters b differs by 0.500 in the worst",
        ),
        (
            Birth(where="before", path="a", since=None, agreed=0.0, differs=0.5),
            "appears before the first norm: the input of a differs by 0.500 in the worst row.",
        ),
        (
            Birth(where="after", path=None, since="b", agreed=0.0, differs=0.5),
            "appears after b, the last norm: what leaves it agrees to the bit, the model's output differs by 0.500",
        ),
    ],
)
def test_where_a_difference_begins(birth: Birth, expected: str) -> None:
    text = told(pair("a"), pair("b"), rows=Rows(birth=birth, first_bits=birth, compared=2))
    assert f"The first difference {expected}" in text
    assert "x different All 2 norms compute the same formulas, but the two runs differ." in text
    assert "Within rounding" not in text


def test_the_first_bit_before_the_birth_is_not_told_and_rounding_alone_is_no_difference() -> None:
    bits = Birth(where="at", path="a", since=None, agreed=0.0, differs=2e-7)
    birth = Birth(where="at", path="b", since=None, agreed=3e-7, differs=0.1)
    both = told(pair("a"), rows=Rows(birth=birth, first_bits=bits, compared=2))
    assert "at b: its input" in both
    assert "at a: its input" not in both
    for where, path, words in (("before", "b", "where they enter b"), ("after", None, "in the output")):
        far = Step(where=where, path=path, reference=path, median=0.01, worst=0.09, own=0.01)
        near = Step(where="at", path="a", reference="a", median=2e-7, worst=2e-7, own=1e-7)
        rounding = told(pair("a"), rows=Rows(first_bits=bits, compared=2, largest=0.09, steps=(near, far)))
        told_so = "Side by side they are no more different than rounding explains. Rows differ at most by 0.0900 of "
        assert f"{told_so}their length {words}. The first difference is at a: its input" in rounding
        assert "+ the same" in rounding


def test_what_has_no_counterpart_or_was_not_compared_is_told_with_the_reason() -> None:
    text = told(
        pair("a", parameters=(ParameterChange(role="weight", difference=0.25),), reference="z", matched_by="order"),
        pair("b", parameters=(ParameterChange(role="bias", difference=None),), undecided={"casts": "float32 only"}),
        unmatched=(
            *(Unmatched(path=f"c.{number}", owner="port", class_name="N") for number in range(2)),
            Unmatched(path="d", owner="reference", class_name="N", reason="gated"),
        ),
        left_out={"h.0.g": ("gated", "gated"), "h.1.g": ("gated", "gated"), "stem": ("batch norm", "gated")},
    )
    for line in (
        "x different d is missing in the port. Besides: 2 norms (c.*) are only in the port.",
        "pairs 1 of 2 norms: the paths differ, so they were paired in forward order and by size a for z",
        "only in port c.* (2) only in stock d: gated",
        "weight differs by up to 0.250 of the largest, at 1 norm: a",
        "bias differs (their digests do) at 1 norm: b",
        "not compared casts: float32 only (b)",
        "not compared h.*.g (2): gated",
        "not compared stem: batch norm; in the reference: gated",
    ):
        assert line in text


def test_long_lists_stop_and_say_how_many_there_are_beyond() -> None:
    found = comparison(*(pair(f"layers.{index}.norm", PORT, 1.0 / (1 + index)) for index in range(40)))
    text = screens.shown(section(describe_comparison(found), most=16))
    assert "layers.15.norm" in text
    assert "layers.16.norm" not in text
    assert "and 24 more" in text


@pytest.mark.parametrize("width", [70, 80, 120])
def test_it_fits_the_screen_and_names_cannot_steer_it(width: int) -> None:
    path = "model.language_model.layers.17.post_attention_layernorm"
    found = comparison(pair(path, PORT, 0.1, dtypes=("float32", "bfloat16")))
    text = screens.shown(describe_comparison(found), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    hostile = "\x1b[31m\r\n\u202e[bold]"
    change = Change(reading="input", given=hostile, expected="kept")
    attack = comparison(pair(hostile, changes=(change,)), port=hostile, source=hostile)
    assert not {"\x1b", "\r", "\u202e"} & set(screens.shown(describe_comparison(attack), width))


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


def test_another_reading_is_told_as_it_is() -> None:
    found = difference(Change(reading="input", given="overwritten", expected="kept"))
    assert found == "its input overwritten instead of kept"
    training = [{"output": output, "updates": []} for output in ("random", "as in eval")]
    found = difference(Change(reading="training", given=training[0], expected=training[1]))
    assert found == "in training output random instead of output as in eval"
    assert difference(Change(reading="features", given=16, expected=8)) == "features 16 instead of 8"


# Stored gains and biases.


def stored(port: dict[str, Tensor]) -> str:
    reference = replace(weights_of(gains(), name="folder"), runtime="transformers", architecture="gemma2")
    values = compare_values(replace(weights_of(port, name="port"), runtime="llama.cpp"), reference)
    lacking = dict.fromkeys(("conventions", "rows"), "not run")
    found = comparison(values=values, conventions=Conventions(), rows=Rows(), not_looked_at=lacking)
    return screens.shown(describe_comparison(found), 200)


def test_gains_of_a_right_port_are_one_line() -> None:
    text = stored({name: value.float() + 1 for name, value in gains().items()})
    assert "+ the same  All 7 gains that are stored are right (reference + 1, as llama.cpp stores it)." in text
    assert "all 7 gains  reference + 1; as llama.cpp stores it" in text


def test_what_is_wrong_of_gains_comes_first_and_says_what_it_does() -> None:
    port = {name: value.float() + 1 + (name.endswith("mlp_norm.weight")) for name, value in gains().items()}
    del port["model.norm.weight"]
    text = stored({**port, "evil\x1b[31m_norm.weight": gains()["model.norm.weight"][:5]})
    assert "\x1b[31m" not in text
    assert "reference + 2; doubled: llama.cpp adds nothing to it and computes gains + 1" in text
    facts = text[text.index("looked at") :]
    assert facts.index("missing") < facts.index("mlp_norm") < facts.index("as llama.cpp stores it")


def test_a_printed_comparison_begins_with_its_cause() -> None:
    found = comparison(pair("norm", PORT))
    assert str(found).splitlines()[3].startswith("x different  norm does not compute what the reference's does: eps")
    assert repr(found) == "<Comparison of port with stock: different>"
