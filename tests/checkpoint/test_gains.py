"""Where the gain and the bias of one norm go."""

from __future__ import annotations

import torch

from normkit.checkpoint.gains import move_affine
from normkit.checkpoint.plan import Constant, Gain, Product, Quotient, Reference, Sum
from planned_models import edits_of, model_of, request_on


def moved(model, place, *operations, untie=False):
    request, draft = request_on(model, *operations, untie=untie)
    norm = next(norm for norm in request.graph.norms if norm.name == place)
    return move_affine(request, draft, norm), draft, norm


def test_gain_and_bias_enter_every_reader():
    change, draft, norm = moved(model_of("gpt_neox"), "gpt_neox.layers.0.input_layernorm", "gain", "bias")
    assert (change.gain, change.bias, change.kept, change.reasons) == ("folded", "folded", (), ())
    assert change.readers == ("gpt_neox.layers.0.attention.query_key_value",)
    edits, reader = edits_of(draft), "gpt_neox.layers.0.attention.query_key_value"
    gain = Gain(weight=f"{norm.name}.weight")
    assert (edits[f"{reader}.weight"].gain, edits[f"{reader}.weight"].gain_axis) == (gain, 1)
    product = Product(matrix=f"{reader}.weight", in_axis=1, vector=Reference(name=f"{norm.name}.bias"))
    assert edits[f"{reader}.bias"].value == Sum(terms=(product,))
    assert edits[f"{norm.name}.weight"].value == Constant(value=1.0)
    assert edits[f"{norm.name}.bias"].value == Constant(value=0.0)


def test_a_gain_alone_leaves_the_bias_divided_and_keeps_a_zero_gain_that_has_a_bias():
    model = model_of("gpt_neox")
    place = "gpt_neox.layers.0.input_layernorm"
    norm = model.get_submodule(place)
    zeros = (norm.weight == 0).nonzero().flatten().tolist()
    assert len(zeros) == 1
    assert bool((norm.bias != 0).all())
    change, draft, _ = moved(model, place, "gain")
    assert (change.gain, change.bias, change.kept) == ("folded", "divided", tuple(zeros))
    gain = Gain(weight=f"{place}.weight", kept=tuple(zeros))
    assert edits_of(draft)[f"{place}.bias"].value == Quotient(gain=gain)
    assert edits_of(draft)[f"{place}.weight"].value == Constant(value=1.0, kept=tuple(zeros))


def test_a_zero_gain_without_a_bias_there_is_not_kept():
    model = model_of("gpt_neox")
    place = "gpt_neox.layers.0.input_layernorm"
    norm = model.get_submodule(place)
    with torch.no_grad():
        norm.bias[norm.weight == 0] = 0.0
    assert moved(model, place, "gain")[0].kept == ()


def test_a_bias_that_no_reader_can_take_stays_and_the_change_says_which():
    change, draft, norm = moved(model_of("gpt2", tied=False), "transformer.ln_f", "final")
    assert (change.gain, change.bias, len(change.kept)) == ("folded", "divided", 1)
    assert change.reasons == ("its bias stays in the norm, divided by the gain, as lm_head has none",)
    assert isinstance(edits_of(draft)[str(norm.bias)].value, Quotient)


def test_a_bias_alone_leaves_the_gain():
    change, draft, norm = moved(model_of("gpt2"), "transformer.h.0.ln_2", "bias")
    assert (change.gain, change.bias) == ("left", "folded")
    edits = edits_of(draft)
    assert edits["transformer.h.0.mlp.c_fc.weight"].relation == "identical"
    assert edits[str(norm.weight)].relation == "identical"
    product = Product(matrix="transformer.h.0.mlp.c_fc.weight", in_axis=0, vector=Reference(name=str(norm.bias)))
    assert edits["transformer.h.0.mlp.c_fc.bias"].value == Sum(terms=(product,))


def test_a_tied_head_is_refused_with_the_way_out_and_taken_once_untied():
    change, draft, _ = moved(model_of("llama", tied=True), "model.norm", "final")
    assert change.gain == "left"
    assert [refusal.operation for refusal in draft.refusals] == ["final"]
    assert "lm_head shares the table model.embed_tokens.weight; untying" in draft.refusals[0].reason


def test_an_offset_gain_becomes_zero_and_acts_with_its_offset():
    change, draft, norm = moved(model_of("gemma2"), "model.layers.1.input_layernorm", "gain")
    assert (change.gain, change.bias) == ("folded", "none")
    edits = edits_of(draft)
    assert edits[str(norm.weight)].value == Constant(value=0.0)
    assert edits["model.layers.1.self_attn.q_proj.weight"].gain == Gain(weight=str(norm.weight), offset=1.0)


def test_a_norm_added_to_the_residual_is_left_with_that_reason():
    change, draft, _ = moved(model_of("gemma2"), "model.layers.0.post_attention_layernorm", "gain")
    assert change.gain == "left"
    assert "its output is added to the residual" in draft.refusals[0].reason


def test_a_gain_of_ones_is_no_edit():
    model = model_of("llama")
    with torch.no_grad():
        model.get_submodule("model.layers.0.input_layernorm").weight.fill_(1.0)
    change, draft, _ = moved(model, "model.layers.0.input_layernorm", "gain")
    assert (change.gain, change.readers) == ("identity", ())
    assert {edit.relation for edit in edits_of(draft).values()} == {"identical"}
