"""Every family that has a file: what is folded computes the same, and what may not be folded is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from folding_cases import (
    BAR,
    FLAGS,
    SET_BY_HAND,
    TIES,
    classes,
    config_of,
    difference,
    graph_of,
    plan_of,
    reasons,
    results,
    split,
)
from normkit.checkpoint.folding import fold as fold_checkpoint
from normkit.checkpoint.loading import load
from normkit.checkpoint.memory import fold
from normkit.checkpoint.opening import open_checkpoint
from normkit.checkpoint.plan import ALL, FoldPlan
from normkit.checkpoint.planning import make_plan
from normkit.checkpoint.reader import ModelSource
from normkit.errors import InputError, ModelError
from normkit.models.expansion import expand
from normkit.models.family import declared_family, declared_types
from normkit.models.graph import Graph
from tiny_models import RECIPES, configuration, tiny

pytestmark = pytest.mark.slow

SOME = ["gpt2", "llama", "qwen3", "gemma2", "olmo", "gpt_neox", "mixtral", "bert"]
"""Families that differ in all that a file declares."""

SIZES = [(False, 1e-6), (False, 10.0), (True, 1e-2), (True, 10.0)]
"""Whether matrices are square, and the eps of every norm."""

OTHERS = [(family, tied) for family, tied in TIES if tied is not False]
OTHERS += [(family, tied) for family, tied in TIES if tied is False and family not in SOME][::2]
"""On disk: every family with its head shared, and every other one that is not among those with a head of its own."""

PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""The ways of transformers that know caps on scores, sinks, and experts in float64."""


def changed_by_folding(family: str, operations: tuple[str, ...] = ALL, **options: Any) -> tuple[float, FoldPlan]:
    """Fold a tiny model in memory; the largest difference of what it returns, and what was done."""
    model, inputs = tiny(family, **options)
    before = results(model, inputs)
    if family in SET_BY_HAND and options.get("eps") is not None:
        # An RMSNorm in the place of theirs takes the eps that a file of theirs means.
        operations = tuple(operation for operation in operations if operation != "rms")
    plan = fold(model, operations=operations, untie=bool(options.get("tied"))).plan
    return difference(before, results(model, inputs)), plan


def fold_what_can_be(model: Any, **choices: Any) -> None:
    """Fold a model in memory, or leave it where all is refused."""
    try:
        fold(model, **choices)
    except InputError as error:
        if "nothing of what was asked can be done" not in str(error):
            raise


def test_every_declared_family_has_a_recipe_here():
    assert {configuration(recipe).model_type for recipe in RECIPES.values()} == set(declared_types())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("family", "tied"), TIES)
def test_all_that_is_legal_leaves_the_scores(family, tied):
    error, plan = changed_by_folding(family, tied=tied, eps=1e-2)
    assert error <= BAR
    for norm in plan.norms:
        # With everything asked for, what is left has a reason.
        assert norm.reasons or norm.gain in ("folded", "none")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("place", range(len(SIZES)))
@pytest.mark.parametrize("family", RECIPES)
def test_it_does_so_for_each_eps_and_for_square_matrices(family, place):
    """Each family with each of them, its head shared in every other one; the next family's in those between."""
    square, eps = SIZES[place]
    ties = [tied for name, tied in TIES if name == family]
    tied = ties[(place + [*RECIPES].index(family)) % len(ties)]
    assert changed_by_folding(family, tied=tied, square=square, eps=eps)[0] <= BAR


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("family", "flags"), FLAGS)
def test_flags_that_change_a_graph_are_followed(family, flags):
    assert changed_by_folding(family, **flags)[0] <= BAR


@pytest.mark.sampled(5)
@pytest.mark.parametrize("operation", [*ALL, "exponent"])
@pytest.mark.parametrize("family", RECIPES)
def test_each_operation_alone_leaves_the_scores(family, operation):
    model, inputs = tiny(family)
    before = results(model, inputs)
    fold_what_can_be(model, operations=[operation])
    assert difference(before, results(model, inputs)) <= BAR


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", [family for family, tied in TIES if tied])
def test_a_tie_that_is_not_to_be_undone_stays(family):
    model, inputs = tiny(family, tied=True)
    before = results(model, inputs)
    fold_what_can_be(model, operations=ALL)
    assert graph_of(model).is_tied
    assert difference(before, results(model, inputs)) <= BAR


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", RECIPES)
def test_each_class_of_a_family_returns_the_same(family):
    for name in classes(family):
        model, inputs = tiny(family, class_name=name)
        if name.endswith("MultipleChoice"):
            inputs = {key: value.unsqueeze(1) for key, value in inputs.items()}
        before = results(model, inputs)
        fold_what_can_be(model)
        assert difference(before, results(model, inputs)) <= BAR, name


