"""`rotate`: other orthogonal coordinates for the residual stream and for values, and the same answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from folded_checkpoints import failed, flipped, folded, tensors, write_certificate
from folding_cases import BAR, FLAGS, SET_BY_HAND, TIES, difference, graph_of, results
from normkit.checkpoint import fold as fold_checkpoint
from normkit.checkpoint import verify
from normkit.checkpoint.hadamard import rotate_columns
from normkit.checkpoint.loading import load
from normkit.checkpoint.memory import fold
from normkit.checkpoint.model_folder import sha256
from normkit.checkpoint.opening import open_model
from normkit.checkpoint.orthogonal import asked_matrices
from normkit.checkpoint.report import describe_plan
from normkit.errors import InputError
from normkit.models.family import declared_family
from planned_models import model_of, plan_of
from tiny_models import RECIPES, gain_offset, norms, tiny

REFUSED = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "electra_wide", "deberta-v2"),
        "its output is added to the attention sum.0, where no gain can leave it",
    ),
    **dict.fromkeys(
        ("wav2vec2", "wav2vec2_stable", "hubert", "hubert_stable", "wavlm", "wavlm_stable", "albert", "bart", "mbart"),
        "it stays a LayerNorm, and the mean that it takes out does not turn with its input",
    ),
    **dict.fromkeys(
        ("dinov2", "dinov2_gated", "beit"),
        "it stays a LayerNorm, and the mean that it takes out does not turn with its input",
    ),
    "paligemma_2": "its output is added to the residual, where no gain can leave it",
    "olmo3": "its output is added to the residual, where no gain can leave it",
    "electra": "it stays a LayerNorm, and the mean that it takes out does not turn with its input",
    "clip_text": "no gain commutes with a rotation: its output is what CLIPTextModelWithProjection returns",
    "clip_vision": "its output is added to the residual, where no gain can leave it",
    "siglip_text": "no gain commutes with a rotation: its output is what SiglipTextModel returns",
    "siglip_vision": "its output goes to the pooling head, whose fused map reads the probe too",
    "siglip_vision_no_head": "no gain commutes with a rotation: its output is what SiglipVisionModel returns",
    "gemma3_vision": "its output is added to the residual, where no gain can leave it",
    "bloom": "its output is added to the residual, where no gain can leave it",
    "gemma2": "its output is added to the residual, where no gain can leave it",
    "gemma3": "its output is added to the residual, where no gain can leave it",
    "glm4": "its output is added to the residual, where no gain can leave it",
    "modernbert": "its output is added to the residual, where no gain can leave it",
    "modernbert_bias": "its output is added to the residual, where no gain can leave it",
    "olmo2": "its output is added to the residual, where no gain can leave it",
    "opt_post_norm": "it stays a LayerNorm, and the mean that it takes out does not turn with its input",
    "whisper": "it stays a LayerNorm, and the mean that it takes out does not turn with its input",
}
"""Families of which the stream cannot be rotated, and why; the values of their heads can."""


def without_zero_gains(family: str, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny model; a gain of zero beside a bias cannot leave a norm whose reader has no bias."""
    model, inputs = tiny(family, **options)
    with torch.no_grad():
        for norm in norms(model).values():
            if getattr(norm, "weight", None) is not None:
                norm.weight += 0.1 * (norm.weight == -gain_offset(norm))
    return model, inputs


def turned(family: str, **options: Any) -> tuple[float, list[str]]:
    """The largest difference after a fold in memory, and why the stream was not rotated."""
    model, inputs = without_zero_gains(family, **options)
    before = results(model, inputs)
    paths = {attention.name for attention in graph_of(model).attentions}
    plan = plan_of(model, "rotate", untie=True, seed=3)
    if any(edit.rotations for edit in plan.edits):
        fold(model, operations=["rotate"], untie=True, seed=3)
    left = [refusal for refusal in plan.refusals if refusal.operation == "rotate" and refusal.place not in paths]
    return difference(before, results(model, inputs)), [refusal.reason for refusal in left]


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("family", "tied"), TIES)
def test_rotated_a_model_computes_the_same(family, tied):
    error, reasons = turned(family, tied=tied, eps=None if family in SET_BY_HAND else 1e-2)
    assert error <= BAR
    if tied and family in ("t5", "t5_relu"):
        assert "that would part them also" in reasons[0]
    elif family in REFUSED:
        assert REFUSED[family] in reasons[0]
    else:
        assert reasons == []


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("family", "flags"), FLAGS)
def test_so_it_does_with_other_tensors(family, flags):
    assert turned(family, **flags)[0] <= BAR


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "olmo", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_on_disk_it_is_proved_and_a_bit_or_another_seed_is_named(family, dtype, tmp_path):
    pair = folded(tmp_path, family, dtype, operations=["rotate"], untie=True, seed=7)
    assert failed(verify(pair.source, pair.result, threads=2)) == {}
    document = pair.certificate
    assert document["asked"]["options"] == {"seed": 7}
    head = document["tensors"]["lm_head.weight"]
    size = document["plan"]["norms"] and head["rotations"][0]["size"]
    assert head["rotations"] == [
        {
            "axis": 1,
            "size": size,
            "seed": "7/stream",
            "construction": f"sylvester {size}",
            "rows": None,
            "matrix": None,
        }
    ]
    place = tensors(pair.result)["lm_head.weight"]
    with flipped(place.file, place.start):
        assert failed(verify(pair.source, pair.result))["sum"].startswith("lm_head.weight[0, 0] is ")
    document["asked"]["options"]["seed"] = 8
    write_certificate(pair.result, document)
    assert {"plan", "sum"} <= failed(verify(pair.source, pair.result)).keys()


