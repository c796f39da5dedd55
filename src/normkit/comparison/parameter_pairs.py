"""Pairs the norms of two sets of parameters: by name, by the runtime's table of names, by values, size or order."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normkit.checkpoint.plan import FLOATS
from normkit.comparison.parameters import NormTensors
from normkit.comparison.relations import EVIDENCE, evidence, relation
from normkit.comparison.runtimes import convention
from normkit.comparison.weights import Weights

PairedBy = Literal["name", "table of names", "values", "size", "order"]

_SAMPLES = 8
"""Layers that are looked at to decide which of two kinds of norms belong together."""

# Paths with one end that are looked at one by one; more of them are the layers, told apart by a longer end.
_MOST_ALIKE = 16

# Kinds of norms on each side whose values are looked at; no model has as many, a file made to hurt may.
_MOST_KINDS = 100

# Words before a path by which two models in one file are told apart.
_PARTS = "vis|image|audio|speech|text|encoder|decoder|draft|mtp|talker|thinker|expert"

# Pairs of vectors that are looked at; no model has as many, a file made to hurt may.
_MOST_PAIRS = 100_000

_NEAR = 2.0**-7
"""Twice the rounding of bfloat16: what is further apart is not looked at closely."""


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
    held, held_there = ({name for norm in norms for name in _names(norm)} for norms in (port, reference))
    canonical, there = _canonical(port, names or {}, held_there), _canonical(reference, reference_names or {}, held)
    found: dict[int, TensorPair] = {}
    for one, other in pair_paths(canonical, there):
        is_own = canonical[one] == port[one].path and there[other] == reference[other].path
        by: PairedBy = "name" if is_own else "table of names"
        found[id(port[one])] = TensorPair(norm=port[one], reference=reference[other], paired_by=by)
    taken = {id(pair.reference) for pair in found.values()}
    left = [norm for norm in port if id(norm) not in found]
    left_there = [norm for norm in reference if id(norm) not in taken]
    for pairs, by in pair_kinds(left, left_there, related):
        found |= {id(norm): TensorPair(norm=norm, reference=other, paired_by=by) for norm, other in pairs}
    return tuple(found[id(norm)] for norm in port if id(norm) in found)


def kind_of(path: str) -> str:
    """The path with a star for each number of a layer or of another list.

    Example:
        >>> kind_of("model.layers.3.self_attn.q_norm"), kind_of("params.layers_3.ln_1")
        ('model.layers.*.self_attn.q_norm', 'params.layers.*.ln_1')
    """
    return ".".join("*" if _is_number(word) else word for word in _words(path))


def numbers_of(path: str) -> tuple[int, ...]:
    """The numbers among the words of a path, such as that of the layer."""
    return tuple(int(word) for word in _words(path) if _is_number(word))


def _is_number(word: str) -> bool:
    """Whether a word counts layers: in ASCII digits, and no more of them than a count has."""
    return word.isascii() and word.isdigit() and len(word) < 10


def _words(path: str) -> list[str]:
    """The words of a path; flax and others write layers_3 for layers.3."""
    return re.sub(r"(?:(?<=\.)|^)(layers?|blocks?|h)_(?=\d+(?:\.|$))", r"\1.", path).split(".")


def _names(norm: NormTensors) -> list[str]:
    return [name for name in (norm.weight, norm.bias) if name is not None]


def _canonical(norms: Sequence[NormTensors], names: Mapping[str, Sequence[str]], others: Collection[str]) -> list[str]:
    """The paths of norms as the other side has them, by the runtime's table of the names of tensors."""
    prefix = _prefix(norms, names, others)
    found = []
    for norm in norms:
        own = _names(norm)
        known = [f"{prefix or ''}{name}" for each in own for name in names.get(each, ())]
        # A name that fits nothing there is no better than the norm's own, unless no name of the table fits.
        default = known[0] if known and prefix is None else own[0]
        chosen = next((name for name in (*own, *known) if name in others), default)
        found.append(norm.path if chosen in own else chosen.rpartition(".")[0])
    return found


