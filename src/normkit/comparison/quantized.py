"""Quantized numbers: matrices of MLX, dequantized a few rows at a time; the grids on which quantized numbers lie.

A matrix of MLX is three tensors: `weight`, whole numbers of 2 to 8 bits packed into 32-bit words from the lowest bit
on; `scales` and `biases`, one number for each group of 32, 64 or 128 columns. A number is `scale * whole number + bias`
(mlx, mlx/ops.cpp, affine_dequantize). In files of other tools, too, a block of numbers has one scale, and each number
is a whole number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.checkpoint.reader import Source, TensorInfo
from normkit.errors import ModelError
from normkit.text import quoted

BITS = (2, 3, 4, 5, 6, 8)
"""The widths that MLX packs."""

BLOCKS = (2**20, 256, 128, 64, 32)
"""The numbers that share one grid in files of quantized tensors: all of them first, then those of a block."""

LEVELS = 2**8
"""The most levels of such a grid."""

_MOST_PARTS = 6
"""The numbers of a block may all be a few steps apart: the smallest gap is divided by up to this many."""

GROUPS = (128, 64, 32, 16)
"""The numbers of a row that share one step, from the most to the fewest."""

FEWEST = 8
"""The fewest numbers of a column that tell a step."""

_TELLING, _TELLING_ONE = math.log(1e9), math.log(1e4)
"""How unlikely it must be that all blocks lie on grids by chance, and that one of them lies on one of its grids."""

_FIRST, _THEN = (4, 64), (16, 128)
"""How many blocks, and numbers of each, are looked at first, and then: at the most, almost twice as many."""

MOST_SPREAD, LEAST_SPREAD = 5.0, 0.01
"""How far the slopes of groups are apart at most, in units of what the error of their fits explains, and in all."""


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """How a matrix that is stored as floating-point numbers differs from the reference's, from a few rows of both."""

    bits: int
    """The bits of its numbers; 0 if they lie on no grid, or further from the reference than its rounding explains."""
    shared: str
    """The unit that shares one step, such as "row" or "group of 32 columns"; "" without a grid."""
    error: float
    """The length of the difference over that of the reference's rows."""
    form: str = ""
    """The floating-point numbers of 8 bits, and their scales, to which it is rounded."""

    @property
    def words(self) -> str:
        """The kind of the matrix, in words."""
        if self.form:
            return f"the reference's, rounded to {self.form}"
        if not self.bits:
            return "close to the reference's, but neither equal nor rounded to a grid"
        bits = f"{self.bits} {'bit' if self.bits == 1 else 'bits'}"
        return f"the reference's, rounded to {bits} with a step for each {self.shared}"


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

    def group(self, name: str) -> int:
        """How many columns of a matrix share a scale; 0 if it was not quantized."""
        return self._packed[name][2] if name in self._packed else 0

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


def grid_steps(values: Tensor, block: int) -> Tensor | None:
    """The step of the grid on which the numbers of each block lie, for each number; None if a block has no grid.

    Example:
        >>> grid_steps(torch.tensor([0.0, 0.5, 1.5, 4.0]).double(), 4)
        tensor([0.5000, 0.5000, 0.5000, 0.5000], dtype=torch.float64)
    """
    if len(values) % block or block < 2:
        return None
    ordered = values.reshape(-1, block).sort().values
    gaps = ordered.diff()
    # Dequantized numbers are rounded to float32, or to 16 bits, once more.
    least = 2.0**-16 * ordered.abs().amax(1, keepdim=True)
    gap = gaps.masked_fill(gaps <= least, math.inf).amin(1, keepdim=True)
    if not bool(gap.isfinite().all()):
        return None
    steps = torch.full_like(gap, math.inf)
    for parts in range(1, _MOST_PARTS + 1):
        counts = (ordered - ordered[:, :1]) / (gap / parts)
        is_whole = ((counts - counts.round()).abs() <= 0.02).all(1, keepdim=True) & (counts[:, -1:] <= LEVELS)
        steps = torch.where(is_whole & steps.isinf(), gap / parts, steps)
    return steps.expand(-1, block).reshape(-1) if bool(steps.isfinite().all()) else None


def rounding(port: Tensor, reference: Tensor, form: str = "") -> Rounded | None:
    """How rows of a port differ from the reference's; None if not at all, or by rounding to 16 bits or finer.

    Rounded to a grid are rows of which each block lies on whole numbers of steps, of 256 levels at most, and whose
    numbers are the levels nearest to the reference's; those of the two levels at the ends may be clipped.

    Args:
        port: Rows of a matrix, in float64.
        reference: The same rows of the reference.
        form: How the port's file holds its numbers, if it holds them as fp8 with scales.

    Example:
        >>> row = torch.randn(1, 256, dtype=torch.float64)
        >>> step = row.abs().max() / 7
        >>> found = rounding((row / step).round() * step, row)
        >>> found.bits, found.shared
        (4, 'matrix')
    """
    unit, unit_there = (_unit(each) for each in (port, reference))
    off = (port - reference).abs()
    size = torch.maximum(port.abs(), reference.abs())
    # One rounding each; the smallest numbers of float16 have a fixed unit.
    if not bool(off.isfinite().all()) or bool((off <= 2 * max(unit, unit_there, 2.0**-16) * size + 2.0**-24).all()):
        return None
    error = float(off.norm() / reference.norm().clamp_min(1e-30))
    # Half the last place of e4m3 or e5m2; numbers next to 0 have a fixed unit, 2**-18 of the largest.
    half = 2.0 ** (-3 if "e5m2" in form else -4)
    if form and bool((off <= half * reference.abs() + 2.0**-14 * reference.abs().max()).all()):
        return Rounded(bits=8, shared="", error=error, form=form)
    for shared, one, other in _blocks(port, reference):
        levels = _levels(one, other, unit, _FIRST) and _levels(one, other, unit, _THEN)
        if levels:
            return Rounded(bits=math.ceil(math.log2(levels)), shared=shared, error=error)
    return Rounded(bits=0, shared="", error=error)