# The same on disk


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch):
    """What a loss of power would leave is asked elsewhere; here it would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def folded_on_disk(family: str, tied: bool | None, square: bool, folder: Path, **layout: Any) -> None:
    """Non-square ones from a file for each tensor, square ones from a single file."""
    eps = None if family in SET_BY_HAND else 10.0 if square else 1e-6
    model, inputs = tiny(family, tied=tied, square=square, eps=eps)
    model.save_pretrained(folder / "source", **layout)
    if not square:
        split(folder / "source")
    fold_checkpoint(folder / "source", folder / "folded", operations=ALL, untie=bool(tied))
    if "normkit" in json.loads((folder / "folded" / "config.json").read_text()):
        # Both in the attention of transformers' own choice: with alibi, Falcon's two ways differ by 0.65.
        before, after = stock(folder / "source"), load(folder / "folded").eval()
    else:
        before, after = (stock(folder / name, **PLAIN) for name in ("source", "folded"))
    assert difference(results(before, inputs), results(after, inputs)) <= BAR

    fold(model, operations=ALL, untie=bool(tied))
    streamed = after.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(streamed[name].view(torch.int64), tensor.view(torch.int64)), name

    with open_checkpoint(folder / "folded") as again:
        plan = make_plan(again, operations=["gain", "bias", "final", "value"])
    assert {edit.relation for edit in plan.edits} == {"identical"}


def stock(folder: Path, **choices: str) -> Any:
    """A checkpoint in the class that its configuration names, which finds all it needs and nothing else."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    class_ = getattr(transformers, name)
    model, told = class_.from_pretrained(folder, dtype="auto", output_loading_info=True, **choices)
    assert not any(told.values()), told
    return model.eval()


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("family", SOME)
def test_a_checkpoint_in_pieces_folds_loads_and_has_the_bits_of_the_fold_in_memory(family, tmp_path):
    folded_on_disk(family, tied=False, square=False, folder=tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize(("family", "tied"), OTHERS)
def test_so_does_every_family(family, tied, tmp_path):
    folded_on_disk(family, tied, square=False, folder=tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SOME)
def test_so_does_one_file_of_square_matrices(family, tied, tmp_path):
    folded_on_disk(family, tied, square=True, folder=tmp_path)


@pytest.mark.parametrize("untie", [False, True])
def test_a_head_that_is_written_beside_the_table_it_shares_is_no_second_reader(untie, tmp_path):
    model, inputs = tiny("llama", tied=True)
    model.save_pretrained(tmp_path / "source")
    (file,) = (tmp_path / "source").glob("*.safetensors")
    tensors = load_file(file)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, metadata={"format": "pt"}
    )
    fold_checkpoint(tmp_path / "source", tmp_path / "folded", untie=untie)
    folded = stock(tmp_path / "folded", **PLAIN)
    assert folded.config.tie_word_embeddings is not untie
    assert difference(results(model, inputs), results(folded, inputs)) <= BAR


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_experts_that_lie_in_one_tensor_on_disk_are_folded_too(family, tmp_path):
    folded_on_disk(family, tied=False, square=False, folder=tmp_path, save_original_format=False)
    with open_checkpoint(tmp_path / "folded") as opened:
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in opened.source.tensors)


# What is refused, by name

POST_NORM = "its output is added to the residual, where no gain can leave it and no linear map alone takes it"
RMS = "model.layers.0.input_layernorm is an RMSNorm, which sees the mean that centring would remove"
SINKS = "the sinks model.layers.0.self_attn.sinks take part of each row, so that its weights do not sum to one"
UNTYING = "--untie gives the head a table of its own"
SCALE = "the key of a T5 that would part them also says whether the decoder's output is scaled"
BLOOM_NORM = "transformer.word_embeddings_layernorm"
PLACE = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("family", "tied", "operation", "place", "reason"),
    [
        ("gpt_oss", False, "value", PLACE, SINKS),
        ("qwen2", False, "value", PLACE, f"{PLACE}.o_proj has no bias to take it"),
        ("gemma2", False, "gain", "model.layers.0.post_attention_layernorm", POST_NORM),
        ("gemma3", False, "gain", "model.layers.1.post_feedforward_layernorm", POST_NORM),
        ("glm4", False, "gain", "model.layers.0.post_self_attn_layernorm", POST_NORM),
        ("olmo2", False, "gain", "model.layers.0.post_attention_layernorm", POST_NORM),
        ("qwen3", False, "gain", f"{PLACE}.q_norm", "its output goes to the scores, behind rotary positions"),
        ("llama", False, "centre", "residual", RMS),
        ("llama", False, "rms", "LlamaForCausalLM", "its norms are RMSNorms"),
        (
            "llama",
            True,
            "final",
            "model.norm",
            f"its reader lm_head shares the table model.embed_tokens.weight; {UNTYING}",
        ),
        (
            "gpt2",
            True,
            "centre",
            "transformer.wte.weight",
            f"lm_head shares the table transformer.wte.weight; {UNTYING}",
        ),
        (
            "t5",
            True,
            "final",
            "decoder.final_layer_norm",
            f"its reader lm_head shares the table shared.weight; {SCALE}",
        ),
        (
            *("bert", False, "gain", "bert.embeddings.LayerNorm"),
            "its output is added to the attention sum.0, where no gain can leave it and no linear map alone takes it",
        ),
        (
            *("bloom", False, "rms", "transformer.h.0.input_layernorm"),
            f"the output of {BLOOM_NORM} is added to the residual, and its gain and bias give it a mean",
        ),
    ],
)
def test_what_may_not_be_folded_is_named_with_the_reason(family, tied, operation, place, reason):
    model, _ = tiny(family, tied=tied)
    assert reasons(plan_of(model, operations=ALL), operation)[place] == reason


