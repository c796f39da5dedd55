"""Pairs the norms of two sets of parameters: by name, by the runtime's table of names, by values, size or order."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from normkit.comparison.parameters import NormTensors

PairedBy = Literal["name", "table of names", "values", "size", "order"]

_SAMPLES = 8
"""Layers that are looked at to decide which of two kinds of norms belong together."""

# Paths with one end that are looked at one by one; more of them are the layers, told apart by a longer end.
_MOST_ALIKE = 16

# Words before a path by which two models in one file are told apart.
_PARTS = "vis|image|audio|speech|text|encoder|decoder|draft|mtp|talker|thinker|expert"


@dataclass(frozen=True, kw_only=True)
class TensorPair:
    """A norm and the one that it stands for."""

    norm: NormTensors
    """The port's."""
    reference: NormTensors
    """The reference's."""
    paired_by: PairedBy
    """Both end in one "name"; the runtime's "table of names"; their "values" are related; both alone have this "size";
    or "order": nothing but their places tells them from others of their size."""


Related = Callable[[NormTensors, NormTensors], bool]


def pair_norms(
    port: Sequence[NormTensors],
    reference: Sequence[NormTensors],
    related: Related,
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    reference_names: Mapping[str, Sequence[str]] | None = None,
) -> tuple[TensorPair, ...]:
    """Pair the norms of two sides, in the order of the port's.

    Args:
        port: The norms of the port.
        reference: The norms of the reference.
        related: Whether the values of two norms are in some relation.
        names: Name of a tensor of the port -> the names that it may have in transformers, the likeliest first.
        reference_names: The same of the reference.
    """
    canonical = {norm.path: _canonical(norm, names or {}, reference) for norm in port}
    there = {norm.path: _canonical(norm, reference_names or {}, port) for norm in reference}
    found: dict[str, TensorPair] = {}
    left, left_there = list(port), list(reference)

    def take(pairs: Iterable[tuple[NormTensors, NormTensors]], paired_by: PairedBy) -> None:
        for one, other in pairs:
            is_table = paired_by == "name" and (canonical[one.path], there[other.path]) != (one.path, other.path)
            by: PairedBy = "table of names" if is_table else paired_by
            found[one.path] = TensorPair(norm=one, reference=other, paired_by=by)
            left.remove(one)
            left_there.remove(other)

    places = pair_paths([canonical[norm.path] for norm in port], [there[norm.path] for norm in reference])
    take([(port[one], reference[other]) for one, other in places], "name")
    for pairs, paired_by in _by_kind(left, left_there, related):
        take(pairs, paired_by)
    return tuple(found[norm.path] for norm in port if norm.path in found)


