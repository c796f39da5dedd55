"""A GGUF file as weights: its values, in either byte order and in parts, its eps, its names in transformers."""

from __future__ import annotations

import gc
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import gguf as package
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING

from gguf_files import NUMBERS, Raw, gguf
from normkit.comparison.gguf_file import faults_of, own_architecture, read_gguf
from normkit.comparison.weights import Weights, weights_of
from normkit.errors import ModelError
from tensor_files import same_bits

LLAMA = {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-5}


def written(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_values_as_they_are_stored(tmp_path, dtype, order):
    tensors = {"a": (100 * torch.randn(5, 3)).to(dtype), "b": (100 * torch.randn(7)).to(dtype), "c": torch.zeros(2, 0)}
    weights = read_gguf(written(tmp_path / "model.gguf", gguf(LLAMA, tensors, order=order)))
    assert same_bits(weights.source.rows("a", 0, 5), tensors["a"])
    assert same_bits(weights.source.rows("a", 1, 3), tensors["a"][1:3])
    assert same_bits(weights.source.rows("b", 0, 1)[0], tensors["b"])
    assert weights.source.rows("c", 0, 2).shape == (2, 0)
    assert weights.source.rows("a", 2, 2).shape == (0, 3)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_quantized_rows_are_dequantized_by_the_package(tmp_path, encoding):
    kind = package.GGMLQuantizationType[encoding]
    columns = 2 * package.GGML_QUANT_SIZES[kind][0]
    shape = 3, columns // package.GGML_QUANT_SIZES[kind][0] * package.GGML_QUANT_SIZES[kind][1]
    stored = np.random.default_rng(0).integers(0, 60, size=shape, dtype=np.uint8)
    file = written(tmp_path / "model.gguf", gguf(LLAMA, {"a": Raw(kind, stored.tobytes(), (3, columns))}))
    source = read_gguf(file).source
    expected = torch.from_numpy(package.quants.dequantize(stored, kind))
    assert (source.tensors["a"].dtype, source.tensors["a"].encoding) == ("F32", encoding)
    assert source.tensors["a"].nbytes == 4 * 3 * columns
    assert torch.equal(source.rows("a", 0, 3), expected)
    assert torch.equal(source.rows("a", 1, 2), expected[1:2])


def test_a_file_of_the_package_itself(tmp_path):
    file = tmp_path / "model.gguf"
    writer = package.GGUFWriter(file, "gemma3")
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["<s>", "a"])
    writer.add_tensor("blk.0.attn_norm.weight", np.arange(4, dtype=np.float32))
    writer.add_tensor("blk.0.post_attention_norm.weight", np.ones(4, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = read_gguf(file)
    assert (weights.runtime, weights.architecture, weights.eps, weights.notes) == (
        "llama.cpp",
        "gemma3",
        {"": 1e-6},
        (),
    )
    assert weights.settings == {
        "general.architecture": "gemma3",
        "gemma3.block_count": 1,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    }
    assert weights.names["blk.0.attn_norm.weight"][0] == "model.layers.0.input_layernorm.weight"
    assert "model.layers.0.post_attention_layernorm.weight" in weights.names["blk.0.post_attention_norm.weight"]
    assert weights.names["output_norm.weight"][0] == "model.norm.weight"
    assert weights.source.rows("blk.0.attn_norm.weight", 0, 1).tolist() == [[0, 1, 2, 3]]


def test_names_do_not_depend_on_what_was_opened_before(tmp_path):
    tensors = {"blk.1.ffn_norm.weight": torch.ones(4), "blk.1.ffn_norm.bias": torch.ones(4)}
    llama = written(tmp_path / "llama.gguf", gguf(LLAMA, tensors))
    arctic = written(tmp_path / "arctic.gguf", gguf({"general.architecture": "arctic"}, tensors))
    name = "model.layers.1.post_attention_layernorm.bias"
    assert name in read_gguf(llama).names["blk.1.ffn_norm.bias"]
    assert read_gguf(arctic).names["blk.1.ffn_norm.bias"] == ("model.layers.1.residual_layernorm.bias",)
    assert name in read_gguf(llama).names["blk.1.ffn_norm.bias"]


@pytest.mark.slow
def test_no_name_is_given_twice(tmp_path):
    for architecture in package.MODEL_ARCH_NAMES.values():
        tensors = [
            template.format(bid=3, xid=0) + ".weight"
            for kind in package.MODEL_TENSORS[next(k for k, v in package.MODEL_ARCH_NAMES.items() if v == architecture)]
            for template in [package.TENSOR_NAMES[kind]]
        ]
        content = gguf({"general.architecture": architecture}, {name: torch.ones(1) for name in tensors})
        names = read_gguf(written(tmp_path / "model.gguf", content)).names
        alternatives = [name for each in names.values() for name in each]
        assert len(alternatives) == len(set(alternatives))


def test_what_the_table_does_not_know(tmp_path):
    settings = {"general.architecture": "orrery", "orrery.attention.layer_norm_epsilon": 1e-12}
    weights = read_gguf(written(tmp_path / "model.gguf", gguf(settings, {"a.b": torch.ones(2)})))
    assert (weights.architecture, weights.eps, weights.names) == ("orrery", {"": 1e-12}, {})
    assert weights.notes == ("the package gguf knows no names of tensors for the architecture 'orrery'",)
    weights = read_gguf(written(tmp_path / "model.gguf", gguf({}, {"a.b": torch.ones(2)})))
    assert (weights.architecture, weights.eps) == ("", {})
    weights = read_gguf(written(tmp_path / "model.gguf", gguf(LLAMA, {"a.b": torch.ones(2)})))
    assert (weights.names, weights.notes) == ({}, ())


def test_the_eps_of_an_encoder(tmp_path):
    settings = {"general.architecture": "clip", "clip.vision.attention.layer_norm_epsilon": 1e-6}
    weights = read_gguf(written(tmp_path / "mmproj.gguf", gguf(settings, {"v.post_ln.weight": torch.ones(2)})))
    assert weights.eps == {"": 1e-6}
    assert "vision_tower.vision_model.post_layernorm.weight" in weights.names["v.post_ln.weight"]


@pytest.mark.parametrize("architecture", ["a\nb", 3, ["llama"]])
def test_an_architecture_that_is_no_name(tmp_path, architecture):
    file = written(tmp_path / "model.gguf", gguf({"general.architecture": architecture}))
    with pytest.raises(ModelError, match="its architecture is"):
        read_gguf(file)


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), 3, "1e-6", [1e-6]])
def test_an_eps_that_is_no_number(tmp_path, eps):
    file = written(tmp_path / "model.gguf", gguf(LLAMA | {"llama.attention.layer_norm_rms_epsilon": eps}))
    with pytest.raises(ModelError, match="its layer_norm_rms_epsilon is"):
        read_gguf(file)


