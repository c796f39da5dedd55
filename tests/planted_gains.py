"""Gains of a small decoder under the names of transformers, for what is planted in them."""

from __future__ import annotations

import torch
from torch import Tensor


def gains(layers: int = 3, size: int = 96) -> dict[str, Tensor]:
    """The norms of a small decoder in bfloat16, and a matrix."""
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{layer}.{name}" for layer in range(layers) for name in ("input_layernorm", "mlp_norm")]
    found = {
        f"{name}.weight": (1 + 0.3 * torch.randn(size, generator=generator)).bfloat16()
        for name in [*names, "model.norm"]
    }
    return {**found, "model.embed_tokens.weight": torch.zeros(7, size)}
