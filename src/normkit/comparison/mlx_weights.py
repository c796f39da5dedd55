"""Matrices that MLX has quantized, dequantized a few rows at a time.

A matrix is three tensors: `weight`, whole numbers of 2 to 8 bits packed into 32-bit words from the lowest bit on;
`scales` and `biases`, one number for each group of 32, 64 or 128 columns. A number is `scale * whole number + bias`
(mlx, mlx/ops.cpp, affine_dequantize).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normkit.checkpoint.reader import Source, TensorInfo
from normkit.errors import ModelError
from normkit.text import quoted

BITS = (2, 3, 4, 5, 6, 8)
"""The widths that MLX packs."""


def is_mlx(settings: Mapping[str, Any], metadata: Mapping[str, str]) -> bool:
    """Whether MLX wrote a folder or file: by the quantization in its configuration, or the file's own word."""
    found = settings.get("quantization")
    is_quantized = isinstance(found, Mapping) and {"group_size", "bits"} <= found.keys()
    return is_quantized or metadata.get("format") == "mlx"


class MlxSource:
    """Tensors of MLX, its quantized matrices as matrices of floating-point numbers.

    `left` holds the matrices that stay as they are stored, each with the reason.

    Args:
        source: The tensors as they are stored.
        quantization: What config.json says of it: bits and group_size, and the same for single modules.

    Raises:
        ModelError: If the three tensors of a matrix do not fit together.
    """

    def __init__(self, source: Source, quantization: Mapping[str, Any]) -> None:
        self._source = source
        self._packed: dict[str, tuple[str, int, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.left: dict[str, str] = {}
        hidden = set()
        for name, info in source.tensors.items():
            path = name.removesuffix(".weight")
            scales = source.tensors.get(f"{path}.scales")
            if not name.endswith(".weight") or info.dtype != "U32" or scales is None:
                continue
            found = quantization.get(path, quantization)
            bits, group = (found.get(key) if isinstance(found, Mapping) else None for key in ("bits", "group_size"))
            mode = found.get("mode", "affine") if isinstance(found, Mapping) else "affine"
            if mode != "affine" or f"{path}.biases" not in source.tensors:
                self.left[name] = f"quantized as {quoted(mode)}"
                continue
            if bits not in BITS or type(group) is not int or group <= 0:
                self.left[name] = "bits and group size are in config.json, which is not at hand"
                continue
            columns = scales.shape[-1] * group
            biases = source.tensors[f"{path}.biases"]
            fits = scales.dtype in ("F16", "BF16", "F32") and (biases.dtype, biases.shape) == (
                scales.dtype,
                scales.shape,
            )
            if not fits or columns * bits != info.shape[-1] * 32 or info.shape[:-1] != scales.shape[:-1]:
                raise ModelError(
                    f"expected {name} of {bits} bits in groups of {group}, got {list(info.shape)} with scales of "
                    f"{list(scales.shape)}; weights and config.json belong to different models"
                )
            self._packed[name] = path, bits, group
            self.tensors[name] = TensorInfo(scales.dtype, (*info.shape[:-1], columns))
            hidden |= {f"{path}.scales", f"{path}.biases"}
        shown = (name for name in source.tensors if name not in hidden)
        self.tensors = {name: self.tensors.get(name, source.tensors[name]) for name in shown}

    @property
    def quantized(self) -> int:
        """How many matrices are dequantized."""
        return len(self._packed)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix, in the dtype of its scales if it was quantized.

        Raises:
            ModelError: If the file cannot be read to the end.
        """
        if name not in self._packed:
            return self._source.rows(name, start, stop)
        path, bits, group = self._packed[name]
        words = self._source.rows(name, start, stop)
        scales, biases = (self._source.rows(f"{path}.{part}", start, stop)[..., None] for part in ("scales", "biases"))
        numbers = unpacked(words, bits).reshape(len(words), -1, group).to(scales.dtype)
        # In the dtype of the scales, with two roundings, as MLX.
        return (numbers * scales + biases).reshape(len(words), -1)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Whole numbers packed into 32-bit words, from the lowest bit on; shape (rows, words) -> (rows, numbers), float64.

    Example:
        >>> unpacked(torch.tensor([[0x76543210]], dtype=torch.uint32), 4).tolist()
        [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    """
    octets = words.contiguous().view(torch.uint8)
    single = (octets[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    numbers = single.reshape(len(words), -1, bits).double()
    return numbers @ (2.0 ** torch.arange(bits, dtype=torch.float64))
