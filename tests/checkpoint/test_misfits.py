"""Layers that only the file or only the model has, heads without weights, and files in which both are healthy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerModel,
)

from normkit.checkpoint.loading import load_model
from normkit.checkpoint.misfits import ATTRIBUTE, Misfit

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = Misfit(path="lm_head", in_file=0, in_model=1, is_head=True)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).save_pretrained(tmp_path)
    return tmp_path


def misfits(folder: Path, **options: bool) -> tuple[Misfit, ...]:
    return getattr(load_model(str(folder), **options).model, ATTRIBUTE)


def layers(in_file: int, in_model: int, path: str = "model.layers") -> Misfit:
    return Misfit(path=path, in_file=in_file, in_model=in_model)


def rewrite(folder: Path, change: object) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", {"format": "pt"})


def without_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("offload", [False, True])
def test_a_file_with_more_or_fewer_layers_than_the_model(llama: Path, edit: object, offload: bool) -> None:
    assert misfits(llama, offload=offload) == ()
    edit(llama / "config.json", num_hidden_layers=1)
    assert misfits(llama, offload=offload) == (layers(3, 1),)
    edit(llama / "config.json", num_hidden_layers=5)
    assert misfits(llama, offload=offload) == (layers(3, 5),)


@pytest.mark.parametrize("offload", [False, True])
def test_a_head_that_is_not_tied_and_has_no_weights(llama: Path, edit: object, offload: bool) -> None:
    rewrite(llama, without_head)
    assert misfits(llama, offload=offload) == (HEAD,)
    edit(llama / "config.json", num_hidden_layers=2)
    assert misfits(llama, offload=offload) == (layers(3, 2, "layers"), HEAD)
    edit(llama / "config.json", num_hidden_layers=3, tie_word_embeddings=True)
    assert misfits(llama, offload=offload) == ()


def test_a_body_in_its_own_file_lacks_no_head(llama: Path, edit: object) -> None:
    rewrite(llama, lambda weights: {name.removeprefix("model."): weights[name] for name in without_head(weights)})
    loaded = load_model(str(llama))
    assert loaded.notes == ("the head of LlamaForCausalLM has no weights: LlamaModel is loaded without it",)
    assert getattr(loaded.model, ATTRIBUTE) == ()
    edit(llama / "config.json", num_hidden_layers=2)
    assert misfits(llama) == (layers(3, 2, "layers"),)


def test_left_over_weights_that_are_healthy(llama: Path) -> None:
    # Positions of old files, a layer that predicts further tokens, the head of another task.
    surplus = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    surplus |= {"model.layers.3.eh_proj.weight": torch.ones(16, 32), "score.weight": torch.ones(2, 16)}
    rewrite(llama, lambda weights: weights | surplus | {"model.layers.3.mlp.up_proj.weight": torch.ones(24, 16)})
    assert len(load_model(str(llama)).notes) == 1
    assert misfits(llama) == ()


def test_old_positions_do_not_hide_a_further_layer(llama: Path, edit: object) -> None:
    positions = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    rewrite(llama, lambda weights: weights | positions)
    edit(llama / "config.json", num_hidden_layers=2)
    assert misfits(llama) == (layers(3, 2),)


def test_layers_of_experts_are_counted(tmp_path: Path, edit: object) -> None:
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)).save_pretrained(tmp_path)
    assert misfits(tmp_path) == ()
    edit(tmp_path / "config.json", num_hidden_layers=2)
    assert misfits(tmp_path) == (layers(3, 2),)


def test_layers_with_running_statistics_are_counted(tmp_path: Path, edit: object) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    of_sound = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embedding_groups": 2}
    Wav2Vec2ConformerModel(Wav2Vec2ConformerConfig(**sizes, **of_sound)).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", num_hidden_layers=2)
    assert misfits(tmp_path, text_only=False) == (layers(3, 2, "encoder.layers"),)


def test_an_encoder_without_the_head_of_its_class_is_healthy(tmp_path: Path, edit: object) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    BertForMaskedLM(BertConfig(**sizes)).bert.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", architectures=["BertForMaskedLM"])
    assert misfits(tmp_path) == ()
    edit(tmp_path / "config.json", num_hidden_layers=2)
    assert misfits(tmp_path) == (layers(3, 2, "encoder.layer"),)
