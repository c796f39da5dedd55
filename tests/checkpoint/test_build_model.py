"""What transformers builds from a configuration and weights, and what of them did not fit."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from normkit.checkpoint.build_model import Reload, build_model, reload_check
from normkit.checkpoint.configuration import read_config
from normkit.checkpoint.swaps import KEY, record
from normkit.errors import ModelError
from normkit.spec import NormSpec
from tiny_models import RECIPES, norms, tiny


def is_whole(found: Reload) -> bool:
    """It ran, and every weight found its place."""
    return found.ran and not (found.missing or found.unexpected or found.mismatched)


def test_what_does_not_fit_is_told_and_the_rest_is_loaded(tmp_path: Path) -> None:
    model, _ = tiny("bert", tied=False)
    model.save_pretrained(tmp_path)
    weights = dict(model.state_dict())
    del weights["bert.embeddings.LayerNorm.bias"]
    weights["cls.predictions.bias"] = torch.zeros(5)
    found = build_model(read_config(tmp_path), {**weights, "surplus": torch.zeros(2)}, tmp_path)
    assert found.asked == type(found.model).__name__ == "BertForMaskedLM"
    assert not found.model.training
    assert found.missing == ["bert.embeddings.LayerNorm.bias"]
    assert found.unexpected == ["surplus"]
    assert found.mismatched == [("cls.predictions.bias", (5,), (97,))]
    kept = found.model.bert.embeddings.LayerNorm.weight
    assert torch.equal(kept, model.bert.embeddings.LayerNorm.weight)


@pytest.mark.slow
def test_the_body_is_taken_where_only_the_head_is_missing(tmp_path: Path) -> None:
    model, _ = tiny("bert", tied=False)
    model.save_pretrained(tmp_path)
    weights = {name: value for name, value in model.state_dict().items() if name.startswith("bert.")}
    found = build_model(read_config(tmp_path), weights, tmp_path)
    assert (found.asked, type(found.model).__name__) == ("BertForMaskedLM", "BertModel")
    strict = build_model(read_config(tmp_path), weights, tmp_path, or_body=False)
    assert type(strict.model).__name__ == "BertForMaskedLM"
    assert all(name.startswith("cls.") for name in strict.missing)
    del weights["bert.embeddings.LayerNorm.bias"]
    assert type(build_model(read_config(tmp_path), weights, tmp_path).model).__name__ == "BertForMaskedLM"


def test_only_a_reader_of_text_where_one_is_wanted(tmp_path: Path) -> None:
    model, _ = tiny("vit")
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    assert build_model(read_config(tmp_path), weights, tmp_path).missing == []
    with pytest.raises(ModelError, match="only models that read text"):
        build_model(read_config(tmp_path), weights, tmp_path, text_only=True)


WEIGHTS = "model.safetensors"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", RECIPES)
def test_what_transformers_saved_it_loads_whole(tmp_path: Path, family: str) -> None:
    model, _ = tiny(family, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert reload_check(tmp_path) == Reload(class_name=type(model).__name__)


def test_names_that_do_not_fit_are_told(gpt2: Path) -> None:
    weights = load_file(gpt2 / WEIGHTS)
    del weights["transformer.h.0.mlp.c_fc.weight"]
    weights["transformer.h.1.ln_1.bias"] = torch.zeros(17)
    save_file({**weights, "surplus": torch.zeros(3)}, gpt2 / WEIGHTS)
    found = reload_check(gpt2)
    assert (found.class_name, found.ran, found.reason) == ("GPT2LMHeadModel", True, "")
    assert found.unexpected == ("surplus",)
    assert found.mismatched == ("transformer.h.1.ln_1.bias",)
    assert "transformer.h.0.mlp.c_fc.weight" in found.missing
    assert not is_whole(found)


def test_a_bias_that_its_configuration_does_not_ask_for_is_unexpected(tmp_path: Path, edit: Any) -> None:
    tiny("llama_bias")[0].save_pretrained(tmp_path)
    edit(tmp_path / "config.json", attention_bias=False)
    assert set(reload_check(tmp_path).unexpected) == {
        f"model.layers.{layer}.self_attn.{name}_proj.bias" for layer in (0, 1) for name in ("q", "k", "v", "o")
    }


def test_a_head_without_weights_is_missing_where_it_is_not_shared(tmp_path: Path, edit: Any) -> None:
    tiny("gpt2", tied=True)[0].save_pretrained(tmp_path)
    assert is_whole(reload_check(tmp_path))
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    found = reload_check(tmp_path)
    assert (found.missing, found.class_name) == (("lm_head.weight",), "GPT2LMHeadModel")


def test_a_head_that_is_not_there_is_missing(tmp_path: Path, edit: Any) -> None:
    tiny("bert")[0].bert.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", architectures=["BertForMaskedLM"])
    found = reload_check(tmp_path)
    assert found.class_name == "BertForMaskedLM"
    assert "cls.predictions.transform.dense.weight" in found.missing


def test_no_weight_is_read(gpt2: Path) -> None:
    # The numbers are gone from the disk: only a file that pretends to be as long.
    with (gpt2 / WEIGHTS).open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0] + 8
        size = file.seek(0, 2)
        file.truncate(length)
        file.truncate(size)
    assert (gpt2 / WEIGHTS).stat().st_size == size
    assert is_whole(reload_check(gpt2))


def test_nothing_is_allocated_whatever_a_header_claims(gpt2: Path) -> None:
    # A terabyte of zeros that no disk holds.
    rows = 2**34
    header = json.dumps({"a": {"dtype": "F32", "shape": [rows, 16], "data_offsets": [0, rows * 64]}}).encode()
    header += b" " * (-len(header) % 8)
    with (gpt2 / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(len(header) + 8 + rows * 64)
    assert reload_check(gpt2).unexpected == ("a",)


def test_recorded_norms_are_put_in_place(tmp_path: Path) -> None:
    model, _ = tiny("olmo")
    spec = NormSpec(centre_numerator=False, centre_statistics=False, has_weight=False, has_bias=False)
    model.config.update({KEY: record(dict.fromkeys(norms(model), spec))})
    model.save_pretrained(tmp_path)
    assert is_whole(reload_check(tmp_path))
    model.config.update({KEY: record({"model.norm": spec.replace(has_weight=True)})})
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"expected weight in 'model\.norm'"):
        reload_check(tmp_path)


def test_without_accelerate_it_says_so(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    found = reload_check(gpt2)
    assert found == Reload(class_name="GPT2LMHeadModel", ran=False, reason="accelerate is not installed")
    assert not is_whole(found)


def test_a_model_that_cannot_be_built_is_one_line(gpt2: Path, edit: Any) -> None:
    edit(gpt2 / "config.json", n_head=3)
    with pytest.raises(ModelError, match="transformers cannot build GPT2LMHeadModel from "):
        reload_check(gpt2)