def test_without_the_package(tmp_path, monkeypatch):
    tensors = {"blk.0.attn_norm.weight": torch.ones(4), "blk.0.ffn_up.weight": Raw(8, bytes(34), (32,))}
    file = written(tmp_path / "model.gguf", gguf(LLAMA, tensors))
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    weights = read_gguf(file)
    assert torch.equal(weights.source.rows("blk.0.attn_norm.weight", 0, 1), torch.ones(1, 4))
    assert weights.names == {}
    (note,) = weights.notes
    assert note.endswith('needs the package gguf, which is not installed: pip install "normkit[ports]"')
    with pytest.raises(ModelError, match=r"Q8_0, in which .* needs the package gguf.*pip install") as raised:
        weights.source.rows("blk.0.ffn_up.weight", 0, 1)
    assert str(raised.value).isprintable()


def test_blocks_that_the_package_cannot_read(tmp_path):
    source = read_gguf(written(tmp_path / "model.gguf", gguf(LLAMA, {"a": Raw(9, bytes(40), (32,))}))).source
    with pytest.raises(ModelError, match="the package gguf cannot dequantize Q8_1"):
        source.rows("a", 0, 1)


def test_tensors_that_are_not_read_are_counted_and_named(tmp_path):
    tensors = {"blk.0.attn_norm.weight": torch.ones(4), "blk.0.ffn_up.weight": Raw(8, bytes(34), (32,))}
    tensors |= {f"blk.{layer}.ffn_gate.weight": Raw(139, bytes(32), (64,)) for layer in range(2)}
    weights = read_gguf(written(tmp_path / "big.gguf", gguf(LLAMA, tensors, order=">")))
    assert [*weights.source.tensors] == ["blk.0.attn_norm.weight"]
    swapped = "its blocks of Q8_0 are big-endian; convert the file with gguf-convert-endian"
    assert set(weights.notes) == {f"1 tensor not read: {swapped}", "2 tensors not read: its encoding 139 is not known"}
    assert weights.unread["model.layers.0.mlp.up_proj.weight"] == swapped
    assert weights.unread["blk.1.ffn_gate.weight"] == "its encoding 139 is not known"