def _prefix(norms: Sequence[NormTensors], names: Mapping[str, Sequence[str]], others: Collection[str]) -> str | None:
    """The prefix of the table's names on the other side, such as "language_model."; None if none of them fits.

    The prefix is the one with which most tensors have a name there: a single name, as "norm", is the end of many.
    """
    own = [each for norm in norms for each in _names(norm) if names.get(each)]
    prefixes = Counter(
        other.removesuffix(name)
        for each in own[:: max(1, len(own) // _SAMPLES)]
        for name in names[each]
        for other in others
        if other == name or other.endswith(f".{name}")
    )
    likely = [prefix for prefix, _ in prefixes.most_common(_MOST_ALIKE)]
    fitting = {prefix: sum(any(prefix + name in others for name in names[each]) for each in own) for prefix in likely}
    return max(fitting, key=lambda prefix: (fitting[prefix], -len(prefix)), default=None)


def pair_paths(port: Sequence[str], reference: Sequence[str]) -> list[tuple[int, int]]:
    """Places of the paths with the longest ends in common, each end standing for one path on each side.

    Example:
        >>> pair_paths(["language_model.norm", "x"], ["y", "model.norm"])
        [(0, 1)]
    """
    words = [[_words(path) for path in paths] for paths in (port, reference)]
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


def pair_kinds(
    port: Sequence[NormTensors], reference: Sequence[NormTensors], related: Related
) -> list[tuple[list[tuple[NormTensors, NormTensors]], PairedBy]]:
    """Pair norms whose kinds have other words: those kinds belong together whose values are related in most layers.

    The rest is paired by size where as many kinds of a size are left on both sides, one ("size") or several ("order").
    """
    kinds, kinds_there = _kinds(port), _kinds(reference)
    found: list[tuple[list[tuple[NormTensors, NormTensors]], PairedBy]] = []
    scores = []
    is_many = len(kinds) * len(kinds_there) > _MOST_KINDS**2
    for kind, members in kinds.items() if not is_many else ():
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


def renamed(
    port: Weights,
    reference: Weights,
    norms: Sequence[NormTensors],
    vectors: Sequence[str],
    read: tuple[Callable[[str], Tensor], Callable[[str], Tensor]],
) -> list[TensorPair]:
    """Norms of the reference, and the vector of the port that holds the gain of each as the port's runtime stores it.

    A vector is a counterpart if it alone holds the gain, exactly or rounded, and the gain is no vector that another
    would meet by chance: constant ones, as of norms that were never trained, have no counterpart.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        norms: The reference's norms that have no counterpart.
        vectors: Names of the port's tensors that are not known to be of norms.
        read: The values of a tensor by its name, of the port and of the reference, in float64, shape (n,).
    """
    tensors, there = port.source.tensors, reference.source.tensors
    vectors = [name for name in vectors if tensors[name].dtype in FLOATS and len(tensors[name].shape) == 1]
    if len(norms) * len(vectors) > _MOST_PAIRS:
        return []

    def holds(name: str, norm: NormTensors, role: str) -> bool:
        wanted = getattr(norm, role)
        if math.prod(tensors[name].shape) != math.prod(there[wanted].shape):
            return False
        conventions = convention(port, name), convention(reference, norm.path)
        added = 0.0
        if role == "weight" and conventions[0] is not None and conventions[1] is not None:
            added = conventions[1].adds - conventions[0].adds
        given, expected = read[0](name), read[1](wanted)
        stored = expected + added
        if not bool(((given - stored).abs() <= _NEAR * stored.abs()).all()):
            return False
        found = relation(given, expected, tensors[name].dtype, there[wanted].dtype)
        is_told = evidence(expected, torch.zeros_like(expected)) >= EVIDENCE
        return is_told and (found.kind, found.constant or 0.0) == ("offset" if added else "equal", added)

    made = []
    for norm in norms:
        chosen = {}
        for role in ("weight", "bias"):
            fitting = [name for name in vectors if getattr(norm, role) and holds(name, norm, role)]
            chosen[role] = fitting[0] if len(fitting) == 1 else None
        first = chosen["weight"] or chosen["bias"]
        if first is not None:
            own = NormTensors(path=first, shape=tensors[first].shape, is_named=False, **chosen)
            made.append(TensorPair(norm=own, reference=norm, paired_by="values"))
            vectors = [name for name in vectors if name not in chosen.values()]
    return made
