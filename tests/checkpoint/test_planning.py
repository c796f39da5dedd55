"""The whole plan: what is asked, in which order it is answered, and what config.json says afterwards."""

from __future__ import annotations

import json

import pytest
import torch

from normkit.checkpoint.opening import open_model
from normkit.checkpoint.planning import DEFAULT, ROUNDING, make_plan
from normkit.errors import InputError, ModelError
from planned_models import ALL, edits_of, model_of, plan_of


def test_the_default_folds_gains_and_biases_and_centres_nothing():
    plan = plan_of(model_of("gpt_neox", tied=False))
    assert plan.operations == DEFAULT
    assert {norm.gain for norm in plan.norms} == {"folded"}
    assert (plan.centred, plan.swaps, plan.config) == ((), {}, {})


def test_a_plan_has_one_edit_for_each_tensor_in_the_order_of_the_source():
    model = model_of("gpt2", tied=True)
    plan = plan_of(model, *ALL, untie=True)
    names = list(open_model(model)[2].tensors)
    assert [edit.name for edit in plan.edits] == [*names, "lm_head.weight"]
    assert edits_of(plan)["lm_head.weight"].source == "transformer.wte.weight"
    assert edits_of(plan)["transformer.wte.weight"].gain is None


def test_untying_is_said_at_every_level_of_the_configuration():
    model = model_of("gpt2", tied=True)
    graph, config, source = open_model(model)
    config["text_config"] = {"tie_word_embeddings": True, "deeper": {"tie_word_embeddings": True}}
    plan = make_plan(graph, config, source, untie=True)
    levels = ("tie_word_embeddings", "text_config.tie_word_embeddings", "text_config.deeper.tie_word_embeddings")
    assert plan.config == dict.fromkeys(sorted(levels), False)


def test_untying_a_head_that_has_its_own_table_does_nothing():
    plan = plan_of(model_of("gpt2", tied=False), untie=True)
    assert (plan.untie, plan.config) == (False, {})


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
    graph, config, source = open_model(model_of("llama", dtype=torch.bfloat16))
    config = {key: value for key, value in config.items() if "dtype" not in key} | said
    assert make_plan(graph, config, source, dtype="float32").config == dict.fromkeys(keys, "float32")
    assert make_plan(graph, config, source).config == {}


def test_what_rounding_costs_is_said_where_products_are_rounded():
    narrow = model_of("llama", dtype=torch.bfloat16)
    assert plan_of(narrow).remarks == (ROUNDING,)
    assert plan_of(narrow, dtype="float32").remarks == plan_of(model_of("llama")).remarks == ()


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
    graph, config, source = open_model(model_of("llama"))
    assert make_plan(graph, config, source).dropped == ()
    plan = make_plan(graph, config | {"auto_map": {"AutoModel": "x.Y"}}, source, code=["x.py", *"abcd"])
    assert plan.dropped == ("auto_map",)
    assert plan.remarks == (
        "code is not carried over (auto_map of config.json; a, b, c, ...): what is folded is the stock class "
        "LlamaForCausalLM",
    )


def test_sixteen_bit_rmsnorms_are_warned_of():
    narrow = model_of("gpt2", tied=False, dtype=torch.bfloat16)
    assert "keep a small mean" in plan_of(narrow, "rms").remarks[-1]
    assert "keep a small mean" not in "".join(plan_of(narrow, "rms", dtype="float32").remarks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ("fold",)}, "operations are gain, bias, centre, rms, final, value, got 'fold'"),
        ({"operations": ()}, "expected at least one operation"),
        ({"dtype": "float16"}, "dtype must be 'same' or 'float32', got 'float16'"),
    ],
)
def test_a_choice_that_does_not_exist_is_one_line(options, message):
    graph, config, source = open_model(model_of("llama"))
    with pytest.raises(InputError, match=message):
        make_plan(graph, config, source, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gain_that_is_no_number_is_refused_by_name(value):
    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = value
    with pytest.raises(ModelError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        plan_of(model)


def test_quantised_readers_are_refused_by_name():
    model = model_of("llama")
    graph, config, source = open_model(model)
    info = source.tensors["model.layers.0.self_attn.q_proj.weight"]
    source.tensors["model.layers.0.self_attn.q_proj.weight"] = type(info)("I8", info.shape)
    with pytest.raises(ModelError, match=r"q_proj\.weight, got I8: quantised weights cannot be folded"):
        make_plan(graph, config, source)


def test_a_plan_is_json_and_the_same_for_the_same_model():
    first, second = (plan_of(model_of("gpt2"), *ALL).to_json() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert {edit["relation"] for edit in first["edits"]} == {"identical", "product", "sum", "constant"}


def test_the_class_in_the_configuration_decides_what_is_returned():
    model = model_of("llama").model
    config = open_model(model)[1]
    assert config["architectures"] == ["LlamaModel"]
    plan = plan_of(model)
    assert plan.refusals[0].reason == "its output is what LlamaModel returns"
