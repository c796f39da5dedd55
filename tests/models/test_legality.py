"""What may be changed is derived from the graph, and what may not has its reason; that both are true, folding shows."""

from __future__ import annotations

import dataclasses

import pytest

from folding_cases import graph_of
from normkit.models import legality
from normkit.models.graph import Graph, Linear, Norm
from tiny_models import tiny


def graph(family: str, **options: object) -> Graph:
    return graph_of(tiny(family, **options)[0])


def norm_of(graph: Graph, ending: str) -> Norm:
    return next(norm for norm in graph.norms if norm.name.endswith(ending))


def linear_of(graph: Graph, ending: str) -> Linear:
    return next(linear for linear in graph.linears if linear.name.endswith(ending))


@pytest.mark.parametrize(
    ("family", "norm", "reason"),
    [
        ("gpt2", "h.0.ln_1", None),
        ("gpt2", "ln_f", None),
        ("qwen3", "q_norm", "its output goes to the scores, behind rotary positions"),
        ("bert", "embeddings.LayerNorm", "its output is added to the attention sum.0"),
        ("bert", "layer.1.output.LayerNorm", None),
        ("bert", "transform.LayerNorm", None),
        ("gemma2", "post_attention_layernorm", "its output is added to the residual"),
        ("opt_post_norm", "layers.0.final_layer_norm", "its output is added to the attention sum.1"),
        ("whisper", "encoder.layer_norm", None),
    ],
)
def test_a_norm_folds_where_only_linear_maps_take_its_output(family, norm, reason):
    found = graph(family, tied=False)
    told = legality.against_folding(found, norm_of(found, norm))
    assert told is None if reason is None else str(told).startswith(reason)


def test_what_a_class_returns_stays():
    found = graph("gpt2", class_name="GPT2Model")
    assert legality.against_folding(found, found.norms[-1]) == "its output is what GPT2Model returns"
    bert = graph("bert", class_name="BertModel")
    assert legality.against_folding(bert, bert.norms[-1]) == "its output is what BertModel returns"


def test_a_tied_head_takes_a_gain_once_it_is_untied():
    found = graph("gpt2", tied=True)
    reason = legality.against_folding(found, found.norms[-1])
    assert reason == (
        "its reader lm_head shares the table transformer.wte.weight; untying gives the head a table of its own"
    )
    assert legality.against_folding(found, found.norms[-1], untie=True) is None
    fixed = graph("t5", tied=True)
    assert "scaled" in str(legality.against_folding(fixed, fixed.norms[-1], untie=True))


def test_a_space_is_centred_where_only_layer_norms_read_it():
    assert legality.against_centring(graph("gpt2"), "residual") is None
    assert "is an RMSNorm, which sees the mean" in str(legality.against_centring(graph("llama"), "residual"))
    post_norm = graph("opt_post_norm")
    assert "layers.0.self_attn.q_proj reads the residual without a norm" in str(
        legality.against_centring(post_norm, "residual")
    )
    returning = dataclasses.replace(graph("gpt2"), returned=frozenset({"residual"}))
    assert legality.against_centring(returning, "residual") == "GPT2LMHeadModel returns the residual"


def test_a_writer_is_centred_unless_it_is_no_linear_map_or_shared():
    whisper = graph("whisper", tied=True)
    conv = linear_of(whisper, "conv2")
    assert str(legality.against_centring_writer(whisper, conv)).startswith("a GELU stands between")
    assert legality.against_centring_writer(whisper, linear_of(whisper, "fc2")) is None
    table = next(table for table in whisper.tables if table.name.endswith("embed_tokens.weight"))
    assert "proj_out shares the table" in str(legality.against_centring_writer(whisper, table))
    assert legality.against_centring_writer(whisper, table, untie=True) is None


@pytest.mark.parametrize(
    ("family", "norm", "reason"),
    [
        ("gpt2", "ln_f", None),
        ("cohere", "input_layernorm", None),
        ("cohere_qk_norm", "q_norm", "what it normalizes is no sum"),
        ("llama", "input_layernorm", "it is one"),
        ("bert", "embeddings.LayerNorm", None),
        ("bert", "layer.0.output.LayerNorm", "the output of bert.encoder.layer.0.attention.output.LayerNorm is added"),
        ("bert", "transform.LayerNorm", "what it normalizes is no sum"),
        ("bloom", "word_embeddings_layernorm", None),
        ("bloom", "ln_f", "the output of transformer.word_embeddings_layernorm is added to the residual"),
        ("whisper", "encoder.layer_norm", "a GELU stands between model.encoder.conv2 and the sum"),
        ("whisper", "decoder.layer_norm", None),
        ("opt_post_norm", "layers.0.self_attn_layer_norm", "model.decoder.layers.0.self_attn.q_proj reads"),
    ],
)
def test_a_layer_norm_becomes_an_rms_norm_where_all_that_it_reads_is_centred(family, norm, reason):
    found = graph(family, tied=False)
    told = legality.against_rms(found, norm_of(found, norm))
    assert told is None if reason is None else str(told).startswith(reason)


def test_a_bias_of_the_values_passes_where_the_weights_of_a_row_sum_to_one():
    (attention, *_) = graph("gpt2").attentions
    assert legality.against_value_fold(attention) is None
    assert "sinks" in str(legality.against_value_fold(graph("gpt_oss").attentions[0]))
    assert "has no bias" in str(legality.against_value_fold(graph("stablelm_bias").attentions[0]))
    cut = graph("olmo", attention_bias=True, clip_qkv=0.5).attentions[0]
    assert legality.against_value_fold(cut) == "clip_qkv cuts off values with their bias"


@pytest.mark.parametrize(
    ("family", "ignored"), [("gpt_neo", True), ("whisper", True), ("gptj", False), ("stablelm", False)]
)
def test_softmax_does_not_see_a_bias_of_keys_unless_positions_rotate_them(family, ignored):
    found = graph(family)
    assert legality.ignores_key_bias(found, linear_of(found, "k_proj")) is ignored
    assert not legality.ignores_key_bias(found, linear_of(found, "v_proj"))


def test_nor_does_it_where_something_stands_beside_the_scores():
    found = graph("gpt_neo")
    keys = linear_of(found, "k_proj")
    for change in ({"softcap": True}, {"sinks": "sinks"}, {"clip": "bound"}, {"rotary": True}):
        changed = tuple(dataclasses.replace(attention, **change) for attention in found.attentions)
        assert not legality.ignores_key_bias(dataclasses.replace(found, attentions=changed), keys)
