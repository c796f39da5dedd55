"""The relation of one vector of parameters to another: equal, shifted, scaled, in another order; or none of these.

A relation is claimed only where it holds for every number, and where unrelated numbers would not show it by chance. The
second is measured: an unrelated vector with the same distribution meets the reference's value `e[i]` to within `t[i]`
with the probability `q[i]`, the share of values of `e` that near to `e[i]`. The evidence is `-sum(log2(q))` bits.
Constant vectors have none, so nothing but "equal" is claimed of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from normkit.comparison.quantized import BLOCKS, grid_steps
from normkit.files import finite
from normkit.text import significant

Kind = Literal[
    "equal",
    "offset",
    "negated",
    "scaled",
    "reciprocal",
    "square",
    "exponential",
    "permuted",
    "constant",
    "copied",
    "swapped",
    "folded",
    "different",
    "not finite",
    "undecided",
]

EVIDENCE = 24.0
"""The least bits of evidence for a relation: one unrelated pair in 16 million shows it by chance."""

# Bits that are paid for a fitted constant: as many as a 16-bit dtype has constants to choose from.
_FITTED = 16.0

ROUNDINGS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of safetensors that parameters are rounded to, the finest first."""

_COARSE = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""Those of eight bits: only a vector that is their rounding itself tells of them, and none within a unit of theirs."""

_OFFSETS = (1.0, -1.0, 2.0, -2.0)


@dataclass(frozen=True, kw_only=True)
class Relation:
    """The port's vector as a function of the reference's."""

    kind: Kind
    constant: float | None = None
    """The number added ("offset"), the factor ("scaled"), or the value of all elements ("constant")."""
    rounding: str = ""
    """The dtype to which the function was rounded, such as "bfloat16"; "" if it holds exactly."""
    step: float | None = None
    """The largest step of the quantization within which it holds."""
    is_rounded_once: bool = True
    """Every number is the function, correctly rounded; else it lies within one unit of that dtype."""
    is_reference_rounded: bool = False
    """It is the reference's vector that was rounded to that dtype, and the port's has more digits."""
    order: str = ""
    """How a permuted vector is arranged, if that is known: "reversed", "rotary halves interleaved" and the like."""
    other: str = ""
    """Path of the reference's norm whose values these are ("copied", "swapped")."""
    place: str = ""
    """That norm in words, as seen from the norm itself: "the next layer"."""
    distance: float = 0.0
    """The largest difference from the reference, over the largest absolute value there."""
    differing: float = 0.0
    """The share of the numbers that differ from the reference."""
    candidates: tuple[Relation, ...] = ()
    """The relations that all hold where none is decided."""
    reason: str = ""
    """Why it is undecided, or what else is known."""

    @property
    def words(self) -> str:
        """The relation in a few words, such as "reference + 1, rounded to bfloat16"."""
        return _words(self)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that makes two norms' relations the same kind of finding."""
        constant = None if self.kind == "scaled" else self.constant
        candidates = tuple(each.key for each in self.candidates)
        how = (self.rounding, self.step is None, self.is_rounded_once, self.is_reference_rounded)
        return (self.kind, constant, how, self.order, self.place, candidates, "" if candidates else self.reason)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        candidates = [each.to_json() for each in self.candidates]
        return {**vars(self), "words": self.words, "distance": finite(self.distance), "candidates": candidates}


