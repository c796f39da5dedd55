"""A folder opened to be planned on: a `config.json` that cannot be followed gives one line that says what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from normkit import demo
from normkit.checkpoint.opening import (
    body_class,
    check_reads_text,
    folded_config,
    model_class,
    open_checkpoint,
    read_config,
)
from normkit.checkpoint.plan import FoldPlan
from normkit.checkpoint.planning import make_plan
from normkit.errors import ModelError


def test_a_folder_is_opened_with_its_graph_and_a_path_that_is_none_is_refused(tmp_path):
    with open_checkpoint(demo.directory("rmsnorm")) as opened:
        assert opened.graph.architecture == opened.config["architectures"][0] == "LlamaForCausalLM"
        assert len(opened.graph.norms) == 2 * opened.config["num_hidden_layers"] + 1
        assert {norm.weight for norm in opened.graph.norms} <= opened.source.tensors.keys()
    with pytest.raises(ModelError, match="expected the folder of a model"):
        open_checkpoint(tmp_path / "none")


def test_the_checkpoint_of_a_class_without_a_head_has_names_without_its_prefix(tmp_path):
    from tiny_models import tiny

    model, _ = tiny("llama")
    model.model.save_pretrained(tmp_path / "body")
    with open_checkpoint(tmp_path / "body") as opened:
        assert opened.graph.returned == {"norm"}
        assert opened.graph.norms[0].name == "layers.0.input_layernorm"


def test_a_body_that_is_saved_beside_the_name_of_a_class_with_a_head_is_folded_as_the_body(tmp_path):
    from tiny_models import tiny

    model, _ = tiny("mpnet")
    model.mpnet.config.architectures = None
    model.mpnet.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MPNetForMaskedLM"]}))
    with open_checkpoint(tmp_path) as opened:
        plan = make_plan(opened, operations=["centre"])
        assert plan.architecture == "MPNetModel"
        assert folded_config(opened.config, plan)["architectures"] == ["MPNetModel"]
        assert "its config names MPNetForMaskedLM, and no head is there: it is a MPNetModel" in plan.remarks


def test_keys_are_set_at_their_depth_and_dropped_and_the_rest_is_left():
    config = {"a": 1, "text_config": {"tie": True, "b": 2}, "clip": None}
    plan = FoldPlan(
        family="x",
        architecture="X",
        operations=("gain",),
        untie=True,
        edits=(),
        config={"tie": False, "text_config.tie": False},
        dropped=("clip", "absent"),
    )
    assert folded_config(config, plan) == {"a": 1, "text_config": {"tie": False, "b": 2}, "tie": False}
    assert config["text_config"] == {"tie": True, "b": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"model_type": 3}, "names no model_type"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": [7]}, "names no architecture"),
        ({"architectures": "GPT2Model"}, "names no architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"is quantized \('gptq'\)"),
        ({"quantization_config": [1]}, r"is quantized, and quantized weights"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, r"is quantized \('awq'\)"),
    ],
)
def test_what_a_configuration_must_say(gpt2: Path, edit: Any, changes: dict[str, Any], message: str) -> None:
    edit(gpt2 / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        read_config(gpt2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": "\\ud800"}', b'{"a": 1e999}', b'{"a": 1, "a": 2}'],
)
def test_a_configuration_that_is_no_json_object(gpt2: Path, content: bytes) -> None:
    (gpt2 / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"expected (a )?JSON"):
        read_config(gpt2)


def test_an_empty_quantization_config_is_none(gpt2: Path, edit: Any) -> None:
    edit(gpt2 / "config.json", quantization_config={})
    assert read_config(gpt2)["model_type"] == "gpt2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt22"}, "knows no model type 'gpt22'.*did you mean 'gpt2'"),
        ({"model_type": "zzzzzz"}, "knows no model type 'zzzzzz'.*a newer transformers may"),
        ({"model_type": "zzzzzz", "auto_map": {"AutoModel": "m.M"}}, "brings its own code for model type 'zzzzzz'"),
        ({"architectures": ["MyOwnGPT2"]}, "needs the class 'MyOwnGPT2', which transformers .* does not have"),
        ({"architectures": ["Trainer"]}, "needs the class 'Trainer'"),
        ({"architectures": ["pipeline"]}, "needs the class 'pipeline'"),
        ({"architectures": ["BertModel"]}, "BertModel is no gpt2 model"),
        ({"architectures": ["PreTrainedModel"]}, "PreTrainedModel is no gpt2 model"),
        ({"n_embd": "wide"}, "is no gpt2 configuration"),
        ({"n_layer": 10**9}, "says n_layer = 1000000000, expected at most 10000"),
    ],
)
def test_what_transformers_cannot_build(gpt2: Path, edit: Any, changes: dict[str, Any], message: str) -> None:
    edit(gpt2 / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        model_class(read_config(gpt2), gpt2)
    assert "\n" not in str(caught.value)


def test_classes_of_text_models_in_larger_ones_of_bodies_and_of_images(tmp_path: Path) -> None:
    text = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    values = {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"], "text_config": text}
    config, found = model_class(values, tmp_path)
    assert found is transformers.Gemma3ForCausalLM
    assert (type(config), config.hidden_size) == (transformers.Gemma3TextConfig, 16)
    inner = {"vocab_size": 64, "attn_implementation": "somebody/kernel"}
    values = {"model_type": "gemma3", "architectures": ["Gemma3Model"], "text_config": inner, "auto_map": {"A": "b.C"}}
    config, _ = model_class(values, tmp_path)
    assert not re.search("somebody", repr(config.to_dict()) + repr(config.text_config._attn_implementation))
    assert not hasattr(config, "auto_map")
    _, found = model_class({"model_type": "vit", "architectures": ["ViTModel"]}, tmp_path)
    assert found is transformers.ViTModel
    with pytest.raises(ModelError, match=r"runs models that read text, ViTModel reads pixel_values"):
        check_reads_text(found)
    check_reads_text(transformers.BertModel)
    assert body_class(transformers.BertConfig()) is transformers.BertModel
    assert body_class(transformers.PreTrainedConfig()) is None


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    stock = transformers.Mamba2Config(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8)
    stock.architectures = ["Mamba2ForCausalLM"]
    stock.save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    config, _ = model_class(read_config(tmp_path), tmp_path)
    assert tuple(config.time_step_limit) == tuple(stock.time_step_limit) == (0.0, float("inf"))
