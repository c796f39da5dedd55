"""`migrate`: the gain of a norm is divided by scales, and the columns of its readers are multiplied by them.

    W (g * z + b) = (W diag(s)) (g / s * z + b / s)

Channels that are large where they enter a matrix become smaller there, and the matrix takes what they lose. The scales
come from a file, or from the largest |x| of each channel:

    s = max|x|^alpha / max|w|^(1 - alpha)        w: the column of the channel, in all readers

Source:
    Xiao et al. 2023, arXiv:2211.10438 (SmoothQuant, equation 4); Lin et al. 2024, arXiv:2306.00978 (AWQ).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import nearest_powers, partition
from normkit.checkpoint.given_files import GivenTensors, tensors_given
from normkit.checkpoint.reader import Source
from normkit.errors import InputError
from normkit.models.graph import Graph, Linear
from normkit.text import quoted, shortened

LARGEST, MEAN = ".max", ".mean"
"""The ends of the names of the statistics that `inspect --activations` writes, behind the path of a norm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """Scales for the channels of norms, or the largest |x| that they are computed from."""

    vectors: Mapping[str, Tensor]
    """Path of a norm, or of a linear map that reads one -> float64, of shape (n,)."""
    sha256: str
    """Hash of the file, or of the names and values in memory."""
    alpha: float | None = None
    """If given, the vectors are the largest |x| of each channel, and this is alpha in the formula."""
    powers_of_two: bool = False
    """Each scale is rounded to the nearest power of two."""

    @property
    def options(self) -> dict[str, Any]:
        """The part of this that a certificate holds, by the names of `OPTIONS`."""
        found: dict[str, Any] = {"scales": self.sha256}
        if self.alpha is not None:
            found["alpha"] = self.alpha
        return found | ({"powers_of_two": True} if self.powers_of_two else {})


def asked_scales(
    given: GivenTensors | None, *, alpha: float | None = None, powers_of_two: bool = False
) -> Scales | None:
    """Scales from a safetensors file, or from tensors by name; None if none are given.

    Args:
        given: Vectors, named by norms or by linear maps that read one; `normkit inspect --activations` writes such
            a file of |x|, with ".max" behind the names.
        alpha: 0 to 1: the vectors are the largest |x|. None: they are the scales.
        powers_of_two: Round each scale to a power of two.

    Raises:
        InputError: If it is no such file, a vector is not one, or holds what is no scale.
    """
    if given is None:
        if alpha is not None or powers_of_two:
            raise InputError("alpha and powers_of_two are for migrate: give its file with scales")
        return None
    if alpha is not None and not 0 <= alpha <= 1:
        raise InputError(f"alpha is a number from 0 to 1, got {alpha:g}")
    vectors, digest = tensors_given(given, "scales", axes=1)
    found = {name: values.to(torch.float64) for name, values in vectors.items()}
    for name, values in found.items():
        wrong = values[values < 0 if alpha is not None else values <= 0]
        if wrong.numel():
            words = "positive" if alpha is None else "not negative"
            raise InputError(f"{quoted(name)} of the scales holds {float(wrong[0]):g}; expected are {words} numbers")
    return Scales(vectors=found, sha256=digest, alpha=alpha, powers_of_two=powers_of_two)


def scales_of_norms(scales: Scales, graph: Graph, source: Source) -> dict[str, Tensor]:
    """Path of each norm that scales are given for -> its scales, in float64.

    With alpha, a channel that is 0 on either side has the scale 1, and a norm that only heads read has none.

    Raises:
        InputError: If a name is that of no norm and no linear map, a vector has the wrong length, two vectors for one
            norm differ, or no vector is for a norm.
    """
    norms = {norm.name: norm for norm in graph.norms}
    by_point = {norm.gives: norm for norm in graph.norms}
    linears = {linear.name: linear for linear in graph.linears}
    found: dict[str, Tensor] = {}
    for key, values in scales.vectors.items():
        name = key if scales.alpha is None else key.removesuffix(MEAN).removesuffix(LARGEST)
        if name not in norms and name not in linears:
            if name.removesuffix(MEAN).removesuffix(LARGEST) in norms:
                raise InputError(
                    f"{quoted(key)} is a size that inspect --activations measured, and no scale; give --alpha 0.5 "
                    "(alpha=0.5), with which scales are made of sizes"
                )
            raise InputError(
                f"{quoted(key)} of the scales is no norm and no linear map of {graph.architecture}; "
                f"expected names such as {shortened(list(norms), 2)}"
            )
        norm = norms.get(name) or by_point.get(linears[name].reads)
        readers = graph.readers(norm.gives) if norm else ()
        if norm is None or not readers or (scales.alpha is not None and key.endswith(MEAN)):
            continue
        # A reader may take several rows side by side.
        face, axis = (norm.weight, 0) if norm.weight else (_stored(readers[0], source), readers[0].in_axis)
        size = source.tensors[face].shape[axis]
        if values.numel() != size:
            raise InputError(f"expected {size} numbers for {name} in the scales, got {values.numel()}")
        other = found.get(norm.name, values)
        if scales.alpha is None and not bool((values == other).all()):
            raise InputError(f"{norm.name} has one scale a channel, and {name} has others than its other readers")
        found[norm.name] = torch.maximum(values, other)
    if scales.alpha is not None:
        inner = [norm for norm in graph.norms if not all(reader.is_head for reader in graph.readers(norm.gives))]
        found = {
            norm.name: _balanced(found[norm.name], graph.readers(norm.gives), source, scales.alpha)
            for norm in inner
            if norm.name in found
        }
    if not found:
        raise InputError(f"the scales hold nothing for a norm of {graph.architecture} with readers")
    return {name: nearest_powers(values) if scales.powers_of_two else values for name, values in found.items()}


def _balanced(largest: Tensor, readers: tuple[Linear, ...], source: Source, alpha: float) -> Tensor:
    """max|x|^alpha / max|w|^(1 - alpha)."""
    weights = torch.zeros_like(largest)
    for reader in readers:
        name = _stored(reader, source)
        shape, (rows_in_all, columns) = source.tensors[name].shape, source.tensors[name].matrix
        for start, stop in partition(rows_in_all, columns):
            sizes = source.rows(name, start, stop).abs()
            if reader.in_axis == len(shape) - 1:
                places, most = torch.arange(columns) % len(largest), sizes.amax(0)
            else:
                inner = math.prod(shape[reader.in_axis + 1 : -1])
                places, most = torch.arange(start, stop) // inner % len(largest), sizes.amax(1)
            weights.scatter_reduce_(0, places, most.to(torch.float64), "amax")
    is_dead = (largest == 0) | (weights == 0)
    return torch.where(is_dead, 1.0, largest**alpha / weights.where(~is_dead, torch.ones(())) ** (1 - alpha))


def _stored(reader: Linear, source: Source) -> str:
    return reader.weight if reader.weight in source.tensors else str(reader.tied_to)
