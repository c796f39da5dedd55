"""Tensors drawn from a seed, safetensors of them, and safetensors written byte by byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from normkit.checkpoint.reader import TORCH, CheckpointSource

FLOATS = ["BF16", "F16", "F32", "F64"]


def source_of(folder: Path, **tensors: Tensor) -> CheckpointSource:
    """A checkpoint of one file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return CheckpointSource(folder)


def drawn(dtype: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(TORCH[dtype])


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype is right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def raw(header: bytes | Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file byte by byte: the header's length, the header, the data."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data