def relation(port: Tensor, reference: Tensor, dtype: str, reference_dtype: str) -> Relation:
    """The relation of a vector to the reference's.

    Args:
        port: The vector, in float64, shape (n,).
        reference: The reference's, in float64, shape (n,).
        dtype: The dtype in which the vector is stored, as safetensors writes it.
        reference_dtype: That of the reference's.

    Returns:
        The relation; "undecided" where several hold, or where the numbers are too few or too much alike to tell.

    Example:
        >>> gain = torch.randn(64, dtype=torch.float64)
        >>> relation(gain + 1, gain, "F64", "F64").words
        'reference + 1'
        >>> relation(torch.zeros(64).double(), -torch.ones(64).double(), "F32", "F32").words
        'undecided: reference + 1, or all 0'
    """
    if not bool(port.isfinite().all()):
        count = int((~port.isfinite()).sum())
        return Relation(kind="not finite", reason=f"{count} of {len(port)} numbers are NaN or infinite")
    if not bool(reference.isfinite().all()):
        return Relation(kind="undecided", reason="the reference holds numbers that are NaN or infinite")
    top = float(reference.abs().max()) if len(reference) else 0.0
    gap = float((port - reference).abs().max()) if len(reference) else 0.0
    apart = Relation(
        kind="different",
        distance=gap / top if top else (math.inf if gap else 0.0),
        differing=float((port != reference).double().mean()) if len(reference) else 0.0,
    )
    if gap == 0:
        return replace(apart, kind="equal")
    found: list[Relation] = []
    doubtful: list[Relation] = []
    for each, bits in _holding(port, reference, dtype, reference_dtype):
        (found if bits >= EVIDENCE else doubtful).append(each)
        if found:
            break
    if found:
        return replace(found[0], distance=apart.distance, differing=apart.differing)
    is_constant = bool((port == port[0]).all())
    level = Relation(kind="constant", constant=float(port[0]))
    if is_constant and not doubtful:
        return replace(level, distance=apart.distance, differing=apart.differing)
    if is_constant or doubtful:
        both = [*doubtful, *([level] if is_constant else [])]
        candidates = tuple({(each.kind, each.constant, each.order): each for each in reversed(both)}.values())[::-1]
        reason = f"{len(port)} numbers, {len(torch.unique(reference))} of them distinct, cannot tell"
        return replace(apart, kind="undecided", candidates=candidates, reason=reason)
    return apart


def _holding(port: Tensor, reference: Tensor, dtype: str, reference_dtype: str) -> Iterator[tuple[Relation, float]]:
    """The relations that hold, each with its bits of evidence, the plainest and sharpest first."""
    images = _images(reference)
    # That of the port itself first: what was rounded to it may have passed through another.
    names = [name for name in sorted(ROUNDINGS, key=lambda name: name != dtype) if not _is_held(name, dtype)]
    for made, image in images:
        if bool((port == image).all()):
            yield made, evidence(image, torch.zeros_like(image))
    stored = ROUNDINGS.get(dtype)
    known = ROUNDINGS | _COARSE
    for name in (*names, *_COARSE):
        for made, image in [(Relation(kind="equal"), reference), *images]:
            for once in (image.to(known[name]), image.to(torch.float32).to(known[name])):
                expected = (once if stored is None else once.to(stored)).to(torch.float64)
                if bool((port == expected).all()):
                    yield _said(made, name), evidence(expected, torch.zeros_like(image))
                    break
    if reference_dtype in ROUNDINGS:
        for constant in (0.0, *_OFFSETS):
            once = (port - constant).to(ROUNDINGS[reference_dtype]).to(torch.float64)
            if bool((once == reference).all()):
                made = Relation(kind="offset" if constant else "equal", constant=constant or None)
                made = replace(_said(made, reference_dtype), is_reference_rounded=True)
                yield made, evidence(reference, torch.zeros_like(reference))
    yield from _fitted(port, reference, names)
    yield from _permuted(port, reference, names)
    for name in ROUNDINGS:
        if _is_held(name, dtype) and _is_held(name, reference_dtype):
            continue
        for made, image in [(Relation(kind="equal"), reference), *images]:
            unit = units(torch.maximum(port.abs(), torch.maximum(image.abs(), reference.abs())), name)
            if bool(((port - image).abs() <= unit).all()):
                yield replace(_said(made, name), is_rounded_once=False), evidence(image, unit)
    yield from _within_steps(port, reference)


