"""A fold written as GGUF: names, arrangements and metadata as llama.cpp has them, and files of other models refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from gguf_cases import arranged, converted, saved, written
from normkit.checkpoint.folding import fold
from normkit.errors import InputError, ModelError
from tiny_models import LAYERS

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.slow


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
