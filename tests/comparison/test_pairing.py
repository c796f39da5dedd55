"""Which norm stands for which, and in which conventions two norms differ."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.comparison.pairing import changes, match, undecided
from normkit.identification.book import Entry, PassportBook, survey
from normkit.identification.passport import Passport, Reading
from normkit.spec import NormSpec


def entry(
    path: str, spec: NormSpec | None = None, *, digest: str = "", features: int = 8, **readings: Reading
) -> Entry:
    passport = Passport(
        verdict="norm",
        spec=spec or specs.LLAMA,
        readings={"kind": Reading(value="norm"), **readings},
        shape=(2, features),
        recorded={"weight": {"name": "weight", "sha256": digest}} if digest else {},
    )
    return Entry(path=path, class_name="N", features=features, passport=passport)


def book(*entries: Entry) -> PassportBook:
    return PassportBook(model="m", entries=entries, left_out={})


def pairs(model: PassportBook, reference: PassportBook) -> list[tuple[str, str, str]]:
    return [(each.entry.path, each.reference.path, each.matched_by) for each in match(model, reference)]


def test_paths_decide_before_order() -> None:
    here, there = book(entry("a"), entry("b")), book(entry("b"), entry("a"))
    assert pairs(here, there) == [("a", "a", "path"), ("b", "b", "path")]


def test_other_names_are_paired_in_forward_order() -> None:
    here = book(entry("x.0"), entry("x.1"), entry("final"))
    there = book(entry("y.0"), entry("y.1"), entry("final"))
    assert pairs(here, there) == [("x.0", "y.0", "order"), ("x.1", "y.1", "order"), ("final", "final", "path")]


def test_other_sizes_are_not_paired_by_order() -> None:
    here = book(entry("x.0"), entry("x.q", features=4), entry("x.1"))
    there = book(entry("y.0"), entry("y.1"))
    assert pairs(here, there) == [("x.0", "y.0", "order"), ("x.1", "y.1", "order")]


def test_as_many_as_can_be_are_paired() -> None:
    sizes = [8, 4, 4, 8, 8, 4, 4, 8]
    here = book(*(entry(f"x.{index}", features=size) for index, size in enumerate(sizes)))
    there = book(*(entry(f"y.{index}") for index in range(4)))
    assert [(one, other) for one, other, _ in pairs(here, there)] == [
        *(("x.0", "y.0"), ("x.3", "y.1"), ("x.4", "y.2"), ("x.7", "y.3"))
    ]


def test_a_norm_missed_in_the_middle_is_found_by_the_parameters() -> None:
    here = book(*(entry(f"x.{index}", digest=str(index)) for index in (0, 2, 3)))
    there = book(*(entry(f"y.{index}", digest=str(index)) for index in range(4)))
    assert pairs(here, there) == [("x.0", "y.0", "order"), ("x.2", "y.2", "order"), ("x.3", "y.3", "order")]


def test_a_changed_parameter_between_two_that_agree_still_finds_its_pair() -> None:
    here = book(*(entry(f"x.{index}", digest=f"{index}{'new' * (index == 1)}") for index in range(3)))
    there = book(*(entry(f"y.{index}", digest=str(index)) for index in range(3)))
    assert pairs(here, there) == [("x.0", "y.0", "order"), ("x.1", "y.1", "order"), ("x.2", "y.2", "order")]


def test_exchanged_parameters_leave_no_norm_alone() -> None:
    here = book(*(entry(f"x.{index}", digest=digest) for index, digest in enumerate("acbd")))
    there = book(*(entry(f"y.{index}", digest=digest) for index, digest in enumerate("abcd")))
    assert pairs(here, there) == [(f"x.{index}", f"y.{index}", "order") for index in range(4)]


def test_empty_books() -> None:
    assert match(book(), book(entry("a"))) == match(book(entry("a")), book()) == ()


@pytest.mark.parametrize(
    ("reading", "change"),
    [
        ("eps", {"eps": 1e-5}),
        ("eps", {"eps_placement": "outside"}),
        ("divisor", {"correction": 1}),
        ("centring", {"centre_numerator": True, "centre_statistics": True}),
        ("gain", {"weight_offset": 1.0}),
        ("bias", {"has_bias": True}),
        ("casts", {"cast": "late"}),
        ("output dtype", {"output_dtype": "input"}),
        ("rows", {"groups": 2}),
    ],
)
def test_every_convention_is_told_by_itself(reading: str, change: dict[str, Any]) -> None:
    other = specs.LLAMA.replace(**change)
    assert other != specs.LLAMA
    found = changes(entry("a", other), entry("a"))
    assert [each.reading for each in found] == [reading]
    assert {name: found[0].given[name] for name in change} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in change.items()
    }
    assert found[0].expected != found[0].given


def test_alike_norms_have_no_changes() -> None:
    assert changes(entry("a"), entry("b", digest="other")) == ()


def test_what_is_undecidable_is_not_compared_and_says_why() -> None:
    unsure = entry("a", specs.LLAMA.replace(eps=0.5), eps=Reading.open("too small to be felt"))
    assert changes(unsure, entry("a")) == changes(entry("a"), unsure) == ()
    assert undecided(entry("a").passport, unsure.passport) == {"eps": "too small to be felt"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eps": 1e-5}, {"eps": 1e-5 * (1 + 1e-8)}),
        ({"eps": None}, {"eps": 2.0**-23}),
        ({"eps": 0.0, "eps_placement": "outside"}, {"eps": 0.0}),
        ({"weight_offset": 0.0, "offset_dtype": "parameter"}, {"weight_offset": 0.0}),
    ],
)
def test_two_ways_to_say_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changes(entry("a", specs.LLAMA.replace(**given)), entry("a", specs.LLAMA.replace(**expected))) == ()


def test_the_dtype_of_the_offset_counts_where_both_have_one() -> None:
    one = specs.LLAMA.replace(weight_offset=1.0)
    found = changes(entry("a", one), entry("a", one.replace(offset_dtype="parameter")))
    assert [each.reading for each in found] == ["offset dtype"]


def test_another_width_another_conduct_another_kind() -> None:
    wide = entry("a", features=16)
    assert [(each.reading, each.given, each.expected) for each in changes(wide, entry("a"))] == [("features", 16, 8)]
    kept, changed = entry("a", input=Reading(value="kept")), entry("a", input=Reading(value="overwritten"))
    assert [(each.reading, each.given) for each in changes(changed, kept)] == [("input", "overwritten")]
    measured = [entry("a", conditioning=Reading(value={"error": error, "cancels": False})) for error in (1e-7, 2e-7)]
    assert changes(measured[0], measured[1]) == ()
    axes = [Reading(value=[{"axis": axis, "coupling": "none"} for axis in range(1, most)]) for most in (2, 3)]
    assert changes(entry("a", time=axes[0]), entry("a", time=axes[1])) == ()
    causal = Reading(value=[{"axis": 1, "coupling": "causal"}])
    assert [each.given for each in changes(entry("a", time=causal), entry("a", time=axes[0]))] == [
        [{"coupling": "causal"}]
    ]
    unknown = entry("a", input=Reading.open("it cannot be told"))
    assert changes(unknown, kept) == changes(kept, unknown) == changes(kept, entry("a")) == ()
    gated = dataclasses.replace(entry("a"), passport=Passport(verdict="gated", spec=None, readings={}))
    assert [(each.reading, each.given, each.expected) for each in changes(gated, entry("a"))] == [
        ("kind", "gated", "norm")
    ]


@pytest.mark.slow
def test_a_norm_called_as_a_function_is_the_module_s_equal() -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(self.first(x), (8,), torch.ones(8), torch.zeros(8), 1e-5)

    x = torch.randn(2, 3, 8)
    models = Called(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    function, module = (survey(model, partial(model, x)).entries[0] for model in models)
    assert (function.path, module.path) == (":layer_norm", "1")
    assert changes(function, module) == ()
