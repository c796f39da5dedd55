"""What the tests of folding fold: models of every family, flags that change a graph, and how results are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from normkit.checkpoint.logits import TrueFloat64
from normkit.checkpoint.opening import open_model
from normkit.checkpoint.plan import FoldPlan
from normkit.checkpoint.planning import make_plan
from normkit.models.family import declared_family
from normkit.models.graph import Graph
from tiny_models import RECIPES, tiny

BAR = 1e-12
"""Largest difference of a logit in true float64. Logits reach 25, whose last place is 4e-15, and a fold rounds each
weight once: a few dozen such steps lie between. Measured is 6e-14 at most; what is wrong by one float32 rounding
shows 1e-7."""

TIES: list[tuple[str, bool | None]] = [
    (family, tied) for family, recipe in RECIPES.items() for tied in recipe.ties or (None,)
]
"""Every recipe, with its own head and with a shared one."""

SET_BY_HAND = ("opt", "opt_post_norm", "whisper")
"""Families whose eps stands in their code: another one is set on the modules, where no file keeps it."""

FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"attention_bias": True}),
    ("gemma", {"attention_bias": True}),
    ("gemma2", {"attention_bias": True}),
    ("gemma3", {"attention_bias": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    ("olmo2", {"attention_bias": True}),
    ("seed_oss", {"attention_bias": False}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("glm4", {"attention_bias": False}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    ("qwen3_moe", {"attention_bias": True, "decoder_sparse_step": 2}),
    ("gpt_oss", {"attention_bias": False}),
    ("deepseek_v3", {"attention_bias": True, "first_k_dense_replace": 0}),
    ("deepseek_v3", {"n_shared_experts": 2, "first_k_dense_replace": 3}),
    ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("bamba", {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
    ("falcon_h1", {"mamba_norm_before_gate": False, "projectors_bias": True, "attention_bias": True}),
    ("granitemoehybrid", {"num_local_experts": 0, "attention_bias": True}),
    ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    ("zamba2", {"add_bias_linear": True}),
    ("zamba2_adapters", {"num_mem_blocks": 2}),
    ("lfm2", {"conv_bias": True}),
    ("t5", {"num_decoder_layers": 3}),
    ("t5_relu", {"num_layers": 3, "num_decoder_layers": 1}),
    ("opt", {"enable_bias": False}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("opt", {"word_embed_proj_dim": 24}),
    ("opt_post_norm", {"word_embed_proj_dim": 32, "num_hidden_layers": 1}),
    ("gpt_neox", {"attention_bias": False}),
    ("falcon", {"bias": True}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"parallel_attn": False, "alibi": True}),
    ("falcon_two_norms", {"bias": True}),
    ("falcon_one_norm", {"bias": True}),
    ("phi", {"num_key_value_heads": 4}),
    ("stablelm", {"qk_layernorm": True}),
    ("starcoder2", {"use_bias": False}),
    ("cohere", {"attention_bias": True}),
    ("olmo", {"attention_bias": True}),
    ("olmo", {"attention_bias": True, "clip_qkv": 0.5}),
    ("paligemma", {"vision_config.vision_use_head": True}),
    ("llava", {"vision_feature_layer": -1, "multimodal_projector_bias": False}),
    ("llava_onevision", {"vision_config.vision_use_head": True}),
    ("hubert", {"feat_proj_layer_norm": False}),
    ("hubert_stable", {"feat_proj_layer_norm": False}),
    ("deberta-v2", {"position_biased_input": False, "type_vocab_size": 0}),
    ("albert", {"num_hidden_groups": 2, "inner_group_num": 2}),
    ("bart", {"encoder_layers": 3, "decoder_layers": 1, "decoder_attention_heads": 2, "scale_embedding": True}),
    ("mbart", {"encoder_layers": 3, "decoder_layers": 1, "decoder_attention_heads": 2, "scale_embedding": True}),
    ("dinov2", {"qkv_bias": False, "use_mask_token": False}),
    ("beit", {"use_mask_token": True}),
    ("beit", {"use_absolute_position_embeddings": True, "use_shared_relative_position_bias": True}),
    ("bert", {"is_decoder": True, "num_hidden_layers": 1}),
    ("vit", {"qkv_bias": False}),
    ("modernbert", {"decoder_bias": False, "classifier_bias": True}),
    ("whisper", {"encoder_layers": 3, "decoder_layers": 1, "decoder_attention_heads": 2}),
]
"""Settings that give a family other tensors than its recipe."""


def results(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a class returns for its task, in true float64: scores, or the hidden states of a class without a head."""
    with torch.no_grad(), TrueFloat64():
        output = model(**inputs)
    scores = {name: output[name] for name in ("logits", "start_logits", "end_logits") if name in output}
    return scores or {name: value for name, value in output.items() if isinstance(value, Tensor)}


def difference(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The largest, over all that a class returns."""
    assert before.keys() == after.keys()
    assert before
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def graph_of(model: Any) -> Graph:
    """The graph of a model in memory."""
    return open_model(model).graph


def config_of(model: Any) -> dict[str, Any]:
    """Its config.json, as saving would write it."""
    return open_model(model).config


def plan_of(model: Any, **choices: Any) -> FoldPlan:
    """The plan of a fold of a model in memory, which stays as it is."""
    return make_plan(open_model(model), **choices)


def reasons(plan: FoldPlan, operation: str) -> dict[str, str]:
    """What was refused of one operation, by place."""
    return {refusal.place: refusal.reason for refusal in plan.refusals if refusal.operation == operation}


def classes(family: str) -> list[str]:
    """The classes that a family's file describes, but for the recipe's own."""
    model, _ = tiny(family)
    return [name for name in declared_family(model.config.model_type).classes if name != type(model).__name__]


def split(folder: Path) -> None:
    """Give each tensor of a checkpoint a file of its own, so that a boundary lies between any two.

    transformers itself keeps together what is one tensor in memory, as the experts.
    """
    (whole,) = folder.glob("*.safetensors")
    tensors = load_file(whole)
    whole.unlink()
    names = {name: f"model-{index:05}-of-{len(tensors):05}.safetensors" for index, name in enumerate(tensors, 1)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
