"""Batch norms that a port lacks because they are in the map beside them, as ONNX exporters put them there silently.

before   W' = a W per output channel, b' = (b - mean) a + bias, with a = gain / sqrt(variance + eps)
after    W' = W a per input channel, b' = b + sum W s, with s = bias - mean a

Each channel of the port's weight is a multiple of the reference's. Which multiple, and which bias, is what was folded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.comparison.relations import plainest
from normkit.comparison.running_statistics import RunningStatistics, found_statistics
from normkit.comparison.scaled_maps import SPARE, ScaledMap, StoredNorm, eps_of, read, scaled_maps, stored_norm
from normkit.comparison.weights import Weights
from normkit.text import counted, significant


@dataclass(frozen=True, kw_only=True)
class FoldedBatchNorm:
    """The fate of a batch norm of the reference that the port lacks."""

    path: str
    """Path of the norm in the reference."""
    into: str
    """Name of the port's weight that holds it, or should."""
    words: str
    """In a few words: "folded: exact to 2 roundings", "folded with eps 0.001 instead of 1e-05", ..."""
    is_right: bool | None
    """None where the reference does not say its eps."""
    roundings: float | None
    """The largest difference from the exact fold, in half units in the last place; None if it is another fold."""
    names: tuple[str, ...]
    """Names of the tensors of both that are told by this."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "names": [*self.names]}


Told = tuple[bool | None, str, float | None]
"""Whether a norm is folded rightly, in words, and the roundings by which it is off."""

_UNSCALED = "into the bias alone"
_AS_BEFORE = "with the bias that the map had in place of its own"
_NOTHING = "without any bias"
_DROPPED = "not folded but dropped: the weight beside it is the reference's own"


def compare_folded(
    port: Weights, reference: Weights, running: Sequence[RunningStatistics]
) -> tuple[FoldedBatchNorm, ...]:
    """Find the batch norms of a reference in the convolutions and linear maps of a port that lacks them.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        running: The batch norms that both have, as `compare_running` found them.

    Raises:
        ModelError: If a file cannot be read to its end.

    Example:
        >>> from torch import nn
        >>> from normkit.checkpoint.memory import fold
        >>> from normkit.comparison.weights import weights_of
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
        >>> there = weights_of({name: value.clone() for name, value in model.state_dict().items()})
        >>> _ = fold(model, batch=torch.randn(1, 3, 8, 8))
        >>> compare_folded(weights_of(model), there, ())[0].words.startswith("folded: exact to")
        True
    """
    kept = {each.reference_path: each for each in running}
    missing = {path: names for path, names in found_statistics(reference).items() if path not in kept}
    stays = {path: each for path, each in kept.items() if not each.is_right}
    if not missing and not stays:
        return ()
    eps = eps_of(reference)
    norms = [
        stored_norm(reference, path, names, eps)
        for path, names in found_statistics(reference).items()
        if path in missing or path in stays
    ]
    own = {path: stored_norm(port, path, (each.names[0], each.names[1]), eps) for path, each in stays.items()}
    maps = list(scaled_maps(port, reference))
    homes = {norm.path: _by_closeness(norm, maps) for norm in norms}
    found: dict[str, FoldedBatchNorm] = {}
    taken: set[tuple[str, int]] = set()

    def settle(norm: StoredNorm, each: ScaledMap, axis: int, told: Told) -> None:
        is_right, words, roundings = told
        here = own.get(norm.path)
        names = (*norm.names, *each.names, *(here.names if here else ()))
        found[norm.path] = FoldedBatchNorm(
            path=norm.path, into=each.name, words=words, is_right=is_right, roundings=roundings, names=names
        )
        taken.add((each.name, axis))

    # First where a norm belongs, then elsewhere; right folds before wrong ones.
    for is_home, faults in ((True, False), (False, False), (True, True)):
        # A map whose own norm is in it has none to lose.
        lost = {maps[0].name: path for path, maps in homes.items() if maps and path not in found}
        for norm in norms:
            if norm.path in found:
                continue
            for each in homes[norm.path][: 1 if is_home else None]:
                if (each.name, 0) in taken:
                    continue
                told = _before(norm, each, own.get(norm.path), faults=faults)
                if told and not is_home and each.name in lost:
                    told = False, f"folded into the map of {lost[each.name]}", None
                if told:
                    settle(norm, each, 0, told)
                    break
        for norm in norms if is_home and not faults else ():
            for each in maps:
                is_free = norm.path not in found and norm.path not in own and (each.name, 1) not in taken
                if is_free and (told := _after(norm, each, reference)):
                    settle(norm, each, 1, told)
    return tuple(found[norm.path] for norm in norms if norm.path in found)


def _before(norm: StoredNorm, each: ScaledMap, own: StoredNorm | None, *, faults: bool) -> Told | None:
    """The part of the norm behind a map that the map holds; None if none is seen, or, unless asked for, a fault."""
    sizes = {axis: len(times) for axis, (times, _) in each.times.items()}
    # A transposed convolution has its outputs on the second axis, as a convolution its inputs.
    axis = next((at for at in each.outputs if sizes.get(at) == len(norm.gain)), None)
    if axis is None:
        return None
    times, off = each.times[axis]
    # The formula of the port's own norm behind the map, where it has one.
    stays = torch.ones_like(norm.gain) if own is None else own.scale(norm.eps or own.eps or 0.0)
    added = torch.zeros_like(norm.gain) if own is None else own.bias - own.mean * stays
    scale, bias = times * stays, (0.0 if each.bias is None else each.bias) * stays + added
    if (held := _scale(norm, scale, each.unit)) is None:
        return None
    words, expected = held
    used = torch.where(scale.isfinite(), scale, expected)
    said, off_by = _shift(norm, each, bias, used)
    if words == _UNSCALED and said in (_AS_BEFORE, _NOTHING):
        words, said = "", _DROPPED
    if words or said:
        fault = said if said == _DROPPED else f"folded {'; '.join(filter(None, (words, said)))}"
        return (False, fault, None) if faults else None
    roundings = max(off + _apart(used, expected) / each.unit, off_by)
    if norm.eps is None:
        eps = _fitted(norm, scale, SPARE * each.unit)
        return None, f"{_exact(roundings)}, with eps {eps:.3g}, which the reference does not state", roundings
    return True, _exact(roundings), roundings


def _exact(roundings: float) -> str:
    return f"folded: exact to {counted(max(1, math.ceil(roundings)), 'rounding')}"


def _apart(given: Tensor, expected: Tensor) -> float:
    """The largest relative difference of a channel; infinity where one of the two alone is 0."""
    known = given.isfinite() & (expected != 0)
    if not bool(given.isfinite().any()) or bool((given[given.isfinite() & (expected == 0)] != 0).any()):
        return math.inf
    return float((given[known] / expected[known] - 1).abs().max()) if bool(known.any()) else 0.0


def _scale(norm: StoredNorm, scale: Tensor, unit: float) -> tuple[str, Tensor] | None:
    """The fault of a scale, "" if it is the norm's, and the scale that it is within rounding; None if unknown."""
    spare, stated = SPARE * unit, norm.eps
    if stated is not None and _apart(scale, norm.scale(stated)) <= spare:
        return "", norm.scale(stated)
    eps = _fitted(norm, scale, spare)
    if eps is not None and _apart(scale, norm.scale(eps)) <= spare:
        return ("" if stated is None else f"with eps {eps:.3g} instead of {stated:.3g}"), norm.scale(eps)
    root = (norm.var + (stated or 0.0)).sqrt()
    others = {
        "without its gain": 1 / root,
        "with eps added to the deviation, not to the variance": norm.gain / (norm.var.sqrt() + (stated or 0.0)),
        "with the variance in place of its root": norm.gain / root.square(),
        "without its running variance": norm.gain,
        "multiplied by the standard deviation, not divided": norm.gain * root,
        _UNSCALED: torch.ones_like(root),
    }
    words = next((said for said, value in others.items() if _apart(scale, value) <= spare), "")
    if not words:
        words = _of_variance(norm, scale, spare)
    return (words, others.get(words, scale)) if words else None