@pytest.mark.slow
def test_a_rotation_is_the_hadamard_matrix_with_its_signs_and_bits_do_not_depend_on_memory_or_disk(tmp_path):
    model, _ = without_zero_gains("llama", tied=False)
    model.save_pretrained(tmp_path / "source")
    fold_checkpoint(tmp_path / "source", tmp_path / "folded", operations=["rotate"], seed=1)
    table, query = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
    before = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    fold(model, operations=["rotate"], seed=1)
    loaded = load(tmp_path / "folded").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    turn = rotate_columns(np.eye(before[table].shape[1]), "1/stream")
    assert np.abs(loaded[table].numpy() - before[table] @ turn.T).max() < 1e-14
    gain = before["model.layers.0.input_layernorm.weight"]
    assert np.abs(loaded[query].numpy() - before[query] * gain @ turn.T).max() < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["gain", "rotate", "scale"])
def test_blocks_that_layers_share_are_stored_for_each_of_them_once_a_head_has_its_own_table(operation, tmp_path):
    operations = [operation, "final"] if operation == "gain" else [operation]
    options = {"halvings": 1} if operation == "scale" else {}
    pair = folded(tmp_path, "zamba2_adapters", torch.float64, operations=operations, untie=True, **options)
    assert failed(verify(pair.source, pair.result)) == {}
    made, before = tensors(pair.result), tensors(pair.source)
    own = {name for name in made.keys() - before.keys() if ".shared_transformer." in name}
    stored = sum(name.startswith("model.layers.1.shared_transformer.") for name in before)
    assert len(own) == stored > 8
    inputs = {"input_ids": torch.arange(16).view(2, 8) % 28}
    assert difference(results(load(pair.source), inputs), results(load(pair.result), inputs)) <= BAR


@pytest.mark.parametrize(("family", "rotates"), [("llama", True), ("gemma3", False)])
def test_what_is_rotated_is_said_and_a_head_gets_a_table_only_for_it(family, rotates):
    model, _ = without_zero_gains(family, tied=True)
    plan = plan_of(model, "rotate", untie=True)
    tables = [edit.name for edit in plan.edits if edit.source == "model.embed_tokens.weight"]
    assert (plan.untie, "tie_word_embeddings" in plan.config, len(tables)) == (rotates, rotates, 1 + rotates)
    described = describe_plan(plan, open_model(model).source.tensors)
    said = " ".join([*plan.remarks, *(refusal.reason for refusal in plan.refusals), described.gist])
    assert ("hidden states are in other orthogonal coordinates" in said) is rotates
    layers = len(plan.rotated_values)
    assert (f"residual stream not rotated, values of {layers} attentions rotated" in described.gist) is not rotates
    assert ("because of it the residual stream is not rotated: its gain stays" in said) is not rotates
    note = f"the residual stream is not rotated, hidden states are those of before; only the values of {layers} att"
    assert (note in said) is not rotates
    assert ("the head still shares its table with the embeddings" in said) is not rotates
    # A file without matrices rotates nothing.
    nothing = plan_of(model, "rotate", untie=True, matrix=asked_matrices({}))
    assert nothing.rotated_values == nothing.rotated_sums == ()
    assert "the residual stream is not rotated, hidden states are those of before" in nothing.remarks


