"""Batch norms as they are stored, and weights of two models whose channels are multiples of each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.checkpoint.plan import FLOATS
from normkit.checkpoint.reader import TORCH, TensorInfo
from normkit.comparison.parameter_pairs import pair_paths
from normkit.comparison.parameters import BIASES, GAINS
from normkit.comparison.weights import Weights
from normkit.errors import NormkitError

_LARGEST = 2**25
"""The most numbers of a weight that is read; it is held whole, in float64."""

SPARE = 5.0
"""Half units in the last place that a right fold is off by at most: variance + eps, its root, the division and the
product are rounded once each, in any order, and what is read may be rounded once more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredNorm:
    """A batch norm as it is stored, in float64; gains of 1 and biases of 0 where it has none."""

    path: str
    names: tuple[str, ...]
    """Names of its tensors."""
    place: int
    """The place of its mean among the tensors."""
    gain: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    eps: float | None
    """None if nothing states it."""

    def scale(self, eps: float) -> Tensor:
        """By what each channel is multiplied, with this eps."""
        return self.gain / (self.var + eps).sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaledMap:
    """A weight of both sides whose channels are multiples of each other."""

    name: str
    """In the port."""
    other: str
    """In the reference."""
    place: int
    """Among the reference's tensors."""
    names: tuple[str, ...]
    """The names of the weight and of its bias, in both."""
    times: Mapping[int, tuple[Tensor, float]]
    """Axis -> multiple of each channel, NaN where the reference has zeros; and half units by which they are off."""
    bias: Tensor | None
    """The port's."""
    bias_there: Tensor | None
    """The reference's."""
    outputs: tuple[int, ...]
    """The axes that may be those of its outputs."""
    unit: float
    """Half a unit in the last place of the coarser dtype, relative."""


def eps_of(reference: Weights) -> Mapping[str, float]:
    """The eps of the batch norms of a reference: stated beside its tensors, or that of its class of transformers."""
    if reference.runtime != "transformers" or not reference.settings.get("architectures"):
        return reference.eps
    from normkit.checkpoint.batch_norm_files import empty_model

    try:
        model = empty_model(reference.settings, Path(reference.name))
    except NormkitError:
        return reference.eps
    norms = {path: norm.eps for path, norm in model.named_modules() if isinstance(norm, _BatchNorm)}
    return {**reference.eps, **norms}


def stored_norm(weights: Weights, path: str, names: tuple[str, str], eps: Mapping[str, float]) -> StoredNorm:
    """The batch norm with the mean and the variance of these names; `eps` is that of each path."""
    stem = re.sub(r"(running_mean|moving_mean)$", "", names[0])
    tensors = weights.source.tensors
    gain, bias = (next((f"{stem}{end}" for end in ends if f"{stem}{end}" in tensors), "") for ends in (GAINS, BIASES))
    mean, var = (read(weights, name).flatten() for name in names)
    return StoredNorm(
        path=path,
        names=(*names, *(name for name in (gain, bias, f"{stem}num_batches_tracked") if name in tensors)),
        place=[*tensors].index(names[0]),
        gain=read(weights, gain).flatten() if gain else torch.ones_like(var),
        bias=read(weights, bias).flatten() if bias else torch.zeros_like(var),
        mean=mean,
        var=var,
        eps=eps.get(path, eps.get("")),
    )


def read(weights: Weights, name: str) -> Tensor:
    """A tensor in float64."""
    info = weights.source.tensors[name]
    return weights.source.rows(name, 0, info.matrix[0]).to(torch.float64).view(info.shape)


def scaled_maps(port: Weights, reference: Weights) -> Iterator[ScaledMap]:
    """The weights whose channels are multiples of the reference's: paired by name, else by their values."""
    sides = [[name for name, info in each.source.tensors.items() if _is_weight(info)] for each in (port, reference)]
    known = [port.names.get(name, (name,))[0] for name in sides[0]]
    pairs = {sides[0][one]: sides[1][other] for one, other in pair_paths(known, sides[1])}
    left = [name for name in sides[1] if name not in pairs.values()]
    places = {name: place for place, name in enumerate(reference.source.tensors)}
    for name, called in zip(sides[0], known, strict=True):
        for other in [pairs[name]] if name in pairs else left:
            shape, shape_there = port.source.tensors[name].shape, reference.source.tensors[other].shape
            if shape not in (shape_there, shape_there[::-1] if len(shape) == 2 else shape_there):
                continue
            given, there = read(port, name), read(reference, other)
            dtypes = {TORCH[each.source.tensors[at].dtype] for each, at in ((port, name), (reference, other))}
            unit = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
            if shape != shape_there:
                given = given.T
            times = {axis: found for axis in (0, 1) if (found := _multiple(given, there, axis, unit)) is not None}
            if times:
                own, beside = _bias(port, name, called), _bias(reference, other, other)
                held = [(each, at) for each, at in ((port, own), (reference, beside)) if at]
                sizes = {math.prod(each.source.tensors[at].shape) for each, at in held}
                yield ScaledMap(
                    name=name,
                    other=other,
                    place=places[other],
                    names=tuple(each for each in (name, other, own, beside) if each),
                    times=times,
                    bias=read(port, own).flatten() if own else None,
                    bias_there=read(reference, beside).flatten() if beside else None,
                    outputs=tuple(axis for axis in (0, 1)[: there.dim() - 1] if sizes <= {there.shape[axis]}),
                    unit=unit,
                )
                left = [each for each in left if each != other]
                break


def _is_weight(info: TensorInfo) -> bool:
    return len(info.shape) >= 2 and info.dtype in FLOATS and 0 < math.prod(info.shape) <= _LARGEST


def _multiple(given: Tensor, there: Tensor, axis: int, unit: float) -> tuple[Tensor, float] | None:
    """By what each channel along an axis was multiplied, and half units by which that is off; None if it was not."""
    one, other = (each.movedim(axis, 0).flatten(1) for each in (given, there))
    times = (one * other).sum(1) / other.square().sum(1)
    made = times.nan_to_num().unsqueeze(1) * other
    least = torch.finfo(torch.float16 if unit > 2.0**-12 else torch.float32).smallest_normal
    off = float(((one - made).abs() / (unit * made.abs().clamp_min(least))).max())
    return (times, off) if off <= SPARE else None


def _bias(weights: Weights, name: str, called: str) -> str:
    """The name of the bias beside a weight: by its name, else the vector after it."""
    tensors = weights.source.tensors
    sizes = tensors[name].shape[:2]
    stem = called.rpartition(".")[0]
    for each in tensors:
        if stem and f"{stem}.bias" in (each, *weights.names.get(each, ())):
            return each
    if called == name and "." in name:
        return ""
    names = [*tensors]
    later = names[names.index(name) + 1 :][:1]
    return later[0] if later and len(tensors[later[0]].shape) == 1 and tensors[later[0]].shape[0] in sizes else ""
