"""What depends on transformers, with the one that is installed; `make oldest` runs it with the oldest that is taken."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import normkit as nk
from normkit import demo
from normkit.checkpoint import fold, verify
from normkit.checkpoint.loading import load_model
from normkit.errors import ModelError
from normkit.watching.trainer import WatchCallback

OLDEST = transformers.__version__.startswith("4.")

SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
GEMMA = {"num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 2}

# Class, configuration, norms, and of those the first one's spec.
FAMILIES: dict[str, tuple[type[PreTrainedModel], Any, int, nk.NormSpec]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES), 5, nk.specs.LLAMA),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_layer=2, n_head=2, n_embd=16), 5, nk.specs.TORCH_LAYER_NORM),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, **GEMMA), 13, nk.specs.GEMMA),
    "bert": (BertForMaskedLM, BertConfig(**SIZES), 6, nk.specs.TORCH_LAYER_NORM),
}


def build(family: str) -> PreTrainedModel:
    class_, config, *_ = FAMILIES[family]
    torch.default_generator.manual_seed(0)
    return class_(config).eval()


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))}


@pytest.mark.skipif("transformers-4" not in os.environ.get("PYTHONPATH", ""), reason="`make oldest` says so")
def test_it_is_the_oldest() -> None:
    assert version("transformers") == "4.57.6"
    assert OLDEST


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_is_found_measured_and_converted(family: str) -> None:
    model, (*_, count, spec) = build(family), FAMILIES[family]
    inspection = nk.inspect(model, [tokens()])
    assert len(inspection.sites) == count
    assert inspection.sites[0].spec.replace(eps=spec.eps) == spec
    before = model(**tokens()).logits
    report = nk.convert(model)
    assert report.counts == {"swapped": count, "slow": 0, "left_alone": 0}
    # float32 sums of 16 products in another order, through two blocks.
    torch.testing.assert_close(model(**tokens()).logits, before, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpoint_is_folded_and_loaded_again(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path / "source")
    fold(tmp_path / "source", tmp_path / "folded")
    assert verify(tmp_path / "source", tmp_path / "folded").passed
    folded = nk.load(tmp_path / "folded")
    torch.testing.assert_close(folded(**tokens()).logits, model(**tokens()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_trainer_is_watched(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in tokens()["input_ids"]]
    callback = WatchCallback(every=1)
    arguments = TrainingArguments(str(tmp_path), max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True)
    Trainer(build("gpt2"), arguments, train_dataset=rows, callbacks=[callback]).train()
    inspection = callback.inspection()
    assert inspection.training.steps == 3
    assert len(inspection.sites) == 5


def saved(folder: Path, **values: Any) -> Path:
    """A small Llama whose configuration holds these values."""
    build("llama").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_the_base_of_positions_that_transformers_5_writes_is_read(tmp_path: Path) -> None:
    model = load_model(str(saved(tmp_path, **ROPE))).model
    # 1e6 ** (-2 / 8): the second of the frequencies of heads of 8.
    assert model.model.rotary_emb.inv_freq[1] == pytest.approx(10**-1.5, rel=1e-6)


@pytest.mark.skipif(not OLDEST, reason="transformers 5 reads them")
def test_bases_of_positions_that_transformers_4_cannot_read_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, rope_parameters={"full_attention": ROPE["rope_parameters"]})
    with pytest.raises(ModelError, match=r"transformers 4 does not read its rope_parameters; install transformers>=5$"):
        load_model(str(folder))


def test_a_weight_of_another_shape_is_told_with_both(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has shape \(16, 24\), config\.json asks for \(16, 20\) \(and 5 more\)"):
        load_model(str(saved(tmp_path, intermediate_size=20)))


@pytest.mark.parametrize("twin", ["layernorm", "rmsnorm"])
def test_the_tokenizers_that_ship_are_read(twin: str) -> None:
    assert load_model(str(demo.directory(twin))).tokenizer("norm")["input_ids"] == list(b"norm")
