"""Matrices that one model has apart and the other joined in one, as q, k and v, or gate and up.

In the joined matrix, the rows of one part follow those of another, or parts take turns: some rows of each for each
head. Values tell which. Where they tell nothing, names tell what is joined, and the parts are not compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.checkpoint.plan import FLOATS
from normkit.checkpoint.reader import Source, TensorInfo
from normkit.comparison.matrix_rows import LEAST, RELATED, SIDE, correlation, few_rows, rows_of
from normkit.comparison.parameter_pairs import kind_of, numbers_of
from normkit.comparison.quantized import MlxSource
from normkit.comparison.weights import Weights
from normkit.errors import ModelError

_MOST_PARTS, _MOST_SIBLINGS, _MOST_TURNS = 3, 8, 256

_SAMPLES = 3
"""The layers whose values tell how matrices of one kind are joined."""

_ROLES = {"q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v", "gate": "gate", "up": "up"}
"""Word in a name -> the role of a part, in the order in which models join them."""

_SETS = ({"q", "k", "v"}, {"gate", "up"})
"""Roles that are joined."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A tensor of one model that holds several of the other."""

    whole: str
    """Its name."""
    parts: tuple[str, ...]
    """Names of those in the other model, in the order in which they stand in it."""
    is_of_port: bool
    """Whether the port has it, and the reference its parts."""
    starts: tuple[int, ...]
    """The first row in it of each part."""
    lengths: tuple[int, ...]
    """How many rows each part has."""
    axis: int = 0
    """Along which the parts stand: 0 for rows, 1 for columns, of a matrix that is stored the other way round."""
    turns: int = 0
    """1 if a part follows the other; more where they take turns; 0 where values told no order."""

    @property
    def views(self) -> dict[str, str]:
        """Name of a part in the tensor, as `path.qkv_proj.weight[q_proj]` -> its name in the other model."""
        return {f"{self.whole}[{_word(part)}]": part for part in self.parts} if self.turns else {}

    @property
    def place(self) -> str:
        """The path of the tensor without its `weight` or `bias`."""
        return _module(self.whole)

    @property
    def words(self) -> str:
        """The joined parts and their layout in words, without the names of layers."""
        owners = ("reference", "port") if self.is_of_port else ("port", "reference")
        *first, last = map(_word, self.parts)
        parts = " and ".join(filter(None, (", ".join(first), last)))
        said = f"{parts} of the {owners[0]} are joined in {_word(self.whole)} of the {owners[1]}"
        if self.turns > 1:
            return f"{said}, where they take turns ({self.turns} of each)"
        return said if self.turns else f"{said}; the order in it was not found, and they are not compared"


class _Layout(NamedTuple):
    """How tensors of one kind are joined, in each layer."""

    kinds: tuple[str, ...]
    """The names of the parts, in their order."""
    axis: int
    turns: int


class _Part(NamedTuple):
    """Some rows or columns of a tensor."""

    whole: str
    axis: int
    at: Tensor


class JoinedSource:
    """A source with more names, for the parts of joined tensors."""

    def __init__(self, source: Source, parts: Mapping[str, _Part]) -> None:
        self._source, self._parts = source, parts
        self.tensors = dict(source.tensors)
        for name, part in parts.items():
            shape = list(source.tensors[part.whole].shape)
            shape[min(part.axis, len(shape) - 1)] = len(part.at)
            self.tensors[name] = TensorInfo(source.tensors[part.whole].dtype, tuple(shape))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix."""
        if name not in self._parts:
            return self._source.rows(name, start, stop)
        whole, axis, at = self._parts[name]
        if axis:
            return self._source.rows(whole, start, stop)[:, at]
        at = at[start:stop]
        runs = torch.tensor_split(at, torch.nonzero(at.diff() != 1).flatten() + 1)
        return torch.cat([self._source.rows(whole, int(run[0]), int(run[-1]) + 1) for run in runs])

    def group(self, name: str) -> int:
        """How many numbers of a row share a scale, in files of MLX; 0 where they do not, or this is not known."""
        inner = self._source
        return inner.group(name) if isinstance(inner, MlxSource) and name not in self._parts else 0


def find_joined(port: Weights, reference: Weights, extra: Sequence[str], missing: Sequence[str]) -> list[Joined]:
    """The tensors of one model that hold several of the other.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        extra: Names in the port without a counterpart.
        missing: Names in the reference without one.
    """
    found = [*_joined(port, extra, reference, missing, is_of_port=True)]
    taken = {part for each in found for part in each.parts}
    left = [name for name in missing if name not in taken]
    return [*found, *_joined(reference, left, port, extra, is_of_port=False)]


def with_views(weights: Weights, joined: Sequence[Joined]) -> Weights:
    """A model's parameters with names for the parts of its joined tensors."""
    parts = {
        name: part
        for each in joined
        if each.turns
        for name, part in zip(each.views, _parts(weights, each), strict=True)
    }
    return replace(weights, source=JoinedSource(weights.source, parts)) if parts else weights