def test_what_is_read_without_a_norm_a_t5_and_a_class_without_a_head_stay():
    graph = graph_of(tiny("olmo2")[0])
    layers = dataclasses.replace(graph, norms=tuple(dataclasses.replace(norm, kind="layer") for norm in graph.norms))
    expected = f"{PLACE}.q_proj reads the residual without a norm, and sees the mean"
    assert layers.against_centring("residual") == expected
    model, _ = tiny("t5", tied=True)
    assert reasons(plan_of(model, untie=True), "final")["T5ForConditionalGeneration"] == SCALE
    model, _ = tiny("llama", class_name="LlamaModel")
    assert reasons(plan_of(model), "gain") == {"norm": "its output is what LlamaModel returns"}


@pytest.mark.parametrize(
    ("family", "operation", "condition"),
    [
        ("gpt_oss", "value", "against_value_fold"),
        ("llama", "centre", "against_centring"),
        ("gemma2", "gain", "against_folding"),
        ("qwen3", "gain", "against_folding"),
        ("bloom", "rms", "against_rms"),
        ("qwen3_vl", "centre", "against_centring"),
        ("jamba", "gain", "against_folding"),
        ("wavlm_stable", "gain", "against_folding"),
        ("llava", "centre", "against_centring"),
    ],
)
def test_what_is_refused_would_change_the_scores(family, operation, condition, monkeypatch):
    monkeypatch.setattr(Graph, condition, lambda *_, **__: None)
    assert changed_by_folding(family, (operation,))[0] > 1e-3


def test_a_cap_sinks_and_rotary_positions_each_keep_the_bias_of_the_keys():
    graph = graph_of(tiny("whisper")[0])
    (attention, *_) = (attention for attention in graph.attentions if attention.key and not attention.key.bias)
    for change, expected in [
        ({}, True),
        ({"softcap": True}, False),
        ({"sinks": "s"}, False),
        ({"rotary": True}, False),
    ]:
        changed = dataclasses.replace(graph, attentions=(dataclasses.replace(attention, **change),))
        assert changed.ignores_key_bias(attention.key) is expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", RECIPES)
def test_dropout_is_told_and_refused_for_training(family):
    model, _ = tiny(family)
    declared = declared_family(model.config.model_type).config.dropout
    # Dropout before a classifier's own map lies behind all that is folded.
    rates = {key for key in config_of(model) if "drop" in key} - {
        *("classifier_dropout", "classifier_dropout_prob", "summary_first_dropout")
    }
    assert rates <= set(declared)
    for key in declared:
        model, _ = tiny(family, **{key: 0.1})
        (remark, *_) = plan_of(model).remarks
        assert "equal in evaluation mode" in remark
        assert f"{key} = 0.1" in remark
        with pytest.raises(InputError, match=f"{key} = 0.1"):
            plan_of(model, for_training=True)


# What a file must declare


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", RECIPES)
def test_a_tensor_too_few_or_too_many_is_an_error(family):
    model, _ = tiny(family)
    declared, config = declared_family(model.config.model_type), config_of(model)
    shapes = {name: info.shape for name, info in ModelSource(model).tensors.items()}
    for name in shapes:
        with pytest.raises(ModelError):
            expand(declared, config, {other: shape for other, shape in shapes.items() if other != name})
    with pytest.raises(ModelError, match=r"only tensors that .* declares, found extra\.weight"):
        expand(declared, config, shapes | {"extra.weight": (4, 4)})
    old = {pattern.replace("*", "model.layers.0"): (4,) for pattern in declared.buffers}
    assert expand(declared, config, shapes | old) == expand(declared, config, shapes)


def test_deepseeks_router_is_what_rounds_to_float32_outside_true_float64():
    model, inputs = tiny("deepseek_v3")
    twin, _ = tiny("deepseek_v3")
    fold(twin)
    assert difference(results(model, inputs), results(twin, inputs)) <= BAR
    for each in (model, twin):
        for path, module in each.named_modules():
            if path.endswith("mlp.gate"):
                module.forward = outside(module.forward)
    assert 1e-10 < difference(results(model, inputs), results(twin, inputs)) < 1e-5


def outside(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that no mode of torch sees."""

    def called(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*args)

    return called
