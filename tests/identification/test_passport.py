"""A passport computes what it says, says what is open, and survives its file."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import normkit as nk
from helpers import valid_specs
from normkit import NormSpec, specs
from normkit.errors import IdentificationError
from normkit.identification.passport import Passport, Reading
from normkit.identification.spec_readings import CONVENTIONS, same_eps, value_of, words_of

EPS = st.sampled_from([None, 1e-5, 1e-6])


def passport(**changes):
    readings = {
        "eps": Reading(value={"eps": 1e-5, "eps_placement": "inside"}, evidence=("eps = 1e-05",)),
        "casts": Reading.open("it does not run in bfloat16", "tried"),
    }
    return Passport(**{"verdict": "norm", "spec": specs.LLAMA, "readings": readings} | changes)


def test_every_convention_of_a_spec_has_one_reading():
    decided = [name for names in CONVENTIONS.values() for name in names]
    assert sorted(decided) == sorted(specs.LLAMA.to_json())


@given(valid_specs(eps=EPS), valid_specs(eps=EPS))
def test_two_specs_have_the_same_words_where_they_have_the_same_values(spec, other):
    for reading in CONVENTIONS:
        is_same = value_of(spec, reading) == value_of(other, reading)
        assert (words_of(spec, reading) == words_of(other, reading)) == is_same


def test_the_same_eps_is_in_the_same_place_unless_it_is_0():
    assert same_eps(NormSpec(eps=0.0), NormSpec(eps=0.0, eps_placement="clamp"), 1e-3)
    assert not same_eps(NormSpec(), NormSpec(eps_placement="outside"), 1e-3)
    assert same_eps(NormSpec(eps=None), NormSpec(eps=1.1921e-7), 1e-3)
    assert not same_eps(NormSpec(eps=1e-5), NormSpec(eps=1.1e-5), 1e-3)


def test_what_is_open_is_said_and_costs_confidence():
    found = passport()
    assert found.undecidable == {"casts": "it does not run in bfloat16"}
    assert found.confidence == 0.9
    assert found.evidence == ("eps = 1e-05", "tried", "undecided: casts: it does not run in bfloat16")


def test_a_file_says_what_is_a_placeholder():
    plain = json.loads(json.dumps(passport().to_json(), allow_nan=False))
    assert NormSpec.from_json(plain["spec"]) == specs.LLAMA
    assert plain["undecidable"] == {"casts": "it does not run in bfloat16"}
    back = Passport.from_json(plain)
    assert back.undecidable == passport().undecidable
    assert back.to_json() == plain


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(16), (2, 16)),
        (nn.RMSNorm(16, eps=1e-6), (2, 3, 16)),
        (nn.GroupNorm(4, 16), (2, 16, 3, 3)),
        (nk.Norm(specs.GEMMA, 16), (2, 16)),
    ],
)
def test_a_passport_computes_what_it_says(norm, shape):
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    found = nk.identify(norm, shape)
    x = torch.randn(shape)
    # Two float32 roundings of numbers up to 4, and those of the norm itself.
    torch.testing.assert_close(found(x), norm(x), rtol=1e-5, atol=1e-5)
    # What was found stays when the module changes.
    before = found(x)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.zero_()
    assert torch.equal(found(x), before)


def test_a_passport_from_a_file_wants_its_parameters():
    norm = nn.LayerNorm(8)
    found = nk.identify(norm, 8)
    back = Passport.from_json(found.to_json())
    assert (back.weight_name, back.bias_name) == ("weight", "bias")
    assert back.to_json() == found.to_json()
    x = torch.randn(2, 8)
    with pytest.raises(IdentificationError, match="holds no weight"):
        back(x)
    assert torch.equal(back(x, norm.weight, norm.bias), found(x))


def test_a_passport_without_a_formula_cannot_be_called():
    with pytest.raises(IdentificationError, match="no formula was found"):
        nk.identify(nn.GELU(), 8)(torch.randn(2, 8))


@pytest.mark.slow
def test_parameters_are_told_apart_by_their_digest():
    one, other = nn.LayerNorm(8), nn.LayerNorm(8)
    with torch.no_grad():
        other.bias[3] = 1e-3
    first, second = (nk.identify(norm, 8).to_json()["parameters"] for norm in (one, other))
    assert first["weight"] == second["weight"]
    assert first["bias"] != second["bias"]
    assert first["weight"]["name"] == "weight"
    assert first["weight"]["shape"] == [8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema_version 1, got 99"),
        ({"verdict": "fine"}, "verdict must be one of"),
        ({"readings": None}, "no passport"),
    ],
)
def test_what_is_no_passport(change, message):
    plain = passport().to_json()
    for name, value in change.items():
        if value is None:
            del plain[name]
        else:
            plain[name] = value
    with pytest.raises(IdentificationError, match=message):
        Passport.from_json(plain)
