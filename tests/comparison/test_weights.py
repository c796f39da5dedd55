"""Weights of folders, files, arrays and modules."""

from __future__ import annotations

import io
import json
import random
import zipfile
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


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return path


def member(array: np.ndarray, header: bytes = b"", wrong: bytes = b"") -> bytes:
    """An array as numpy writes it, with a part of its header exchanged."""
    written = io.BytesIO()
    np.lib.format.write_array(written, array, version=(1, 0))
    return written.getvalue().replace(header, wrong) if header else written.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_in_a_file_of_numpy(tmp_path: Path, save: Any) -> None:
    half = torch.randn(3, 5).bfloat16()
    arrays = {
        "params/norm/scale": np.linspace(0, 1, 7, dtype=np.float32),
        "params/fc/kernel": np.arange(12, dtype=np.float16).reshape(4, 3),
        "half": half.view(torch.int16).numpy().view("V2"),
        "count": np.int64(3),
        "nothing": np.ones((2, 0)),
        "turned": np.asfortranarray(np.ones((2, 3))),
        "names": np.array(["a", None], dtype=object),
        "reversed": np.ones(3, dtype=">f4"),
    }
    save(tmp_path / "a.npz", **arrays)
    weights = weights_of(tmp_path / "a.npz")
    assert weights.source.rows("params/norm/scale", 0, 1)[0].tolist() == arrays["params/norm/scale"].tolist()
    assert weights.source.rows("params/fc/kernel", 1, 3).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert torch.equal(weights.source.rows("half", 1, 3), half[1:])
    assert weights.source.rows("count", 0, 1).tolist() == [[3]]
    assert weights.source.rows("nothing", 0, 2).shape == (2, 0)
    by_column = "it is stored column by column"
    assert weights.unread == {"turned": by_column, "names": "its dtype is |O", "reversed": "its dtype is >f4"}
    assert weights.notes[0] == f"1 array not read: {by_column}"


ONES = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"a.npy": b""}, "EOF"),
        ({"a.npy": b"pickle"}, "magic"),
        ({"a.npy": member(ONES, b"(4, 4)", b"(4, 5)")}, "'a' is not of the shape (4, 5) that it claims"),
        ({"a.npy": member(ONES, b"(4, 4)", b"(9**9)")}, "malformed|Cannot parse"),
        ({"a.npy": member(ONES, b"(4, 4), }", b"(-4, -4)}")}, "is not of the shape"),
        ({"a.npy": member(ONES)[:-7]}, "'a' is not of the shape (4, 4)"),
        ({"a\n.npy": member(ONES)}, "is no name for an array"),
        ({"a.npy": member(ONES), "a": member(ONES)}, "stands twice"),
    ],
)
def test_a_file_of_numpy_that_lies_is_one_line(tmp_path: Path, members: dict[str, bytes], said: str) -> None:
    with pytest.raises(ModelError) as raised:
        weights_of(archive(tmp_path / "a.npz", members))
    assert any(each in str(raised.value) for each in said.split("|"))
    assert str(raised.value).isprintable()


@pytest.mark.slow
def test_a_damaged_file_of_numpy_is_one_line_or_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(200.0), b=ONES)
    whole, drawing, refusals = (tmp_path / "a.npz").read_bytes(), random.Random(0), []
    for _ in range(300):
        damaged = bytearray(whole)[: drawing.choice((len(whole), len(whole), drawing.randrange(1, len(whole))))]
        for _ in range(drawing.choice((1, 1, 2, 8))):
            damaged[drawing.randrange(len(damaged))] = drawing.randrange(256)
        (tmp_path / "b.npz").write_bytes(damaged)
        try:
            source = weights_of(tmp_path / "b.npz").source
            for name in source.tensors:
                source.rows(name, 0, 1)
        except ModelError as error:
            refusals.append(str(error))
    assert 100 < len(refusals) < 300
    assert all(refusal.isprintable() for refusal in refusals)
