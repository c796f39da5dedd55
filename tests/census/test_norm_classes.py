"""The table of norm classes: no class is missed, none is wrong, and it is what is generated now."""

from __future__ import annotations

import copy
import dataclasses
import re
import tomllib

import pytest
import torch
from torch import nn

import answers
import definitions
import norm_classes
import normkit as nk

TABLE = norm_classes.TABLE.read_text()
RIGHT_SHARE = 95.0


def counts():
    """The first table: what was counted, and how often."""
    rows = re.findall(r"^\| ([^|`]+) \| (\d+) \|([^|]*)\|$", TABLE, re.MULTILINE)
    return {name.strip(): (int(count), rest.strip()) for name, count, rest in rows}


def test_the_counts_add_up_none_is_wrong_and_nearly_all_plain_norms_are_right():
    found = counts()
    assert found["wrong"][0] == 0
    assert found["without an answer"][0] == 0
    right, share = found["of these right in every field"]
    assert right + found["undecidable in a field, right in the others"][0] == found["plain norms"][0]
    assert share == f"{100 * right / found['plain norms'][0]:.1f} %"
    assert float(share.rstrip(" %")) >= RIGHT_SHARE
    parts = ("no layer of its own, not built", "not a plain norm, and named as what it is", "plain norms")
    assert sum(found[part][0] for part in parts) == found["found"][0]
    # A fifth of the models share Llama's norm: fewer classes than this would mean that the search is broken.
    assert found["plain norms"][0] >= 250


def test_a_fingerprint_knows_what_is_computed_and_no_names():
    def fingerprint(source):
        (node,) = definitions.ast.parse(source).body
        return definitions.fingerprint(node)

    known = fingerprint(
        'class A(nn.Module):\n    """Doc."""\n    def forward(self, x: int) -> int:\n        return x * 2'
    )
    assert known == fingerprint("class B(nn.Module):\n    # why\n    def forward(self, x):\n        return x * 2")
    assert known != fingerprint("class A(nn.Module):\n    def forward(self, x):\n        return x * 3")
    assert known != fingerprint("class A(nn.LayerNorm):\n    def forward(self, x):\n        return x * 2")


@pytest.mark.slow
def test_a_class_whose_source_was_not_read_is_refused(monkeypatch, tmp_path):
    expected = norm_classes.EXPECTED.read_text()
    changed = tmp_path / "expected.toml"
    monkeypatch.setattr(norm_classes, "EXPECTED", changed)
    llama = tomllib.loads(expected)["llama.LlamaRMSNorm"]["source"]
    changed.write_text(expected.replace(llama, "00000000"))
    with pytest.raises(norm_classes.ExpectationError, match=f"llama.LlamaRMSNorm was read as 00000000, .* {llama}"):
        norm_classes.take()
    changed.write_text(expected.replace("^RobertaPreLayerNorm", "^Nothing"))
    monkeypatch.setattr(norm_classes, "ask", lambda *_: [])
    with pytest.raises(norm_classes.ExpectationError, match=r"roberta_prelayernorm.* has a source that was not read"):
        norm_classes.take()


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ({"spec": {}}, "right"),
        ({"spec": {"eps": 1e-6}}, "wrong"),
        ({"spec": {"cast": "early"}}, "wrong"),
        ({"spec": {"has_bias": False}}, "wrong"),
        ({"verdict": "gated"}, "wrong"),
        ({"verdict": "norm"}, "wrong"),
    ],
)
def test_an_answer_is_held_against_every_field(case, outcome):
    passport = nk.identify(nn.LayerNorm(64), (2, 3, 64))
    assert answers.judge(passport, case)[0] == outcome


def test_a_field_that_was_not_decided_is_never_wrong():
    # A function has no parameter: whether it has a gain of 1 or none is not to be seen.
    passport = nk.identify(lambda x: nn.functional.layer_norm(x, (64,)), 64)
    assert "gain" in passport.undecidable
    bare = {"has_weight": False, "has_bias": False}
    outcome, remark = answers.judge(passport, {"spec": bare})
    assert outcome == "undecidable"
    assert "gain: " in remark
    assert answers.judge(passport, {"spec": {**bare, "eps": 1e-6}})[0] == "wrong"


class Gated(nn.Module):
    def forward(self, x, gate):
        return nn.functional.layer_norm(x, (64,)) * gate.sigmoid()


@pytest.mark.parametrize(
    ("gate", "outcome"),
    [
        ({"placement": "after", "activation": "sigmoid"}, "not plain"),
        ({"placement": "before", "activation": "sigmoid"}, "wrong"),
        ({"placement": "after", "activation": "silu"}, "wrong"),
        ({"spec": {"has_weight": False, "has_bias": False}}, "not plain"),
        ({"spec": {"has_weight": False, "has_bias": False, "eps": 1e-6}}, "wrong"),
    ],
)
def test_what_else_was_read_is_compared_too(gate, outcome):
    passport = nk.identify(Gated(), (2, 3, 64))
    assert answers.judge(passport, {"verdict": "gated", "readings": {"gate": gate}})[0] == outcome
    assert answers.judge(passport, {"verdict": "gated", "readings": {"condition": {"scale": True}}})[0] == "wrong"


def test_a_passport_is_called():
    norm = nn.LayerNorm(64)
    passport = nk.identify(norm, 64)
    call = answers.call_of({})
    assert answers.computes(passport, norm, call, {"shape": (2, 64)})
    assert not answers.computes(passport, nn.LayerNorm(64, eps=0.1), call, {"shape": (2, 64)})
    rounded_early = nk.Norm(passport.spec.replace(cast="early"), 64)
    nn.init.uniform_(rounded_early.weight, 0.5, 1.5)
    passport = nk.identify(nk.Norm(passport.spec, 64), 64)
    assert not answers.computes(passport, rounded_early, call, {"shape": (2, 64)})


def outputs(definition, case):
    """What a class of a case computes, bit for bit: in each dtype, of rows in which eps counts and in which not."""
    norm, call, found = answers.build(definition, case), answers.call_of(case), []
    x = torch.randn(case["shape"], generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for layer in (norm, copy.deepcopy(norm).to(dtype)):
            for size in (1e-4, 1e-2, 1.0, 100.0):
                try:
                    with torch.no_grad():
                        y = call(layer, (size * x).to(dtype))
                    found.append((y.dtype, y.contiguous().view(torch.uint8).numpy().tobytes()))
                except Exception:
                    # Who takes more than x, or no other dtype, is asked.
                    found.append(None)
    return found if any(found) else object()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_table_is_what_is_generated_now(monkeypatch):
    """A class that has the source of another, and its outputs bit for bit, has its answer."""
    known = {}

    def ask(definition, case):
        computed, others = outputs(definition, case), known.setdefault((definition.body, id(case)), [])
        for other, answer in others:
            if other == computed:
                return dataclasses.replace(answer, definition=definition)
        others.append((computed, answers.ask(definition, case)))
        return others[-1][1]

    monkeypatch.setattr(norm_classes, "ask", ask)
    assert norm_classes.table(norm_classes.take()) == TABLE