def _within_steps(port: Tensor, reference: Tensor) -> Iterator[tuple[Relation, float]]:
    """The reference, or that with 1 or 2 added, within one step of the grids on which the port's numbers lie."""
    for size in dict.fromkeys(min(block, len(port)) for block in BLOCKS):
        steps = grid_steps(port, size)
        if steps is None:
            continue
        for constant in (0.0, *_OFFSETS):
            image = reference + constant
            if bool(((port - image).abs() <= steps).all()):
                made = Relation(kind="offset" if constant else "equal", constant=constant or None)
                made = replace(made, step=float(steps.max()), is_rounded_once=False)
                yield made, evidence(image, steps) - _FITTED


def _images(reference: Tensor) -> list[tuple[Relation, Tensor]]:
    found = [(Relation(kind="offset", constant=constant), reference + constant) for constant in _OFFSETS]
    found.append((Relation(kind="negated"), -reference))
    if bool((reference == reference[0]).all()):
        return found
    if bool((reference != 0).all()):
        found.append((Relation(kind="reciprocal"), 1 / reference))
    found.append((Relation(kind="square"), reference.square()))
    found.append((Relation(kind="exponential"), reference.exp()))
    return [(made, image) for made, image in found if bool(image.isfinite().all())]


def _fitted(port: Tensor, reference: Tensor, names: list[str]) -> Iterator[tuple[Relation, float]]:
    """A factor or an offset for which every number is the rounded function: the intervals that each allows meet."""
    for name in names:
        if not bool((port == port.to(ROUNDINGS[name])).all()):
            continue
        half = units(port.abs(), name) / 2
        used = reference != 0
        if bool(used.any()) and bool((port[~used] == 0).all()):
            ends = torch.stack([(port - half)[used] / reference[used], (port + half)[used] / reference[used]])
            low, high = float(ends.amin(0).max()), float(ends.amax(0).min())
            if low <= high and not low <= 1 <= high and not low <= 0 <= high:
                factor = plainest(low, high)
                image = reference * factor
                yield _said(Relation(kind="scaled", constant=factor), name), evidence(image, half) - _FITTED
        low, high = float((port - half - reference).max()), float((port + half - reference).min())
        if low <= high and not low <= 0 <= high:
            constant = plainest(low, high)
            image = reference + constant
            yield _said(Relation(kind="offset", constant=constant), name), evidence(image, half) - _FITTED


def _permuted(port: Tensor, reference: Tensor, names: list[str]) -> Iterator[tuple[Relation, float]]:
    """The same numbers in another order, exactly or after rounding; with 1 or 2 added too."""
    ordered = port.sort().values
    if bool(ordered[0] == ordered[-1]):
        return
    for name in ("", *names):
        for constant in (0.0, *_OFFSETS):
            image = reference + constant
            image = image.to(ROUNDINGS[name]).to(torch.float64) if name else image
            if bool((image.sort().values == ordered).all()):
                order = _order(port, image)
                made = Relation(kind="permuted", constant=constant or None, order=order)
                # A named order says where each number is, as a fitted constant does.
                bits = evidence(port, torch.zeros_like(port)) - _FITTED if order else 0.0
                yield _said(made, name), max(bits, _likelihood_of_counts(image))


