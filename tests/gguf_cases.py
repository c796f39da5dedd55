"""Tiny models as GGUF files, as llama.cpp's converter writes them, and folds of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from normkit.checkpoint.gguf_folds import gguf_dtypes, write_gguf
from normkit.checkpoint.opening import open_checkpoint
from normkit.checkpoint.planning import make_plan
from tiny_models import HEADS, tiny

gguf = pytest.importorskip("gguf")

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
