"""The bias of the values, moved behind the attention."""

from __future__ import annotations

import pytest
import torch

from normkit.checkpoint.plan import Rows
from normkit.checkpoint.values import pass_values
from planned_models import edits_of, model_of, request_on


def passed(model):
    request, draft = request_on(model, "value")
    pass_values(request, draft)
    return edits_of(draft), draft.refusals


@pytest.mark.parametrize(
    ("family", "value", "output", "rows"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj", Rows(blocks=1, tail=32)),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value", "gpt_neox.layers.0.attention.dense", None),
    ],
)
def test_fused_values_are_taken_from_their_rows(family, value, output, rows):
    edits, refusals = passed(model_of(family))
    assert refusals == ()
    term = edits[f"{output}.bias"].value.terms[0]
    assert (term.matrix, term.vector.name, term.vector.is_folded) == (f"{output}.weight", f"{value}.bias", True)
    if rows is not None:
        assert (term.vector.rows, edits[f"{value}.bias"].value.zeroed) == (rows, rows)
    else:
        # Each of the four heads holds its query, key and value together.
        assert term.vector.rows is not None
        assert term.vector.rows.blocks == 4


def test_shared_values_are_repeated_for_every_query_head():
    edits, _ = passed(model_of("starcoder2"))
    term = edits["model.layers.0.self_attn.o_proj.bias"].value.terms[0]
    assert (term.vector.heads, term.vector.repeat) == (2, 2)


def test_sinks_are_refused_by_name():
    edits, refusals = passed(model_of("gpt_oss"))
    assert "sinks model.layers.0.self_attn.sinks take part of each row" in refusals[0].reason
    assert {edit.relation for edit in edits.values()} == {"identical"}


def test_an_attention_without_a_bias_behind_it_is_refused_by_name():
    _, refusals = passed(model_of("qwen2"))
    assert refusals[0].reason == "model.layers.0.self_attn.o_proj has no bias to take it"


def test_values_without_a_bias_are_nothing_to_do():
    model = model_of("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.bias[-32:] = 0.0
    edits, refusals = passed(model)
    assert refusals == ()
    assert {edit.relation for edit in edits.values()} == {"identical"}
