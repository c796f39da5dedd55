"""Vectors that are not their own reference's: which other norm's they are."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from normkit.comparison.parameter_pairs import kind_of, numbers_of
from normkit.comparison.relations import ROUNDINGS, Relation, relation

_OFFSETS = (0.0, 1.0, -1.0, 2.0, -2.0)


def origins(
    strangers: Mapping[str, tuple[Tensor, str]],
    references: Mapping[str, tuple[Tensor, str]],
    stands_for: Mapping[str, str],
) -> dict[str, Relation]:
    """Find the reference's norm that each vector is copied from, or swapped with; those of none are left out.

    Args:
        strangers: Name of a vector of the port that differs from its reference -> its values and dtype.
        references: Path of each norm of the reference -> its values and dtype.
        stands_for: Name of a vector of the port -> path of the reference's norm that it stands for.

    Returns:
        Name of the vector -> its relation, "copied" or "swapped", exact or after rounding, with 1 or 2 added too.
    """
    known: dict[bytes, list[str]] = defaultdict(list)
    dtypes = {dtype for _, dtype in strangers.values()} if strangers else set[str]()
    sizes = {len(values) for values, _ in strangers.values()}
    for path, (values, _) in references.items():
        if len(values) in sizes:
            for digest in _digests(values, dtypes):
                known[digest].append(path)
    found = {}
    for name, (values, dtype) in strangers.items():
        candidates = known.get(_digest(values), [])
        for path in sorted(candidates, key=lambda path: _distance(stands_for[name], path)):
            other, other_dtype = references[path]
            made = relation(values, other, dtype, other_dtype)
            if path != stands_for[name] and made.kind in ("equal", "offset"):
                shift = made.constant if made.kind == "offset" else None
                found[name] = replace(made, kind="copied", constant=shift, other=path)
                break
    held = {(stands_for[name], each.other) for name, each in found.items()}
    for name, each in found.items():
        is_swapped = (each.other, stands_for[name]) in held
        place = place_of(stands_for[name], each.other)
        found[name] = replace(each, kind="swapped" if is_swapped else "copied", place=place)
    return found


def place_of(path: str, other: str) -> str:
    """Where another norm is, as seen from a norm, so that the same mistake in many layers has the same words.

    Example:
        >>> place_of("h.3.ln_1", "h.4.ln_1"), place_of("h.3.ln_1", "h.3.ln_2"), place_of("h.3.ln_1", "ln_f")
        ('the next layer', 'ln_2 of the same layer', 'ln_f')
    """
    here, there = numbers_of(path), numbers_of(other)
    last = other.rpartition(".")[2]
    if here == there and here:
        return f"{last} of the same layer"
    apart = [two - one for one, two in zip(here, there, strict=False) if two != one]
    if kind_of(path) != kind_of(other) or len(apart) != 1:
        return other
    step = apart[0]
    if abs(step) == 1:
        return "the next layer" if step > 0 else "the layer before"
    return f"{abs(step)} layers {'further' if step > 0 else 'before'}"


def _distance(path: str, other: str) -> tuple[bool, int]:
    gaps = [abs(one - two) for one, two in zip(numbers_of(path), numbers_of(other), strict=False)]
    return kind_of(path) != kind_of(other), sum(gaps)


def _digests(values: Tensor, dtypes: Sequence[str] | set[str]) -> set[bytes]:
    found = set()
    for constant in _OFFSETS:
        image = values + constant
        found.add(_digest(image))
        for rounding in ROUNDINGS.values():
            once = image.to(rounding)
            found.add(_digest(once.to(torch.float64)))
            found |= {_digest(once.to(ROUNDINGS[each]).to(torch.float64)) for each in dtypes if each in ROUNDINGS}
    return found


def _digest(values: Tensor) -> bytes:
    # A negative zero equals zero.
    return hashlib.blake2b((values + 0.0).numpy().tobytes(), digest_size=16).digest()