def drawn(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Orthogonal matrices for the stream, and for the values of the first attention."""
    generator, graph, state = torch.Generator().manual_seed(seed), graph_of(model), model.state_dict()
    sizes = {"R1": graph.width}
    for attention in graph.attentions[:1]:
        size = state[attention.output.weight].shape[attention.output.in_axis] // attention.heads
        sizes[f"{attention.name}.R2"] = size
    return {
        name: torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0].contiguous()
        for name, size in sizes.items()
    }


@pytest.mark.slow
def test_maps_of_low_rank_beside_the_values_turn_with_them(monkeypatch):
    assert turned("zamba2_adapters", tied=True)[0] <= BAR
    entries = declared_family("zamba2").parts[-1].linear
    declared = dataclasses.replace(entries["1"], beside="")
    monkeypatch.setitem(entries, "1", declared)
    assert turned("zamba2_adapters", tied=True)[0] > 1e-3


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", RECIPES)
def test_any_orthogonal_matrices_leave_what_a_model_computes(family):
    model, inputs = without_zero_gains(family, tied=False if False in RECIPES[family].ties else None)
    before = results(model, inputs)
    plan = fold(model, operations=["rotate"], untie=True, matrix=drawn(model)).plan
    assert difference(before, results(model, inputs)) <= BAR
    turned = {edit.name: edit.rotations for edit in plan.edits if edit.rotations}
    assert turned
    assert all(rotation.matrix is not None for rotations in turned.values() for rotation in rotations)
    assert any(refusal.operation == "rotate" for refusal in plan.refusals) == (family in REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_with_a_file_of_matrices_it_is_proved_and_a_bit_or_another_matrix_is_named(dtype, tmp_path):
    model = tiny("llama")[0]
    file, other = tmp_path / "r.safetensors", tmp_path / "other.safetensors"
    save_file(drawn(model), file)
    save_file(drawn(model, seed=1), other)
    pair = folded(tmp_path, "llama", dtype, operations=["rotate"], matrix=file)
    assert failed(verify(pair.source, pair.result, matrix=file, threads=2)) == {}
    document, head = pair.certificate, "lm_head.weight"
    assert document["asked"]["options"] == {"matrix": sha256(file)}
    with flipped(tensors(pair.result)[head].file, tensors(pair.result)[head].start):
        assert failed(verify(pair.source, pair.result, matrix=file))["sum"].startswith(f"{head}[0, 0] is ")
    assert {"plan", "sum"} <= failed(verify(pair.source, pair.result, matrix=other)).keys()
    with pytest.raises(InputError, match=r"was folded with a file .*; give it with --matrix"):
        verify(pair.source, pair.result)
    with pytest.raises(InputError, match="was folded without --scales; leave it out"):
        verify(pair.source, pair.result, matrix=file, scales=file)
    # A row x becomes x R: as SpinQuant stores its matrices.
    table, turn = "model.embed_tokens.weight", drawn(model)["R1"]
    before, after = (load(folder, dtype="float64").state_dict()[table] for folder in (pair.source, pair.result))
    assert (after - before @ turn).abs().max() <= (1e-14 if dtype is torch.float64 else 2.0**-8)


def test_gains_leave_for_the_stream_alone(tmp_path):
    """What a stream that does not turn would leave is told once, and no gain moves for it."""
    model, inputs = without_zero_gains("gemma3")
    before = results(model, inputs)
    plan = fold(model, operations=["rotate"], seed=1, untie=True).plan
    assert plan.operations == ("rotate",)
    assert plan.num_folded == 0
    assert REFUSED["gemma3"] in next(iter(plan.refusals)).reason
    assert {edit.relation for edit in plan.edits} == {"identical", "sum"}
    assert difference(before, results(model, inputs)) <= BAR
    asked = plan_of(model_of("gemma3"), "rotate", "gain")
    assert asked.operations == ("gain", "rotate")
    assert asked.num_folded
    pair = folded(tmp_path, "gemma3", operations=["rotate"])
    assert failed(verify(pair.source, pair.result)) == {}


def test_wrong_seeds_rivals_and_widths_are_one_line():
    model = model_of("llama")
    for options in ({"seed": -1}, {"seed": 2**63}):
        with pytest.raises(InputError, match="rotate takes a seed of 0 to"):
            plan_of(model, "rotate", **options)
    with pytest.raises(InputError, match="got 3 with gain"):
        plan_of(model, "gain", seed=3)
    with pytest.raises(InputError, match="exponent leaves the mantissas that gain"):
        plan_of(model, "rotate", "exponent")
    odd = model_of("llama", hidden_size=24, num_attention_heads=4, head_dim=6, num_key_value_heads=2)
    found = plan_of(odd, "rotate").refusals
    assert [refusal.reason for refusal in found if refusal.operation == "rotate"] == [
        *["its heads have 6 values, for which no Hadamard matrix is known here"] * 2
    ]
    wide = model_of("llama", hidden_size=54, num_attention_heads=6, head_dim=8, num_key_value_heads=2)
    (refusal,) = plan_of(wide, "rotate").refusals
    assert refusal.reason == "its width is 54, for which no Hadamard matrix is known here"


def test_a_rotation_in_memory_is_not_undone():
    model, _ = without_zero_gains("llama")
    folding = fold(model, operations=["rotate"])
    with pytest.raises(InputError, match="load the model again"):
        fold(model, inverse=folding)