def parts(folder: Path, *tensors: dict[str, torch.Tensor], total: int | None = None, **changed: int) -> list[Path]:
    """The files of a split model; a keyword `no2=7` lies about the number of the second part."""
    files = []
    for number, held in enumerate(tensors):
        said = {
            "split.no": Raw(2, struct.pack("<H", changed.get(f"no{number}", number))),
            "split.count": Raw(2, struct.pack("<H", changed.get(f"count{number}", len(tensors)))),
            "split.tensors.count": sum(map(len, tensors)) if total is None else total,
        }
        file = folder / f"tiny-{number + 1:05}-of-{len(tensors):05}.gguf"
        files.append(written(file, gguf((LLAMA if number == 0 else {}) | said, held)))
    return files


PARTS = [{}, {"a": torch.ones(2), "b": torch.arange(3.0)}, {"c": torch.full((4,), 7.0)}]


@pytest.mark.parametrize("named", range(3))
def test_all_parts_of_a_split_file(tmp_path, named):
    files = parts(tmp_path, *PARTS)
    weights = read_gguf(files[named])
    assert weights.source.files == tuple(files)
    assert (weights.architecture, weights.eps, list(weights.source.tensors)) == ("llama", {"": 1e-5}, ["a", "b", "c"])
    assert weights.source.rows("b", 0, 1).tolist() == [[0, 1, 2]]
    assert weights.source.rows("c", 0, 1).tolist() == [[7, 7, 7, 7]]


def test_parts_that_do_not_belong_together(tmp_path):
    with pytest.raises(ModelError, match="says that it is part 7 of 3"):
        read_gguf(parts(tmp_path, *PARTS, no2=7)[0])
    with pytest.raises(ModelError, match="says that it is part 1 of 2"):
        read_gguf(parts(tmp_path, *PARTS, count1=2)[0])
    with pytest.raises(ModelError, match="its parts hold 3 tensors, it claims 4"):
        read_gguf(parts(tmp_path, *PARTS, total=4)[1])
    with pytest.raises(ModelError, match=r"'a' is in another part too"):
        read_gguf(parts(tmp_path, *PARTS[:2], {"a": torch.ones(1)})[0])
    files = parts(tmp_path, *PARTS)
    files[1].unlink()
    with pytest.raises(ModelError, match=r"all 3 parts beside .*, missing: tiny-00002-of-00003.gguf; download"):
        read_gguf(files[0])
    with pytest.raises(ModelError, match=r"a name such as NAME-00001-of-00003.gguf for one of 3 parts"):
        read_gguf(files[0].rename(tmp_path / "model.gguf"))


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "absent.gguf", tmp_path / "pipe.gguf"):
        with pytest.raises(ModelError, match=r"cannot read .*: it is no file"):
            read_gguf(path)


