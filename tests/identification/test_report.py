"""The passports of a model on a screen."""

from __future__ import annotations

import dataclasses

import pytest

from normkit import specs
from normkit.identification.book import Entry, PassportBook
from normkit.identification.passport import Passport, Reading
from normkit.identification.report import LABELS, describe_book, is_ordinary, parts_of
from normkit.identification.spec_readings import CONVENTIONS, value_of
from normkit.spec import NormSpec
from screens import shown

OPEN = {"casts": Reading.open("it runs in float32 only")}


def entry(
    path: str, spec: NormSpec = specs.LLAMA, *, class_name: str = "N", features: int = 64, **more: Reading
) -> Entry:
    readings = {"kind": Reading(value="norm"), **more}
    passport = Passport(verdict="norm", spec=spec, readings=readings, shape=(2, features))
    return Entry(path=path, class_name=class_name, features=features, passport=passport)


def book(*entries: Entry, **left_out: str) -> PassportBook:
    return PassportBook(
        model="mine", entries=entries, left_out={key.replace("_", "."): why for key, why in left_out.items()}
    )


LAYERS = [entry(f"layers.{index}.{name}") for index in range(4) for name in ("a", "b")]
Q = [entry(f"layers.{index}.q", specs.GEMMA, features=16) for index in range(4)]


def test_alike_norms_are_one_kind_and_the_most_frequent_comes_first() -> None:
    described = describe_book(book(Q[0], *LAYERS, entry("norm"), *Q[1:]))
    assert [kind.title for kind in described.sections] == [
        "9 norms: RMSNorm, eps 1e-6",
        "4 norms: RMSNorm, eps 1e-6, 1 + weight",
    ]
    rows = [[cell.text for cell in row] for row in described.sections[0].tables[0].rows]
    assert rows == [["layers.*.a", "4", "N", "64"], ["layers.*.b", "4", "N", "64"], ["norm", "1", "N", "64"]]
    assert described.gist.startswith("13 norms, of 2 kinds")
    assert described.sections[0].notes[0] == str(specs.LLAMA)


def test_a_single_norm_keeps_its_number() -> None:
    rows = describe_book(book(entry("layers.7.a"))).sections[0].tables[0].rows
    assert rows[0][0].text == "layers.7.a"


def test_what_is_undecided_says_why_and_is_no_fact() -> None:
    described = describe_book(book(entry("a", casts=OPEN["casts"])))
    facts = {fact.label: fact.value for fact in described.sections[0].facts}
    assert facts["in 16 bits"] == "undecided: it runs in float32 only"
    assert facts["confidence"].startswith("90.0 %")
    assert "rounded" not in "".join(facts.values())
    assert described.sections[0].title == "1 norm: RMSNorm, not wholly decided"
    assert described.sections[0].notes[0] == f"{specs.LLAMA}  but: casts?"
    certain = {fact.label: fact.value for fact in describe_book(book(entry("a"))).sections[0].facts}
    assert certain["in 16 bits"] == "statistics in float32, rounded before the gain"
    assert certain["confidence"].startswith("100 %")


def test_what_is_odd_about_its_conduct_is_told_and_what_is_ordinary_is_not() -> None:
    kept, zeros = Reading(value="kept"), Reading(value={"zeros": "NaN", "constant": "finite"})
    odd = entry("a", input=kept, **{"degenerate rows": zeros, "training": Reading.open("it fails there")})
    facts = {fact.label: fact.value for fact in describe_book(book(odd)).sections[0].facts}
    assert facts["odd rows"] == "zeros NaN, constant finite"
    assert facts["in training"] == "undecided: it fails there"
    assert "its input" not in facts


def test_norms_that_are_not_equally_sure_or_act_otherwise_are_of_two_kinds() -> None:
    rule = {"eps": Reading(value=None, confidence=0.5)}
    other = (
        {"eps": Reading.open("too small")},
        {"bias": Reading.open("hidden")},
        {"input": Reading(value="overwritten")},
    )
    kinds = describe_book(
        book(entry("a"), entry("b", **rule), *(entry(f"c{i}", **more) for i, more in enumerate(other)))
    ).sections
    assert sorted(kind.tables[0].rows[0][0].text for kind in kinds) == ["a", "b", "c0", "c1", "c2"]


def test_the_offset_has_a_line_where_there_is_one() -> None:
    labels = [[fact.label for fact in describe_book(book(each)).sections[0].facts] for each in (LAYERS[0], Q[0])]
    assert ["offset" in each for each in labels] == [False, True]


def test_what_is_left_out_is_told_with_the_reason_and_like_paths_together() -> None:
    text = shown(describe_book(book(entry("a"), layers_0_g="gated", layers_1_g="gated", stem="batch norm")))
    assert "these normalize, but no formula of a plain norm describes them" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "layers.*.g (2) gated" in lines
    assert "stem batch norm" in lines


def test_no_norms() -> None:
    assert "this model has no norm" in shown(describe_book(book()))


def test_a_passport_without_a_formula_is_shown_as_what_it_is() -> None:
    gated = dataclasses.replace(entry("a"), passport=Passport(verdict="gated", spec=None, readings={}))
    text = shown(describe_book(book(gated)))
    assert "1 norm: gated" in text
    assert "no formula was found" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_screen_of_any_width_holds_the_whole_paths(width: int) -> None:
    long = [entry(f"model.language_model.layers.{index}.post_attention_layernorm_of_the_block") for index in range(3)]
    text = shown(describe_book(book(*long)), width)
    assert max(map(len, text.splitlines())) <= width
    # Folded where it must be, never cut.
    assert "…" not in text
    assert "post_attention_layernorm_of_the_block" in text.replace("\n", "").replace(" ", "")


def test_names_cannot_steer_the_terminal() -> None:
    hostile = "\x1b[31mred\r\n\u202e[bold]x"
    named = entry(f"a.{hostile}", class_name=hostile)
    left_out = {f"b.{hostile}": hostile}
    text = shown(describe_book(PassportBook(model=hostile, entries=(named,), left_out=left_out)))
    assert not {"\x1b", "\r", "\u202e"} & set(text)
    assert "[bold]" in text


@pytest.mark.parametrize("name", [name for name, value in vars(specs).items() if isinstance(value, NormSpec)])
def test_every_convention_of_every_preset_has_words(name: str) -> None:
    spec = getattr(specs, name)
    for reading in CONVENTIONS:
        words = ", ".join(parts_of(reading, value_of(spec, reading)))
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


def test_a_printed_passport_has_the_formula_and_its_conventions_in_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    passport = entry("norm", **OPEN).passport
    lines = str(passport).splitlines()
    assert lines[0] == "RMSNorm, not wholly decided"
    assert " ".join(lines).startswith(f"{lines[0]} {specs.LLAMA}  but: casts?")
    assert "in 16 bits  undecided: it runs in float32 only" in lines
    assert max(map(len, lines)) <= 60
    assert repr(passport) == f"<Passport: {specs.LLAMA}>"


def test_a_printed_book_is_what_identify_prints() -> None:
    printed = str(book(*LAYERS))
    assert "8 norms: RMSNorm, eps 1e-6" in printed
    assert repr(book(*LAYERS)) == "<PassportBook of mine: 8 norms>"