def kind_of(path: str) -> str:
    """The path with a star for each number.

    Example:
        >>> kind_of("model.layers.3.self_attn.q_norm")
        'model.layers.*.self_attn.q_norm'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)


def numbers_of(path: str) -> tuple[int, ...]:
    """The numbers among the words of a path, such as that of the layer."""
    return tuple(int(word) for word in path.split(".") if word.isdigit())


def _canonical(norm: NormTensors, names: Mapping[str, Sequence[str]], others: Sequence[NormTensors]) -> str:
    """The path of a norm by the runtime's table: that of its gain there, without the gain's own name."""
    held = {name for other in others for name in (other.weight, other.bias)}
    own = [name for name in (norm.weight, norm.bias) if name is not None]
    known = [*own, *(name for each in own for name in names.get(each, ()))]
    chosen = next((name for name in known if name in held), known[len(own)] if len(known) > len(own) else None)
    return norm.path if chosen is None or chosen in own else chosen.rpartition(".")[0]


def pair_paths(port: Sequence[str], reference: Sequence[str]) -> list[tuple[int, int]]:
    """Places of the paths with the longest ends in common, each end standing for one path on each side.

    Example:
        >>> pair_paths(["language_model.norm", "x"], ["y", "model.norm"])
        [(0, 1)]
    """
    words = [[path.split(".") for path in paths] for paths in (port, reference)]
    found: list[tuple[int, int]] = []
    left = [set(range(len(paths))) for paths in (port, reference)]
    for length in range(max((len(each) for paths in words for each in paths), default=0), 0, -1):
        ends: tuple[dict[str, list[int]], ...] = (defaultdict(list), defaultdict(list))
        for side in (0, 1):
            for place in sorted(left[side]):
                if len(words[side][place]) >= length:
                    ends[side][".".join(words[side][place][-length:])].append(place)
        for end, ours in ends[0].items():
            theirs = ends[1].get(end, [])
            if max(len(ours), len(theirs)) > _MOST_ALIKE:
                continue
            fitting = [
                (one, other)
                for one in ours
                for other in theirs
                if _is_telling(words[0][one][:-length], words[1][other][:-length])
            ]
            ones, others = (Counter(pair[side] for pair in fitting) for side in (0, 1))
            found += [(one, other) for one, other in fitting if ones[one] == 1 and others[other] == 1]
        left[0] -= {one for one, _ in found}
        left[1] -= {other for _, other in found}
    return found


def _is_telling(before: Sequence[str], before_there: Sequence[str]) -> bool:
    """Whether two paths with a common end belong together, by the words before it."""
    if not before or not before_there:
        return True
    apart = " ".join({*before} ^ {*before_there})
    return not re.search(r"\d|" + _PARTS, apart)


def _by_kind(
    port: Sequence[NormTensors], reference: Sequence[NormTensors], related: Related
) -> list[tuple[list[tuple[NormTensors, NormTensors]], PairedBy]]:
    """Norms of kinds with other words: those kinds belong together whose values are related in most layers."""
    kinds, kinds_there = _kinds(port), _kinds(reference)
    found: list[tuple[list[tuple[NormTensors, NormTensors]], PairedBy]] = []
    scores = []
    for kind, members in kinds.items():
        for other, others in kinds_there.items():
            pairs = _aligned(members, others)
            if not pairs:
                continue
            seen = pairs[:: max(1, len(pairs) // _SAMPLES)]
            share = sum(related(one, two) for one, two in seen) / len(seen)
            scores.append((share, kind, other))
    for share, kind, other in sorted(scores, key=lambda score: -score[0]):
        if share > 0.5 and kind in kinds and other in kinds_there:
            found.append((_aligned(kinds.pop(kind), kinds_there.pop(other)), "values"))
    shapes, shapes_there = (_by_shape(each) for each in (kinds, kinds_there))
    for shape, left in shapes.items():
        rest = shapes_there.get(shape, [])
        if len(left) == len(rest):
            by: PairedBy = "size" if len(left) == 1 else "order"
            found += [(_aligned(kinds[kind], kinds_there[other]), by) for kind, other in zip(left, rest, strict=True)]
    return found


def _kinds(norms: Sequence[NormTensors]) -> dict[str, list[NormTensors]]:
    """Norms that differ by the number of their layer alone, in the order of the layers."""
    starred: dict[str, list[NormTensors]] = defaultdict(list)
    for norm in norms:
        starred[kind_of(norm.path)].append(norm)
    found: dict[str, list[NormTensors]] = defaultdict(list)
    for kind, members in starred.items():
        columns = [*zip(*(numbers_of(norm.path) for norm in members), strict=True)]
        layer = max(range(len(columns)), key=lambda place: len(set(columns[place])), default=0)
        for norm in sorted(members, key=lambda norm: numbers_of(norm.path)):
            rest = [str(number) for place, number in enumerate(numbers_of(norm.path)) if place != layer]
            found[" ".join([kind, *rest])].append(norm)
    return found


def _by_shape(kinds: Mapping[str, Sequence[NormTensors]]) -> dict[tuple[object, ...], list[str]]:
    """Kinds of one size and number, in the order in which a model has them: as their words say, else as stored."""
    found: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for kind in sorted(kinds, key=_place):
        shapes = Counter(norm.shape for norm in kinds[kind])
        found[(shapes.most_common(1)[0][0], len(kinds[kind]))].append(kind)
    return found


def _place(kind: str) -> int:
    """The place of a norm in its layer, by its last words; 1 if they do not say."""
    last = kind.split(" ")[0].rpartition(".")[2].lower()
    if re.search(r"input|attn_norm|attention_norm|(?:ln|norm)_?1|ln_attn|pre_?attn|operator", last):
        return 0
    return 2 if re.search(r"ffn|mlp|post|feed|(?:ln|norm)_?2|final", last) else 1


def _aligned(port: Sequence[NormTensors], reference: Sequence[NormTensors]) -> list[tuple[NormTensors, NormTensors]]:
    """Norms of two kinds, layer by layer; those of another size are left out."""
    ours = {numbers_of(norm.path): norm for norm in port}
    theirs = {numbers_of(norm.path): norm for norm in reference}
    common = [number for number in ours if number in theirs]
    if 2 * len(common) >= min(len(ours), len(theirs)):
        pairs = [(ours[number], theirs[number]) for number in common]
    else:
        pairs = list(zip(port, reference, strict=False)) if len(port) == len(reference) else []
    return [(one, other) for one, other in pairs if one.shape == other.shape]
