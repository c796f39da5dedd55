"""Weights of folders, files, arrays and modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from normkit.comparison.values import compare_values
from normkit.comparison.weights import eps_in, is_quantized, weights_of
from normkit.errors import InputError, KindError, ModelError


def test_arrays_of_torch_and_numpy_in_nested_mappings() -> None:
    given = {"a": {"weight": torch.arange(6.0).reshape(2, 3).bfloat16()}, "b": [np.ones(4, np.float16), np.int32(7)]}
    weights = weights_of(given)
    assert {name: (info.dtype, info.shape) for name, info in weights.source.tensors.items()} == {
        "a.weight": ("BF16", (2, 3)),
        "b.0": ("F16", (4,)),
        "b.1": ("I32", ()),
    }
    assert weights.source.rows("a.weight", 1, 2).tolist() == [[3.0, 4.0, 5.0]]
    assert weights.source.rows("b.1", 0, 1).tolist() == [[7]]


@pytest.mark.filterwarnings("error")
def test_arrays_that_must_not_be_written_to() -> None:
    array = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32)
    assert weights_of({"g": array}).source.rows("g", 0, 1).tolist() == [[0, 1, 2, 3]]


class Foreign:
    """An array of a library that has bfloat16 where numpy has none."""

    dtype, shape = "bfloat16", (3,)

    def tobytes(self) -> bytes:
        return torch.tensor([1.0, 2.0, 3.0]).bfloat16().view(torch.uint8).numpy().tobytes()


def test_bfloat16_of_libraries_without_torch() -> None:
    source = weights_of({"g": Foreign()}).source
    assert (source.tensors["g"].dtype, source.rows("g", 0, 1).tolist()) == ("BF16", [[1.0, 2.0, 3.0]])


@pytest.mark.parametrize("value", ["text", None, object(), np.array(["a"]), torch.empty(2, device="meta")])
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match="'g'"):
        weights_of({"g": value})


def test_a_module() -> None:
    weights = weights_of(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=1e-3)))
    assert weights.eps == {"1": 1e-3}
    assert [*weights.source.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert (weights.runtime, weights.settings) == ("", {})


def folder_with(path: Path, config: dict[str, Any] | None, **files: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
    return path


@pytest.mark.parametrize("name", ["model", "weights", "consolidated"])
def test_a_folder_a_file_of_it_and_its_configuration(tmp_path: Path, name: str) -> None:
    config = {"model_type": "llama", "text_config": {"rms_norm_eps": 1e-6}}
    folder_with(tmp_path, config, **{name: {"norm.weight": torch.ones(4)}})
    for given in (tmp_path, str(tmp_path), tmp_path / f"{name}.safetensors"):
        weights = weights_of(given)
        assert [*weights.source.tensors] == ["norm.weight"]
        assert (weights.runtime, weights.architecture, weights.eps) == ("transformers", "llama", {"": 1e-6})


def test_shards_under_an_index_of_any_name(tmp_path: Path) -> None:
    folder_with(tmp_path, None, one={"a": torch.ones(4)}, two={"b": torch.ones(4)})
    index = tmp_path / "any.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert [*weights_of(index).source.tensors] == [*weights_of(tmp_path).source.tensors] == ["a", "b"]
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ModelError, match="beside it"):
        weights_of(index)


def test_paths_that_hold_no_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="never loaded"):
        weights_of(tmp_path)
    with pytest.raises(InputError, match="there is no"):
        weights_of(tmp_path / "absent.safetensors")
    with pytest.raises(InputError, match="safetensors"):
        weights_of(tmp_path / "pytorch_model.bin")
    with pytest.raises(KindError, match="got int"):
        weights_of(7)


@pytest.mark.parametrize(
    ("settings", "eps"),
    [
        ({"rms_norm_eps": 1e-6}, 1e-6),
        ({"layer_norm_epsilon": 1e-5}, 1e-5),
        ({"text_config": {"norm_eps": 1e-5}, "vision_config": {"layer_norm_eps": 1e-6}}, 1e-5),
        ({"rms_norm_eps": True}, None),
        ({"rms_norm_eps": "1e-6"}, None),
        ({}, None),
    ],
)
def test_eps_of_a_configuration(settings: dict[str, Any], eps: float | None) -> None:
    assert eps_in(settings).get("") == eps


@pytest.mark.parametrize(
    ("config", "found"),
    [(None, False), ({}, False), ({"quantization": {"bits": 4}}, True), ({"quantization_config": {}}, True)],
)
def test_a_folder_that_says_it_is_quantized(tmp_path: Path, config: dict[str, Any] | None, found: bool) -> None:
    assert is_quantized(folder_with(tmp_path / "x", config)) is found


def test_a_checkpoint_of_tensorrt_llm(tmp_path: Path) -> None:
    config = {"architecture": "GemmaForCausalLM", "norm_epsilon": 1e-6, "mapping": {"world_size": 2, "tp_size": 2}}
    gains = {name: torch.rand(16) for name in ("input_layernorm", "post_attention_layernorm", "norm")}
    ours = {
        "transformer.layers.0.input_layernorm.weight": gains["input_layernorm"] + 1,
        "transformer.layers.0.post_layernorm.weight": gains["post_attention_layernorm"] + 1,
        "transformer.ln_f.weight": gains["norm"] + 1,
    }
    port = weights_of(folder_with(tmp_path / "port", config, rank0=ours, rank1=ours))
    assert (port.runtime, port.eps) == ("TensorRT-LLM", {"": 1e-6})
    assert port.notes == ("the first of 2 ranks is read: it has parts of the matrices",)
    theirs = {f"model.layers.0.{name}.weight": gain for name, gain in gains.items() if name != "norm"}
    reference = folder_with(
        tmp_path / "r", {"model_type": "gemma"}, model=theirs | {"model.norm.weight": gains["norm"]}
    )
    found = compare_values(port, weights_of(reference))
    assert [(each.paired_by, each.verdict, each.is_right) for each in found.tensors] == [
        ("table of names", "as TensorRT-LLM stores it", True)
    ] * 3
