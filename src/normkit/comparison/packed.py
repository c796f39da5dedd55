"""Quantized matrices in folders of transformers and vLLM: fp8 and int8 as numbers times scales, others by name alone.

A matrix of fp8 is `weight` and one scale for the matrix, for each row or for each block of 128 x 128 (`weight_scale`,
or `weight_scale_inv` of DeepSeek and Qwen; either is multiplied); one of bitsandbytes in 8 bits has 127 steps of `SCB`
for each row. GPTQ, AWQ, compressed-tensors and bitsandbytes in 4 bits pack whole numbers or codes; their matrices are
shown with the shape that they have, and are not read (AutoGPTQ, qlinear_cuda.py; AutoAWQ, gemm.py; compressed-tensors,
pack_quantized.py; bitsandbytes, functional.py, QuantState).
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from normkit.checkpoint.reader import Source, TensorInfo
from normkit.errors import NormkitError
from normkit.files import parse_json

_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point"),
    *("weight_scale_inv", "weight_g_idx", "input_scale", "activation_scale", "SCB", "weight_format", "weight.absmax"),
    *("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
)
"""Names of the tensors that may stand beside a quantized matrix, after the path of its module."""

_SCALES = ("weight_scale", "weight_scale_inv", "SCB")
_FP8 = {"F8_E4M3": "fp8 (e4m3)", "F8_E5M2": "fp8 (e5m2)"}
_STATE = "weight.quant_state.bitsandbytes__"
_CODES, _LONGEST_STATE = ("nf4", "fp4"), 2**16


class PackedSource:
    """Tensors in which each quantized matrix is one tensor, `weight`, without its parts.

    `forms` says of matrices that are read how their file holds them; `left` of those that are not read.

    Args:
        source: The tensors as they are stored.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._scales: dict[str, tuple[str, tuple[int, int]]] = {}
        self.forms: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        hidden = set[str]()
        for name in source.tensors:
            path, _, last = name.rpartition(".")
            shown = f"{path}.weight"
            found = None
            if last == "weight":
                found = self._scaled(path) or self._codes(path)
            elif last in ("qweight", "weight_packed") and shown not in source.tensors:
                found = self._whole_numbers(path)
            if found is None:
                self.tensors.setdefault(name, source.tensors[name])
                continue
            self.tensors[shown] = found
            hidden |= {f"{path}.{part}" for part in (*_PARTS, *(f"{_STATE}{kind}" for kind in _CODES))}
        for name in hidden & self.tensors.keys():
            del self.tensors[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix, in float32 if it was quantized.

        Raises:
            ModelError: If the file cannot be read to the end.
        """
        numbers = self._source.rows(name, start, stop)
        if name not in self._scales:
            return numbers
        scale, (tall, wide) = self._scales[name]
        columns = numbers.shape[1]
        rows_of_scale = self._source.tensors[scale].matrix[0]
        whole = self._source.rows(scale, 0, rows_of_scale).float().reshape(-1, math.ceil(columns / wide))
        of_rows = whole[torch.arange(start, stop) // tall]
        factors = of_rows[:, torch.arange(columns) // wide]
        return numbers.float() * (factors / 127 if scale.endswith("SCB") else factors)

    def _scaled(self, path: str) -> TensorInfo | None:
        """A matrix of fp8 or int8 with scales that fit, and how they divide it."""
        name, tensors = f"{path}.weight", self._source.tensors
        info = tensors[name]
        scale = next((f"{path}.{each}" for each in _SCALES if f"{path}.{each}" in tensors), None)
        if scale is None or len(info.shape) != 2 or info.dtype not in (*_FP8, "I8"):
            return None
        if tensors[scale].dtype not in ("F32", "BF16", "F16"):
            self.left[name] = f"{_FP8.get(info.dtype, 'int8')} with scales of {tensors[scale].dtype}"
            return info
        (height, width), sizes = info.shape, [size for size in tensors[scale].shape if size != 1]
        shape = tensors[scale].shape
        if not sizes:
            block, words = (height, width), "one scale"
        elif sizes == [height] and shape in ((height,), (height, 1)):
            block, words = (1, width), "a scale for each row"
        elif len(shape) == 2 and (side := _side(info.shape, shape)):
            block, words = (side, side), f"a scale for each block of {side} x {side}"
        else:
            self.left[name] = f"{_FP8.get(info.dtype, 'int8')} with scales of shape {list(shape)}"
            return info
        self._scales[name] = scale, block
        if info.dtype in _FP8:
            self.forms[name] = f"{_FP8[info.dtype]} with {words}"
        return TensorInfo("F32", info.shape)

    def _codes(self, path: str) -> TensorInfo | None:
        """A matrix of bitsandbytes in 4 bits, whose shape is in a text beside it."""
        name, info = f"{path}.weight", self._source.tensors[f"{path}.weight"]
        states = (f"{path}.{_STATE}{kind}" for kind in _CODES)
        state = next((each for each in states if each in self._source.tensors), "")
        if not state or not info.dtype == self._source.tensors[state].dtype == "U8":
            return None
        if self._source.tensors[state].nbytes > _LONGEST_STATE:
            return None
        content: Any = {}
        with suppress(NormkitError, ValueError):
            content = parse_json(bytes(self._source.rows(state, 0, 1).flatten().tolist()))
        content = content if isinstance(content, dict) else {}
        shape, size = content.get("shape"), content.get("blocksize")
        words = f"bitsandbytes {state.rpartition('_')[2]}"
        self.left[name] = f"{words}, blocks of {size}" if type(size) is int else words
        is_shape = isinstance(shape, list) and all(type(each) is int and each > 0 for each in shape)
        return TensorInfo("U8", (*shape,)) if is_shape and math.prod(shape) == 2 * math.prod(info.shape) else info

    def _whole_numbers(self, path: str) -> TensorInfo | None:
        """A matrix of GPTQ, AWQ or compressed-tensors, packed into 32-bit words along its rows or its columns."""
        tensors, name = self._source.tensors, f"{path}.weight"
        if packed := tensors.get(f"{path}.weight_packed"):
            scale, sizes = tensors.get(f"{path}.weight_scale"), tensors.get(f"{path}.weight_shape")
            if scale is None or sizes is None or math.prod(sizes.shape) != 2 or len(packed.shape) != 2:
                return None
            rows, columns = (int(each) for each in self._source.rows(f"{path}.weight_shape", 0, 1).flatten().tolist())
            kind, words, groups = "compressed-tensors", packed.shape[1], scale.shape[-1] if scale.shape else 0
        else:
            packed, scale, zeros = (tensors.get(f"{path}.{part}") for part in ("qweight", "scales", "qzeros"))
            if packed is None or scale is None or not len(packed.shape) == len(scale.shape) == 2:
                return None
            groups, rows = scale.shape
            is_by_column = packed.shape[1] == rows
            kind = "GPTQ" if is_by_column else "AWQ"
            if is_by_column and zeros is not None and len(zeros.shape) == 2 and zeros.shape[1] and rows:
                # As many bits as the packed zeros have.
                columns = packed.shape[0] * rows // zeros.shape[1]
            else:
                columns = packed.shape[0]
            words = packed.shape[0] * packed.shape[1] // max(rows, 1)
        if packed.dtype != "I32" or min(rows, columns, groups) <= 0 or (32 * words) % columns or columns % groups:
            return None
        group = f"groups of {columns // groups}" if groups > 1 else "a scale for each row"
        bits = 32 * words // columns
        self.left[name] = f"{kind} int{bits}, {group}"
        return TensorInfo("I32", (rows, columns))


def _side(shape: tuple[int, ...], blocks: tuple[int, ...]) -> int:
    """The side of the square blocks of which a matrix has so many; 0 if there is none."""
    for side in (128, 64, 256, 32, 512):
        if blocks == tuple(math.ceil(size / side) for size in shape):
            return side
    return 0