def _shift(norm: StoredNorm, each: ScaledMap, bias: Tensor, scale: Tensor) -> tuple[str, float]:
    """The fault of the bias of a map that holds the scale of the norm behind it, or ""; and half units."""
    own = torch.zeros_like(scale) if each.bias_there is None else each.bias_there
    size = (own.abs() + norm.mean.abs()) * scale.abs() + norm.bias.abs()
    expected = {
        "": (own - norm.mean) * scale + norm.bias,
        "with the sign of the running mean turned": (own + norm.mean) * scale + norm.bias,
        "without its running mean": own * scale + norm.bias,
        "without its bias": (own - norm.mean) * scale,
        "with the sign of its bias turned": (own - norm.mean) * scale - norm.bias,
        "without the bias that the map had": norm.bias - norm.mean * scale,
        "with the bias that the map had not scaled": own - norm.mean * scale + norm.bias,
        "with a running mean that is not scaled": own * scale - norm.mean + norm.bias,
        _NOTHING: torch.zeros_like(scale),
        _AS_BEFORE: own,
    }
    # The scale itself is off by as much, and each product and sum is rounded.
    for words, value in expected.items():
        off = float(((bias - value).abs() / (each.unit * size.clamp_min(each.unit))).max())
        if off <= 2 * SPARE:
            return words, off
    off = float((bias - expected[""]).abs().max() / expected[""].abs().max().clamp_min(each.unit))
    return f"with another bias: it differs by {significant(off)} of the largest", math.inf


