"""Layers that stand in another order: the gains of all kinds of norms are those of one other layer each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from normkit.comparison.parameter_pairs import kind_of, numbers_of
from normkit.comparison.value_groups import TensorValue
from normkit.text import shortened

LEAST = 3
"""The fewest layers out of place where a layer has one kind of norm: two norms of one kind may be swapped alone."""


def with_layer_order(found: Sequence[TensorValue]) -> list[TensorValue]:
    """The tensors; where all that come from another layer follow one order of the layers, each says which order."""
    sources = layer_sources(found)
    if not sources:
        return list(found)
    layers = sorted({layer for each in found if (layer := _layer(each.reference_path)) is not None})
    order = [sources.get(layer, layer) for layer in layers]
    words = order_in_words(order)
    return [
        replace(each, relation=replace(each.relation, kind="copied", place="another layer", order=words))
        if each.relation.kind in ("copied", "swapped")
        else each
        for each in found
    ]


def layer_sources(found: Sequence[TensorValue]) -> Mapping[int, int]:
    """Layer -> the layer whose gains it holds, for layers out of place; none where the tensors do not say one order."""
    sources: dict[int, set[int]] = defaultdict(set)
    kinds: dict[str, set[int]] = defaultdict(set)
    for each in found:
        here, kind = _layer(each.reference_path), kind_of(each.reference_path)
        if each.relation.kind in ("copied", "swapped"):
            there = _layer(each.relation.other)
            if here is None or there is None or kind_of(each.relation.other) != kind:
                return {}
            sources[here].add(there)
            kinds[kind].add(here)
    moved = {layer: next(iter(others)) for layer, others in sources.items() if len(others) == 1}
    if len(moved) < max(2, len(sources)) or {*moved} != {*moved.values()}:
        return {}
    # A norm of a layer out of place that is in its own place says that it is not the layers.
    present: dict[str, set[int]] = defaultdict(set)
    for each in found:
        if (layer := _layer(each.reference_path)) in moved:
            assert layer is not None
            present[kind_of(each.reference_path)].add(layer)
    is_whole = all(kinds[kind] == layers for kind, layers in present.items())
    return moved if is_whole and (len(present) > 1 or len(moved) >= LEAST) else {}


def order_in_words(order: Sequence[int]) -> str:
    """An order of layers, with its rule where it is a common one.

    Example:
        >>> order_in_words([0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9])
        '0, 1, 10, 11, 2, 3 and 6 more: sorted as text'
    """
    ordered = sorted(order)
    rule = {
        tuple(sorted(ordered, key=str)): ": sorted as text",
        tuple(reversed(ordered)): ": reversed",
    }.get(tuple(order), "")
    return f"{shortened([*map(str, order)], 6)}{rule}"


def _layer(path: str) -> int | None:
    """The number of the layer, or None where the path has no number or several."""
    numbers = numbers_of(path)
    return numbers[0] if len(numbers) == 1 else None
