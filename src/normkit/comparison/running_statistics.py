"""Running statistics of batch norms, as they are stored: a port's against its reference's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.comparison.weights import Weights
from normkit.text import significant

_MEAN = re.compile(r"(?:batch_stats[./])?(.+?)[./_](?:~[./])?(running_mean|moving_mean|mean_ema|mean)([./]average)?")
_VARIANCE = {"running_mean": "running_var", "moving_mean": "moving_variance", "mean": "var", "mean_ema": "var_ema"}
"""Name of a mean -> of the variance beside it, in torch, Keras, flax and haiku."""

_ROUNDINGS = {"BF16": 2.0**-7, "F16": 2.0**-10}
"""Dtype of storage -> twice the largest share of a number that rounding to it takes; 2^-22 for the wider ones."""
_SMALLEST = 1e-7
"""Float16 has no number between 0 and 6e-8."""


@dataclass(frozen=True, kw_only=True)
class RunningStatistics:
    """Mean and variance of one batch norm against the reference's."""

    path: str
    """Path of the norm in the port."""
    reference_path: str
    """Path of the norm in the reference."""
    words: str
    """Their relation: "equal", "as initialised (mean 0, variance 1): not converted", ..."""
    is_right: bool
    names: tuple[str, ...]
    """Names of the tensors, in the port and in the reference."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "names": [*self.names]}


def compare_running(
    port: Weights, reference: Weights, paths: Mapping[str, str] | None = None
) -> tuple[RunningStatistics, ...]:
    """Compare the running mean and variance of each norm that has them on both sides.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        paths: Path of a norm in the port -> its path in the reference; the same path by default.

    Raises:
        ModelError: If a file cannot be read to its end.

    Example:
        >>> from normkit.comparison.weights import weights_of
        >>> trained = {"bn.running_mean": torch.randn(8), "bn.running_var": torch.rand(8)}
        >>> fresh = {"bn.running_mean": torch.zeros(8), "bn.running_var": torch.ones(8)}
        >>> compare_running(weights_of(fresh), weights_of(trained))[0].words
        'as initialised (mean 0, variance 1): not converted'
    """
    ours, theirs = found_statistics(port), found_statistics(reference)
    given = {_plain(path): _plain(other) for path, other in (paths or {}).items()}
    pairs = {path: given.get(path, path) for path in ours if given.get(path, path) in theirs}
    rest = [path for path in ours if path not in pairs]
    rest_there = [path for path in theirs if path not in pairs.values()]
    if len(rest) == len(rest_there):
        pairs |= dict(zip(rest, rest_there, strict=True))
    found = []
    for path, other in pairs.items():
        one, two = _read(port, ours[path]), _read(reference, theirs[other])
        dtypes = [port.source.tensors[ours[path][0]].dtype, reference.source.tensors[theirs[other][0]].dtype]
        words = _relation(one, two, max(_ROUNDINGS.get(dtype, 2.0**-22) for dtype in dtypes))
        names, is_right = (*ours[path], *theirs[other]), words == "equal"
        found.append(RunningStatistics(path=path, reference_path=other, words=words, is_right=is_right, names=names))
    return tuple(found)


def found_statistics(weights: Weights) -> dict[str, tuple[str, str]]:
    """Path of a norm -> the names of its mean and variance."""
    found = {}
    for name in weights.source.tensors:
        if match := _MEAN.fullmatch(name):
            variance = f"{name[: match.start(2)]}{_VARIANCE[match[2]]}{match[3] or ''}"
            if variance in weights.source.tensors:
                found[_plain(match[1])] = name, variance
    return found


def _plain(path: str) -> str:
    """The path of a norm with dots and without the name of flax's collection: its statistics are in another one."""
    return path.replace("/", ".").removeprefix("params.")


def _read(weights: Weights, names: tuple[str, str]) -> tuple[Tensor, Tensor]:
    tensors = weights.source.tensors
    mean, variance = (
        weights.source.rows(name, 0, tensors[name].matrix[0]).reshape(-1).to(torch.float64) for name in names
    )
    return mean, variance


def _relation(given: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], share: float) -> str:
    """The state of the port's mean and variance, where rounding explains this share of a number."""
    (mean, variance), (mean_there, variance_there) = given, expected
    if (mean.shape, variance.shape) != (mean_there.shape, variance_there.shape):
        return f"of another size: {len(mean)} numbers, the reference {len(mean_there)}"
    is_mean, is_variance = _are_alike(mean, mean_there, share), _are_alike(variance, variance_there, share)
    if is_mean and is_variance:
        return "equal"
    fresh = bool((mean == 0).all()), bool((variance == 1).all())
    if all(fresh):
        return "as initialised (mean 0, variance 1): not converted"
    if _are_alike(mean, variance_there, share) and _are_alike(variance, mean_there, share):
        return "mean and variance are swapped"
    parts = []
    if not is_mean:
        parts.append("mean all 0, as initialised: not converted" if fresh[0] else _apart("mean", mean, mean_there))
    if not is_variance and fresh[1]:
        parts.append("variance all 1, as initialised: not converted")
    elif not is_variance and _are_alike(variance.square(), variance_there, 4 * share):
        parts.append("the variance is the reference's standard deviation")
    elif not is_variance:
        parts.append(_apart("variance", variance, variance_there))
    return "; ".join(parts)


def _apart(name: str, given: Tensor, expected: Tensor) -> str:
    apart = float((given - expected).abs().max() / expected.abs().max().clamp_min(_SMALLEST))
    return f"{name} differs by up to {significant(apart)} of the largest"


def _are_alike(one: Tensor, other: Tensor, share: float) -> bool:
    return bool(((one - other).abs() <= share * other.abs() + _SMALLEST).all())