def _unit(values: Tensor) -> float:
    """Half the relative distance of the numbers of the coarsest dtype that holds all values."""
    narrow = (dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(values.to(dtype).double(), values))
    return torch.finfo(next(narrow, torch.float32)).eps / 2


def _blocks(port: Tensor, reference: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The units that may share one step, from the most to the fewest numbers: words, and the blocks of both sides."""
    rows, columns = port.shape
    yield "matrix", port.reshape(1, -1), reference.reshape(1, -1)
    if rows > 1:
        yield "row", port, reference
    if rows >= FEWEST:
        yield "column", port.T, reference.T
    for group in GROUPS:
        if columns % group == 0 and columns > group:
            yield f"group of {group} columns", port.reshape(-1, group), reference.reshape(-1, group)


def _levels(port: Tensor, reference: Tensor, unit: float, most: tuple[int, int]) -> int:
    """The levels of the grids on which blocks lie, of the block that has most; 0 if one of them lies on none.

    Of the blocks, and of the numbers of each, so many are looked at.
    """
    every, each = (max(1, size // some) for size, some in zip(port.shape, most, strict=True))
    port, reference = port[::every], reference[::every]
    lowest, highest = (found.reshape(-1, 1, 1) for found in (port.amin(1), port.amax(1)))
    values, there = (side[:, None, ::each] for side in (port, reference))
    counts = torch.arange(1, LEVELS, dtype=torch.float64)[:, None]
    is_end = (values == lowest) | (values == highest)
    made = []
    # Whole numbers of steps from 0 on, and from the lowest number on; shapes (blocks, counts, numbers).
    for start, reach in ((torch.zeros_like(lowest), torch.maximum(-lowest, highest)), (lowest, highest - lowest)):
        step = (reach / counts).clamp_min(1e-300)
        # The numbers, the step and the start are rounded.
        slack = 2 * unit * (values.abs() + torch.where(start == 0, 0.0, start.abs() + reach)) / step + 1e-9
        places = (values - start) / step
        is_whole = (places - places.round()).abs() <= slack
        is_near = ((values - there).abs() <= (0.5 + slack) * step + unit * there.abs()) | is_end
        # How likely a number off the grid is as near to it. Zeros and the two that make the grid say nothing.
        chances = torch.where(values == 0, 0.0, (2 * slack).clamp_max(1.0).log())
        chance = chances.sum(2) - 2 * chances.amin(2)
        levels = ((highest - lowest) / step).round().squeeze(2) + 1
        fits = (is_whole & is_near).all(2) & (chance < -_TELLING_ONE) & (levels <= LEVELS)
        made.append((fits, levels, chance))
    fits, levels, chance = (torch.cat(parts, 1) for parts in zip(*made, strict=True))
    is_flat = (lowest == highest).reshape(-1)
    first = fits.byte().argmax(1, keepdim=True)
    total = chance.gather(1, first).squeeze(1) + math.log(fits.shape[1])
    if not bool((fits.any(1) | is_flat).all()) or float(total[~is_flat].sum()) > -_TELLING:
        return 0
    return int(levels.gather(1, first).squeeze(1)[~is_flat].max())


def has_other_scales(port: Tensor, reference: Tensor, group: int) -> bool:
    """Whether groups of a port's rows have scales of others: each alone is the reference's, times its own number.

    Fits `reference = slope * port + shift` in each group of columns. Rounding leaves the slopes of one row together, as
    do a factor of the row, a gain folded into the columns and training: they then differ by about the relative error of
    the fit over the root of the group's size. Scales of other groups spread them over many times that.

    Args:
        port: Rows of a matrix, in float64.
        reference: The same rows of the reference.
        group: How many columns share a scale.
    """
    if port.shape[1] % group or port.shape[1] < 2 * group:
        return False
    one, other = (each.reshape(len(each), -1, group) for each in (port, reference))
    one, other = (each - each.mean(2, keepdim=True) for each in (one, other))
    slopes = (one * other).sum(2, keepdim=True) / one.square().sum(2, keepdim=True).clamp_min(1e-30)
    noise = (other - slopes * one).norm() / other.norm().clamp_min(1e-30)
    spread = (slopes - slopes.median(1, keepdim=True).values).abs().mean()
    return float(spread) > max(MOST_SPREAD * float(noise) / math.sqrt(group), LEAST_SPREAD)