def _order(port: Tensor, reference: Tensor) -> str:
    """The name of a permutation that is often met."""
    size = len(port)
    if bool((port == reference.flip(0)).all()):
        return "reversed"
    heads = [
        width for width in dict.fromkeys((size, 256, 192, 128, 96, 80, 64, 32)) if size % width == 0 and width % 2 == 0
    ]
    for width in heads:
        grid = reference.reshape(-1, width)
        if bool((port == grid.reshape(-1, 2, width // 2).transpose(1, 2).reshape(-1)).all()):
            return f"rotary halves of {width} interleaved"
        if bool((port == grid.reshape(-1, width // 2, 2).transpose(1, 2).reshape(-1)).all()):
            return f"rotary pairs of {width} parted into halves"
    shifts = (port[0] == reference).nonzero().flatten().tolist()
    for shift in shifts[:8]:
        if bool((port == reference.roll(-shift)).all()):
            return f"rotated by {size - shift}"
    return ""


def evidence(expected: Tensor, tolerance: Tensor) -> float:
    """Bits against the case that an unrelated vector with one distribution lies within the tolerance everywhere."""
    ordered = expected.sort().values
    above = torch.searchsorted(ordered, expected + tolerance, right=True)
    below = torch.searchsorted(ordered, expected - tolerance)
    return float((math.log2(len(expected)) - (above - below).double().log2()).sum()) if len(expected) else 0.0


def _likelihood_of_counts(values: Tensor) -> float:
    """Bits against the case that another draw from the distribution has each value as often: Stirling's formula."""
    counts = torch.unique(values, return_counts=True)[1].double()
    if len(counts) < 2:
        return 0.0
    logs = (2 * math.pi * counts).log2().sum() - math.log2(2 * math.pi * len(values))
    # The multinomial probability of its own expectation, at most.
    return float(logs / 2)


def units(values: Tensor, dtype: str) -> Tensor:
    """The distance of neighbouring numbers of a dtype at each value."""
    limits = torch.finfo(ROUNDINGS[dtype])
    exponent = torch.frexp(values.clamp_min(limits.smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(values, limits.eps), exponent)


def _is_held(rounding: str, dtype: str) -> bool:
    """Whether rounding to the first changes nothing before a rounding to the second."""
    return rounding == "F32" and dtype in ("F16", "BF16")


def plainest(low: float, high: float) -> float:
    """The number of an interval with the fewest digits."""
    for digits in range(-6, 17):
        step = 10.0**-digits
        if (first := math.ceil(low / step)) * step <= high:
            best = min((first, math.floor(high / step)), key=abs)
            return round(best * step, max(0, digits))
    return (low + high) / 2


def _said(made: Relation, rounding: str) -> Relation:
    dtype = (ROUNDINGS | _COARSE).get(rounding)
    return replace(made, rounding="" if dtype is None else str(dtype).removeprefix("torch."))


def _words(found: Relation) -> str:
    """The relation in a few words."""
    if found.reason and (found.kind in ("different", "not finite", "folded", "constant") or not found.candidates):
        return found.reason
    constant = found.constant or 0.0
    added = f" {'+' if constant > 0 else '-'} {_number(abs(constant))}" if found.constant else ""
    apart = f",{added}" if added else ""
    plain = {
        "equal": "equal",
        "offset": f"reference{added}",
        "negated": "negated",
        "scaled": f"reference times {_number(constant)}",
        "reciprocal": "1 / reference",
        "square": "reference squared",
        "exponential": "exp(reference)",
        "permuted": f"reference{added} in another order",
        "constant": f"all {_number(constant)}",
        "copied": f"a copy of that of {found.place or found.other}{apart}",
        "swapped": f"swapped with {found.place or found.other}{apart}",
        "folded": "folded into its readers",
        "different": f"different by {significant(found.distance)} of the largest",
        "not finite": "not finite",
        "undecided": "undecided",
    }[found.kind]
    if found.kind == "undecided" and found.candidates:
        plain = f"undecided: {', or '.join(each.words for each in found.candidates)}"
    if found.order:
        plain = f"{plain} ({found.order})"
    if found.step is not None:
        return f"{plain} within a quantization step of {significant(found.step)}"
    if not found.rounding or (found.rounding == "float32" and found.is_rounded_once):
        return plain
    if found.is_reference_rounded:
        return f"{plain}, before the reference was rounded to {found.rounding}"
    how = ", rounded to" if found.is_rounded_once else " within a unit of"
    return f"{plain}{how} {found.rounding}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else significant(value)