@pytest.mark.slow
def test_files_are_closed(tmp_path):
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()
    before = opened()
    file = written(tmp_path / "model.gguf", gguf(LLAMA, {"a": torch.ones(2)}))
    weights = read_gguf(file)
    assert opened() == before + 1
    weights.source.close()
    assert opened() == before
    weights.source.close()
    weights = read_gguf(file)
    del weights
    gc.collect()
    assert opened() == before
    with pytest.raises(ModelError):
        read_gguf(written(tmp_path / "cut.gguf", file.read_bytes()[:50]))
    assert opened() == before


def test_a_file_that_became_shorter(tmp_path):
    file = written(tmp_path / "model.gguf", gguf(LLAMA, {"a": torch.ones(200)}))
    source = read_gguf(file).source
    os.truncate(file, 300)
    with pytest.raises(ModelError, match="became shorter while it was read"):
        source.rows("a", 0, 1)


# What the gains of each real file are to those of its folder, which was dequantized from it and rounded to bfloat16.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "offset", "is_exact"), [("gemma3", 1, True), ("smollm2", 0, True), ("qwen05", 0, False)]
)
def test_the_gains_of_a_real_file(real_models, name, offset, is_exact):
    weights = read_gguf(real_models / f"{name}.gguf")
    with safe_open(real_models / name / "model.safetensors", "pt") as folder:
        there = set(folder.keys())
        gains = 0
        for tensor in weights.source.tensors:
            # Each tensor has exactly one of its names in the folder.
            (other,) = there.intersection(weights.names[tensor])
            if "norm" in tensor:
                gain, reference = weights.source.rows(tensor, 0, 1)[0], folder.get_tensor(other)
                assert torch.equal((gain - offset).to(reference.dtype), reference)
                gains += torch.equal(gain - offset, reference.float())
    expected = sum("norm" in tensor for tensor in weights.source.tensors)
    assert gains == expected if is_exact else gains < expected


# The architecture that a file names, against the reference's own.


def of(runtime: str, architecture: str, model_type: str = "") -> Weights:
    settings = {"model_type": model_type} if model_type else {}
    return replace(weights_of({}), runtime=runtime, architecture=architecture, settings=settings, eps={"": 1e-6})


def told(architecture: str, model_type: str, runtime: str = "llama.cpp") -> list[str]:
    found = faults_of(of(runtime, architecture), of("transformers", model_type, model_type))
    return [f"{each.label} {each.words}" for each in found]


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        *[("gemma3", "gemma3_text"), ("gemma3", "gemma3"), ("gemma-embedding", "gemma3_text"), ("llama", "mistral")],
        *[("llama", "smollm2"), ("gptneox", "gpt_neox"), ("phi2", "phi"), ("qwen3next", "qwen3_next")],
        *[
            ("clip", "gemma3"),
            ("llama", "mistral3"),
            ("t5encoder", "t5"),
            ("jina-bert-v2", "bert"),
            ("nomic-bert-moe", "nomic_bert"),
            ("mistral4", "mistral3"),
            ("eagle3", "llama"),
            ("bert", "roberta"),
        ],
        *[("llama", ""), ("", "gemma3")],
    ],
)
def test_an_architecture_that_the_converter_writes_is_right(architecture: str, model_type: str) -> None:
    assert told(architecture, model_type) == []


def test_another_architecture_is_a_fault_and_what_follows_is_said_where_it_is_known() -> None:
    computes = "llama.cpp computes what it computes for"
    assert told("llama", "gemma3_text") == [
        f"architecture llama instead of gemma3; {computes} llama: no scale of the embeddings, SiLU in place of GELU"
    ]
    assert told("llama", "qwen3") == [f"architecture llama instead of qwen3; {computes} llama"]
    assert told("gemma3", "qwen3", runtime="transformers") == []


@pytest.mark.slow
def test_names_of_transformers_that_llama_cpp_has_too() -> None:
    named = {kind: found for kind in CONFIG_MAPPING if (found := own_architecture(kind))}
    assert {"llama", "gemma", "gemma2", "gpt2", "qwen2", "qwen3", "phi3", "olmo2", "t5", "bloom"} <= {*named}
    assert all(
        found.replace("-", "").replace("_", "")[:3] == kind.replace("_", "")[:3] for kind, found in named.items()
    )
