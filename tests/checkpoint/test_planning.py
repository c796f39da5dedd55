"""What becomes of each norm, writer and attention, and the whole plan: its order, its remarks, and config.json."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from normkit import demo
from normkit.checkpoint.affine import move_affine, move_value_bias
from normkit.checkpoint.centring import become_rms, centre_writers, change_family
from normkit.checkpoint.opening import open_checkpoint, open_model
from normkit.checkpoint.plan import Constant, Gain, Product, Quotient, Reference, Rows, Sum
from normkit.checkpoint.planning import DEFAULT, make_plan
from normkit.errors import InputError, ModelError
from normkit.spec import NormSpec
from planned_models import ALL, context_on, edits_of, model_of, plan_of


def test_the_default_folds_gains_and_biases_and_centres_nothing():
    plan = plan_of(model_of("gpt_neox", tied=False))
    assert plan.operations == DEFAULT
    assert {norm.gain for norm in plan.norms} == {"folded"}
    assert (plan.centred, plan.swaps, plan.config) == ((), {}, {})


def test_a_plan_has_one_edit_for_each_tensor_in_the_order_of_the_source():
    model = model_of("gpt2", tied=True)
    plan = plan_of(model, *ALL, untie=True)
    names = list(open_model(model).source.tensors)
    assert [edit.name for edit in plan.edits] == [*names, "lm_head.weight"]
    assert edits_of(plan)["lm_head.weight"].source == "transformer.wte.weight"
    assert edits_of(plan)["transformer.wte.weight"].gain is None


def test_untying_is_said_at_every_level_of_the_configuration_and_only_where_it_is_done():
    model = model_of("gpt2", tied=True)
    opened = open_model(model)
    opened.config["text_config"] = {"tie_word_embeddings": True, "deeper": {"tie_word_embeddings": True}}
    plan = make_plan(opened, untie=True)
    own = plan_of(model_of("gpt2", tied=False), untie=True)
    assert (own.untie, own.config) == (False, {})
    levels = ("tie_word_embeddings", "text_config.tie_word_embeddings", "text_config.deeper.tie_word_embeddings")
    assert plan.config == dict.fromkeys(sorted(levels), False)


def test_a_table_of_its_own_for_the_head_is_no_change_where_all_else_is_refused():
    plan = plan_of(model_of("llama", tied=True), "centre", untie=True)
    assert (plan.untie, plan.config, {edit.relation for edit in plan.edits}) == (False, {}, {"identical"})
    assert "lm_head.weight" not in edits_of(plan)
    with pytest.raises(InputError, match="nothing of what was asked can be done"):
        plan.require_change()


def test_a_second_plan_finds_nothing_to_fold():
    from normkit.checkpoint.memory import fold

    model = model_of("gpt_neox", tied=False)
    fold(model)
    again = plan_of(model)
    assert {edit.relation for edit in again.edits} == {"identical"}
    assert again.refusals == ()


def test_swaps_are_recorded_and_an_other_class_needs_none():
    plan = plan_of(model_of("gpt2", tied=False), "rms")
    assert plan.config["normkit"] == {"schema_version": 1, "norms": plan.swaps}
    other = plan_of(model_of("olmo", tied=False), "rms")
    assert other.swaps == {}
    assert "normkit" not in other.config
    assert plan_of(model_of("olmo", tied=False), "rms", change_class=False).swaps


def test_dropout_is_said_and_refused_for_training_only():
    model = model_of("gpt2")
    model.config.attn_pdrop = 0.1
    assert plan_of(model).remarks[0] == "equal in evaluation mode, not under dropout (attn_pdrop = 0.1)"
    with pytest.raises(InputError, match=r"expected no dropout .* got attn_pdrop = 0.1"):
        plan_of(model, for_training=True)
    model.config.attn_pdrop = 0.0
    assert not plan_of(model, for_training=True).remarks


def test_wider_output_widens_every_floating_tensor_and_never_narrows():
    plan = plan_of(model_of("llama", dtype=torch.bfloat16), dtype="float32")
    assert {edit.dtype for edit in plan.edits} == {"F32"}
    with pytest.raises(InputError, match=r"would round .* which is float64"):
        plan_of(model_of("llama"), dtype="float32")


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        ({}, {"dtype"}),
        ({"dtype": "bfloat16"}, {"dtype"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype"}),
        ({"dtype": None, "torch_dtype": "float16"}, {"dtype", "torch_dtype"}),
        (
            {"text_config": {"torch_dtype": "bfloat16", "deeper": {"dtype": "bfloat16"}}, "no.class": {"dtype": "x"}},
            {"dtype", "text_config.torch_dtype", "text_config.deeper.dtype"},
        ),
    ],
)
def test_wider_output_is_said_at_every_level_of_the_configuration(said, keys):
    opened = open_model(model_of("llama", dtype=torch.bfloat16))
    config = {key: value for key, value in opened.config.items() if "dtype" not in key} | said
    opened = dataclasses.replace(opened, config=config)
    assert make_plan(opened, dtype="float32").config == dict.fromkeys(keys, "float32")
    assert make_plan(opened).config == {}


def test_what_rounding_costs_is_said_where_products_are_rounded():
    narrow = model_of("llama", dtype=torch.bfloat16)
    (remark,) = plan_of(narrow).remarks
    said = re.match(r"folded gains are rounded to BF16: expected is an error of ([\d.]+) % of a weight", remark)
    # The significand of a weight is spread over [1, 2): half a unit in its last place, 2^-8, is seldom reached.
    assert 0.1 < float(said[1]) < 0.25
    assert plan_of(narrow, dtype="float32").remarks == plan_of(model_of("llama")).remarks == ()
    narrow = model_of("gpt2", tied=False, dtype=torch.bfloat16)
    assert "keep a small mean" in plan_of(narrow, "rms").remarks[-1]
    assert "keep a small mean" not in "".join(plan_of(narrow, "rms", dtype="float32").remarks)


@pytest.mark.parametrize(
    ("recipe", "runtimes"),
    [("gemma", "vLLM and llama.cpp"), ("cohere", "vLLM and llama.cpp"), ("gemma3", "vLLM"), ("gpt2", "")],
)
def test_runtimes_that_ignore_an_untied_head_are_named(recipe, runtimes):
    model = model_of(recipe, tied=True)
    remarks = plan_of(model, untie=True).remarks
    assert plan_of(model).remarks == ()
    assert bool(remarks) == bool(runtimes)
    assert all(f" of a {model.config.model_type} model is not read by {runtimes}: " in remark for remark in remarks)


def test_code_is_left_behind_and_named():
    with open_checkpoint(demo.directory("rmsnorm")) as opened:
        assert make_plan(opened).dropped == ()
        config = opened.config | {"auto_map": {"AutoModel": "x.Y"}}
        states = dict.fromkeys(["x.py", *"abcd", "e.py", "f.py", "g.so"])
        plan = make_plan(dataclasses.replace(opened, config=config, states=states))
    assert plan.dropped == ("auto_map",)
    assert plan.remarks == (
        "code is not carried over (auto_map of config.json; e.py, f.py, g.so, ...): what is folded is the stock class "
        "LlamaForCausalLM",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ("fold",)}, "operations are gain, bias, centre, rms, final, value, .*, got 'fold'"),
        ({"operations": ()}, "expected at least one operation"),
        ({"dtype": "float16"}, "dtype must be 'same' or 'float32', got 'float16'"),
    ],
)
def test_a_choice_that_does_not_exist_is_one_line(options, message):
    with pytest.raises(InputError, match=message):
        make_plan(open_model(model_of("llama")), **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gain_that_is_no_number_is_refused_by_name(value):
    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = value
    with pytest.raises(ModelError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        plan_of(model)


def test_quantized_readers_are_refused_by_name():
    model = model_of("llama")
    opened = open_model(model)
    info = opened.source.tensors["model.layers.0.self_attn.q_proj.weight"]
    opened.source.tensors["model.layers.0.self_attn.q_proj.weight"] = type(info)("I8", info.shape)
    with pytest.raises(ModelError, match=r"q_proj\.weight, got I8: quantized weights cannot be folded"):
        make_plan(opened)


def test_a_plan_is_json_and_the_same_for_the_same_model():
    first, second = (plan_of(model_of("gpt2"), *ALL).to_json() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert {edit["relation"] for edit in first["edits"]} == {"identical", "product", "sum", "constant"}


def test_the_class_in_the_configuration_decides_what_is_returned():
    model = model_of("llama").model
    assert open_model(model).config["architectures"] == ["LlamaModel"]
    plan = plan_of(model)
    assert plan.refusals[0].reason == "its output is what LlamaModel returns"


def moved(model, place, *operations, untie=False):
    context, builder = context_on(model, *operations, untie=untie)
    norm = next(norm for norm in context.graph.norms if norm.name == place)
    return move_affine(context, builder, norm), builder, norm


def test_gain_and_bias_enter_every_reader():
    change, builder, norm = moved(model_of("gpt_neox"), "gpt_neox.layers.0.input_layernorm", "gain", "bias")
    assert (change.gain, change.bias, change.kept, change.reasons) == ("folded", "folded", (), ())
    assert change.readers == ("gpt_neox.layers.0.attention.query_key_value",)
    edits, reader = edits_of(builder), "gpt_neox.layers.0.attention.query_key_value"
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
    change, builder, _ = moved(model, place, "gain")
    assert (change.gain, change.bias, change.kept) == ("folded", "divided", tuple(zeros))
    gain = Gain(weight=f"{place}.weight", kept=tuple(zeros))
    assert edits_of(builder)[f"{place}.bias"].value == Quotient(gain=gain)
    assert edits_of(builder)[f"{place}.weight"].value == Constant(value=1.0, kept=tuple(zeros))


def test_a_zero_gain_without_a_bias_is_not_kept_and_a_gain_of_ones_is_no_edit():
    model = model_of("gpt_neox")
    place = "gpt_neox.layers.0.input_layernorm"
    norm = model.get_submodule(place)
    with torch.no_grad():
        norm.bias[norm.weight == 0] = 0.0
    assert moved(model, place, "gain")[0].kept == ()
    model = model_of("llama")
    with torch.no_grad():
        model.get_submodule("model.layers.0.input_layernorm").weight.fill_(1.0)
    change, builder, _ = moved(model, "model.layers.0.input_layernorm", "gain")
    assert (change.gain, change.readers) == ("identity", ())
    assert {edit.relation for edit in edits_of(builder).values()} == {"identical"}


def test_a_bias_that_no_reader_can_take_stays_and_the_change_says_which():
    change, builder, norm = moved(model_of("gpt2", tied=False), "transformer.ln_f", "final")
    assert (change.gain, change.bias, len(change.kept)) == ("folded", "divided", 1)
    assert change.reasons == ("its bias stays in the norm, divided by the gain, as lm_head has none",)
    assert isinstance(edits_of(builder)[str(norm.bias)].value, Quotient)


def test_a_bias_alone_leaves_the_gain():
    change, builder, norm = moved(model_of("gpt2"), "transformer.h.0.ln_2", "bias")
    assert (change.gain, change.bias) == ("left", "folded")
    edits = edits_of(builder)
    assert edits["transformer.h.0.mlp.c_fc.weight"].relation == "identical"
    assert edits[str(norm.weight)].relation == "identical"
    product = Product(matrix="transformer.h.0.mlp.c_fc.weight", in_axis=0, vector=Reference(name=str(norm.bias)))
    assert edits["transformer.h.0.mlp.c_fc.bias"].value == Sum(terms=(product,))


def test_a_tied_head_and_a_norm_added_to_the_residual_are_refused_with_the_reason():
    change, builder, _ = moved(model_of("llama", tied=True), "model.norm", "final")
    assert change.gain == "left"
    assert [refusal.operation for refusal in builder.refusals] == ["final"]
    assert "lm_head shares the table model.embed_tokens.weight; --untie" in builder.refusals[0].reason
    change, builder, _ = moved(model_of("gemma2"), "model.layers.0.post_attention_layernorm", "gain")
    assert change.gain == "left"
    assert "its output is added to the residual" in builder.refusals[0].reason


def test_an_offset_gain_becomes_zero_and_acts_with_its_offset():
    change, builder, norm = moved(model_of("gemma2"), "model.layers.1.input_layernorm", "gain")
    assert (change.gain, change.bias) == ("folded", "none")
    edits = edits_of(builder)
    assert edits[str(norm.weight)].value == Constant(value=0.0)
    assert edits["model.layers.1.self_attn.q_proj.weight"].gain == Gain(weight=str(norm.weight), offset=1.0)


def test_every_writer_of_a_layernorm_model_is_centred_along_its_output():
    context, builder = context_on(model_of("gpt2", tied=False), "centre")
    centred = centre_writers(context, builder)
    assert set(centred) == {
        *("transformer.wte.weight", "transformer.wpe.weight"),
        *(f"transformer.h.{layer}.{part}.c_proj" for layer in (0, 1) for part in ("attn", "mlp")),
    }
    assert builder.refusals == ()
    edits = edits_of(builder)
    # Conv1D: (in, out).
    assert edits["transformer.h.0.mlp.c_proj.weight"].centred_axis == 1
    assert edits["transformer.wte.weight"].centred_axis == 1
    assert edits["transformer.h.0.mlp.c_proj.bias"].value.is_centred


def test_linear_maps_are_centred_along_their_first_axis_and_tied_tables_and_rmsnorm_models_are_not():
    context, builder = context_on(model_of("gpt_neox", tied=False), "centre")
    centre_writers(context, builder)
    assert edits_of(builder)["gpt_neox.layers.0.mlp.dense_4h_to_h.weight"].centred_axis == 0
    context, builder = context_on(model_of("gpt2", tied=True), "centre")
    assert len(centre_writers(context, builder)) == 5
    assert [(refusal.operation, refusal.place) for refusal in builder.refusals] == [
        ("centre", "transformer.wte.weight")
    ]
    context, builder = context_on(model_of("llama"), "centre")
    assert centre_writers(context, builder) == ()
    assert "is an RMSNorm, which sees the mean" in builder.refusals[0].reason
    assert {edit.relation for edit in edits_of(builder).values()} == {"identical"}


@pytest.mark.parametrize("eps", [1e-6, 10.0])
def test_a_layernorm_becomes_an_rmsnorm_with_its_own_eps(eps):
    context, builder = context_on(model_of("gpt_neox", tied=False, eps=eps), "rms")
    changes = tuple(move_affine(context, builder, norm) for norm in context.graph.norms)
    changed, swaps = become_rms(context, builder, changes)
    assert all(change.becomes_rms for change in changed)
    assert set(swaps) == {norm.name for norm in context.graph.norms}
    assert swaps["gpt_neox.final_layer_norm"] == NormSpec(centre_numerator=False, centre_statistics=False, eps=eps)


def test_norms_of_a_post_norm_model_stay_but_for_the_first():
    context, builder = context_on(model_of("bert", tied=False), "rms")
    centre_writers(context, builder)
    changes = tuple(move_affine(context, builder, norm) for norm in context.graph.norms)
    _, swaps = become_rms(context, builder, changes)
    assert list(swaps) == ["bert.embeddings.LayerNorm"]
    reasons = {refusal.place: refusal.reason for refusal in builder.refusals}
    assert "gain and bias give it a mean" in reasons["bert.encoder.layer.1.output.LayerNorm"]


def test_an_olmo_becomes_a_llama_with_gains_of_one():
    context, builder = context_on(model_of("olmo", tied=False), "rms")
    written, dropped = change_family(context, builder, len(context.graph.norms))
    assert (written["model_type"], written["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert written["rms_norm_eps"] == pytest.approx(1e-5)
    assert "clip_qkv" in dropped
    created = [edit for edit in edits_of(builder).values() if edit.relation == "constant"]
    assert {edit.name for edit in created} == {f"{norm.name}.weight" for norm in context.graph.norms}
    assert {edit.value.value for edit in created} == {1.0}


def passed(model):
    context, builder = context_on(model, "value")
    for attention in context.graph.attentions:
        move_value_bias(context, builder, attention)
    return edits_of(builder), builder.refusals


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


def test_values_are_refused_by_name_and_without_a_bias_nothing_is_done():
    edits, refusals = passed(model_of("gpt_oss"))
    assert "sinks model.layers.0.self_attn.sinks take part of each row" in refusals[0].reason
    assert {edit.relation for edit in edits.values()} == {"identical"}
    _, refusals = passed(model_of("qwen2"))
    assert refusals[0].reason == "model.layers.0.self_attn.o_proj has no bias to take it"
    model = model_of("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.bias[-32:] = 0.0
    edits, refusals = passed(model)
    assert refusals == ()
    assert {edit.relation for edit in edits.values()} == {"identical"}