def _after(norm: StoredNorm, each: ScaledMap, reference: Weights) -> Told | None:
    """Whether a map holds the norm before it, rightly; None if that is not seen."""
    times, off = each.times.get(1, (torch.empty(0), 0.0))
    if len(times) != len(norm.gain) or norm.eps is None or not bool(times.isfinite().all()):
        return None
    scale = norm.scale(norm.eps)
    apart = float((times / scale - 1).abs().max()) / each.unit
    weight = read(reference, each.other)
    axes = [1, -1, *[1] * (weight.dim() - 2)]
    moved = weight * (norm.bias - norm.mean * scale).view(axes)
    own = torch.zeros(len(moved), dtype=torch.float64) if each.bias_there is None else each.bias_there
    given = torch.zeros_like(own) if each.bias is None else each.bias
    size = own.abs() + moved.abs().flatten(1).sum(1)
    off_by = float(((given - own - moved.flatten(1).sum(1)).abs() / (each.unit * size.clamp_min(each.unit))).max())
    # One rounding of each term of the sum at most.
    if apart > SPARE or off_by > SPARE + math.sqrt(moved[0].numel()):
        return None
    roundings = max(off + apart, off_by)
    return True, _exact(roundings).replace("folded", "folded into the map after it", 1), roundings


def _fitted(norm: StoredNorm, scale: Tensor, spare: float) -> float | None:
    """The eps with the fewest digits for which a scale is gain / sqrt(variance + eps) within rounding."""
    known = scale.isfinite() & (scale != 0) & (norm.gain != 0)
    if not bool(known.any()):
        return norm.eps
    sums = (norm.gain[known] / scale[known]).square()
    low, high = (
        float(each)
        for each in ((sums * (1 - 2 * spare) - norm.var[known]).max(), (sums * (1 + 2 * spare) - norm.var[known]).min())
    )
    if low > high or high < 0:
        return None
    if norm.eps is not None and low <= 0:
        return 0.0
    usual = (each for each in (1e-5, 1e-3, 1e-4, 1e-6, 0.0) if low <= each <= high)
    return next(usual, plainest(max(low, 0.0), high))


def _of_variance(norm: StoredNorm, scale: Tensor, spare: float) -> str:
    """The words on a scale of which the running variance is a multiple of the reference's; "" if it is none."""
    known = scale.isfinite() & (scale != 0) & (norm.gain != 0) & (norm.var > 0)
    if not bool(known.any()):
        return ""
    sums, var = (norm.gain[known] / scale[known]).square(), norm.var[known]
    eps = norm.eps or 0.0
    low, high = float(((sums * (1 - 2 * spare) - eps) / var).max()), float(((sums * (1 + 2 * spare) - eps) / var).min())
    if low > high or low <= 0:
        return ""
    times = (low + high) / 2
    if times == 1:
        return ""
    # n / (n - 1) makes a variance over n values unbiased, and back.
    count = times / (times - 1) if times > 1 else 1 / (1 - times)
    kind = "unbiased, the reference's biased" if times > 1 else "biased, the reference's unbiased"
    is_count = abs(count - round(count)) <= 2 * count * count * (high - low) + 1e-6 and 2 <= round(count) <= 2**24
    of = f", as if it were {kind}, over {round(count)} values" if is_count else ""
    return f"with a running variance {times:.7g} times the reference's{of}"


def _by_closeness(norm: StoredNorm, maps: Sequence[ScaledMap]) -> list[ScaledMap]:
    """The maps with as many outputs, the one that the norm most likely stands behind first.

    By the folder that both lie in, the number that both names end on (conv2 and bn2), and the order of the tensors.
    """
    above, _, last = norm.path.rpartition(".")

    def distance(each: ScaledMap) -> tuple[bool, bool, bool, int]:
        beside, _, name = each.other.rpartition(".")[0].rpartition(".")
        number, number_there = (re.search(r"(?<=\D)\d+$", word) for word in (last, name))
        is_numbered = number is not None and number_there is not None and number[0] == number_there[0]
        apart = norm.place - each.place
        return beside != above, not is_numbered, apart < 0, abs(apart)

    size = len(norm.gain)
    fitting = [each for each in maps if any(at in each.times and len(each.times[at][0]) == size for at in each.outputs)]
    return sorted(fitting, key=distance)
