"""A fold written as GGUF: names, arrangements and metadata as llama.cpp has them, and files of other models refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from normkit.checkpoint.folding import fold
from normkit.checkpoint.gguf_folds import gguf_dtypes, write_gguf
from normkit.checkpoint.opening import open_checkpoint
from normkit.checkpoint.planning import make_plan
from normkit.errors import InputError, ModelError
from tiny_models import HEADS, LAYERS, tiny

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.slow

KV = 2


def arranged(name: str, values: torch.Tensor, architecture: str) -> torch.Tensor:
    """A tensor as llama.cpp's converter writes it (conversion/llama.py, permute; conversion/gemma.py)."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    if architecture != "llama" or not any(word in name for word in ("q_proj", "k_proj")):
        return values
    heads = HEADS if "q_proj" in name else KV
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def converted(folder: Path, architecture: str, layers: int, **changes: torch.Tensor) -> Path:
    """The GGUF file of a folder, in float32."""
    path = folder.with_suffix(".gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_token_list(["a", "b"])
    writer.add_file_type(0)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, layers)
    for name, values in load_file(folder / "model.safetensors").items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        written = changes.get(name.replace(".", "_"), arranged(name, values, architecture))
        writer.add_tensor(found, written.to(torch.float32).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def saved(family: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """A tiny model in bfloat16 on disk, and its GGUF file."""
    model, _ = tiny(family, dtype=torch.bfloat16, **options)
    model.save_pretrained(folder / "source")
    layers = model.config.num_hidden_layers
    return folder / "source", converted(folder / "source", {"gemma3": "gemma3"}.get(family, "llama"), layers)


def written(source: Path, metadata: Path, target: Path, dtype: str = "same", **choices: Any) -> dict[str, str]:
    """Fold into a GGUF file; tensor -> how it is arranged."""
    with open_checkpoint(source) as opened:
        inner = gguf_dtypes(opened.source, dtype)[1]
        plan = make_plan(opened, dtype=inner, **choices)
        found = write_gguf(plan, opened, target, metadata, dtype=dtype, untie=bool(choices.get("untie")))
    return {each.name: each.words for each in found}


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [("llama", True, "same"), ("llama_bias", False, "float32"), ("gemma3", True, "float16")],
)
def test_the_file_holds_the_fold_as_llama_cpp_arranges_it(family, tied, dtype, tmp_path):
    source, metadata = saved(family, tmp_path, tied=tied)
    words = written(source, metadata, tmp_path / "out.gguf", dtype, untie=tied)
    fold(source, tmp_path / "folded", dtype="same" if dtype == "same" else "float32", untie=tied)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["general.file_type"].contents() == {"same": 32, "float32": 0, "float16": 1}[dtype]
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, LAYERS + 1)
    kept = load_file(tmp_path / "folded" / "model.safetensors")
    assert len(kept) == len(tensors) == len(words)
    for name, values in kept.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        due = arranged(name, values.to(torch.float32), architecture)
        form = {"same": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}[dtype]
        due = due if due.dim() == 1 else due.to(form).to(torch.float32)
        held = torch.from_numpy(gguf.dequantize(tensors[found].data, tensors[found].tensor_type).copy())
        assert torch.equal(held.reshape(due.shape), due), name
    assert ("rotary halves interleaved" in words.values()) is (architecture == "llama")
    assert ("1 added" in words.values()) is (architecture == "gemma3")


def test_another_model_and_a_fold_that_changes_settings_are_refused_and_nothing_is_left(tmp_path):
    source, metadata = saved("llama", tmp_path)
    before = {*tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"this fold changes rms_norm_eps"):
        written(source, metadata, tmp_path / "out.gguf", "float32", operations=["scale"], halvings=1)
    metadata.unlink()
    values = load_file(source / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    metadata = converted(source, "llama", LAYERS, model_layers_1_mlp_up_proj_weight=values.flip(0))
    with pytest.raises(ModelError, match=r"blk.1.ffn_up.weight of .* is not model.layers.1.mlp.up_proj.weight of"):
        written(source, metadata, tmp_path / "out.gguf")
    metadata.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is no GGUF file that can be read"):
        written(source, metadata, tmp_path / "out.gguf")
    with pytest.raises(InputError, match="expected no file in"):
        written(source, metadata, metadata)
    assert {*tmp_path.iterdir()} == before