def _joined(
    whole: Weights, names: Sequence[str], apart: Weights, candidates: Sequence[str], *, is_of_port: bool
) -> Iterator[Joined]:
    members: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if _is_matrix(whole, name):
            members[kind_of(name)].append(name)
    by_place = {(kind_of(name), numbers_of(name)): name for name in candidates}
    siblings: dict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
    for name in candidates:
        if _is_matrix(apart, name):
            siblings[numbers_of(name), _beside(name)].append(name)
    taken: set[str] = set()
    for alike in members.values():
        tried = [
            scored
            for name in alike[:_SAMPLES]
            for (numbers, _), parts in siblings.items()
            if numbers == numbers_of(name) and 2 <= len(parts) <= _MOST_SIBLINGS
            for scored in _scored(whole, name, apart, [part for part in parts if part not in taken])
        ]
        if not tried:
            continue
        # The first of several, which is the simplest.
        _, layout = max(tried, key=lambda scored: scored[0])
        for name in alike:
            made = [by_place.get((kind, numbers_of(name)), "") for kind in layout.kinds]
            each = None if not all(made) else _placed(whole, name, apart, made, layout, is_of_port=is_of_port)
            if each is None:
                continue
            taken.update(made)
            yield each
            # A part without a bias has zeros in the joined one.
            held = [place for place, part in enumerate(made) if _bias(part) in candidates]
            if _bias(name) in names and held:
                yield replace(
                    each,
                    whole=_bias(name),
                    parts=tuple(_bias(made[place]) for place in held),
                    starts=tuple(each.starts[place] for place in held),
                    lengths=tuple(each.lengths[place] for place in held),
                )


def _scored(whole: Weights, name: str, apart: Weights, parts: Sequence[str]) -> Iterator[tuple[int, _Layout]]:
    """Ways in which a matrix may hold some of these, and how many of them its values say to be in their places."""
    roles = [*_ROLES.values()]
    known = {part: role for part in parts if (role := _role(part))}
    # As models order them, the likeliest first.
    parts = sorted(parts, key=lambda part: roles.index(known[part]) if part in known else len(roles))
    for axis in (0, 1):
        for count in range(_MOST_PARTS, 1, -1):
            for made in permutations(parts, count):
                kinds = tuple(map(kind_of, made))
                for turns in range(1, _MOST_TURNS + 1):
                    each = _placed(whole, name, apart, made, _Layout(kinds, axis, turns), is_of_port=True)
                    if each is None and turns == 1:
                        break
                    if each is None:
                        continue
                    seen = with_views(whole, [each])
                    fits = sum(_fits(seen, view, apart, part) for view, part in each.views.items())
                    if fits:
                        yield fits, _Layout(kinds, axis, turns)
                    if fits == count:
                        return
                else:
                    if {known.get(part) for part in made} in _SETS:
                        yield 0, _Layout(kinds, axis, 0)


def _fits(one: Weights, name: str, other: Weights, other_name: str) -> bool:
    """Whether both blocks of rows that are read of two matrices correlate, or their corners, one of them turned."""
    shape, there = one.source.tensors[name].shape, other.source.tensors[other_name].shape
    try:
        if shape == there:
            few = few_rows(shape[1])
            rows, rows_there = rows_of(one, name, few), rows_of(other, other_name, few)
            blocks = [(rows[at], rows_there[at]) for at in (slice(few), slice(few, None)) if len(rows[at])]
            if all((correlation(*block)[0] or 0.0) >= RELATED for block in blocks):
                return True
        if shape != there[::-1]:
            return False
        corner, corner_there = (rows_of(*each, SIDE)[:SIDE, :SIDE] for each in ((one, name), (other, other_name)))
        return (correlation(corner, corner_there.T)[0] or 0.0) >= RELATED
    except ModelError:
        return False


def _placed(
    whole: Weights, name: str, apart: Weights, parts: Sequence[str], layout: _Layout, *, is_of_port: bool
) -> Joined | None:
    """The parts in their places in a matrix; None if they do not fill it."""
    shape = whole.source.tensors[name].shape
    across, turns = shape[1 - layout.axis], layout.turns or 1
    sizes = [apart.source.tensors[part].shape for part in parts]
    lengths = [size[0] * size[1] // across if across in size else 0 for size in sizes]
    if sum(lengths) != shape[layout.axis] or not all(lengths) or any(length % turns for length in lengths):
        return None
    return Joined(
        whole=name,
        parts=tuple(parts),
        is_of_port=is_of_port,
        starts=tuple(sum(lengths[:place]) // turns for place in range(len(lengths))),
        lengths=tuple(lengths),
        axis=layout.axis,
        turns=layout.turns,
    )


def _parts(whole: Weights, joined: Joined) -> Iterator[_Part]:
    """The places of the parts in a joined tensor."""
    shape = whole.source.tensors[joined.whole].shape
    # A vector is a row: its parts are columns.
    axis = joined.axis if len(shape) == 2 else 1
    step = shape[-1 if axis else 0] // joined.turns
    for start, length in zip(joined.starts, joined.lengths, strict=True):
        own, at = length // joined.turns, torch.arange(length)
        yield _Part(joined.whole, axis, at // own * step + start + at % own)


def _is_matrix(weights: Weights, name: str) -> bool:
    info = weights.source.tensors[name]
    return len(info.shape) == 2 and info.shape[0] * info.shape[1] >= LEAST and info.dtype in FLOATS


def _beside(name: str) -> str:
    """The path of what holds a part's module, with the tensor's own name."""
    path, _, last = name.rpartition(".")
    return f"{path.rpartition('.')[0]}.{last}"


def _module(name: str) -> str:
    """The path without its `weight` or `bias`, as of `attn.in_proj_weight`."""
    return re.sub(r"[._](?:weight|bias|kernel)$", "", name)


def _word(name: str) -> str:
    """The word of a path that says what a tensor is."""
    return _module(name).rpartition(".")[2]


def _bias(name: str) -> str:
    return f"{name.removesuffix('weight')}bias" if name.endswith("weight") else f"{name.removesuffix('kernel')}bias"


def _role(name: str) -> str:
    """The role of a part that its name says: q of q_proj, to_q, wq and query; "" if it says none."""
    word = _word(name).lower().removeprefix("to_")
    first = word.partition("_")[0]
    return _ROLES.get(first) or _ROLES.get(first.removeprefix("w"), "")
