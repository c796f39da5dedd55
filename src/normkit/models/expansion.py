"""From a family, a configuration and the tensors of a checkpoint to its graph. Nothing is guessed or left over."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from normkit.errors import ModelError
from normkit.models import graph
from normkit.models.family import Family, LinearEntry, NormEntry, Part, TableEntry, Tie
from normkit.models.settings import Settings
from normkit.text import shortened

Shapes = Mapping[str, tuple[int, ...]]
_PLACEHOLDER = re.compile(r"\{(\w+)([+-]\d+)?\}")


def expand(family: Family, config: Mapping[str, Any], shapes: Shapes) -> graph.Graph:
    """The graph of a checkpoint of a family, from its config.json and the shapes of its tensors by name.

    Raises:
        ModelError: If the class or a setting is not described, a declared tensor is missing, a tensor is not declared,
            or sizes contradict each other; the message names it.
    """
    return _Expansion(family, Settings(family, config), shapes).graph()


class _Expansion:
    def __init__(self, family: Family, settings: Settings, shapes: Shapes) -> None:
        settings.require_described()
        self._family, self._settings, self._shapes = family, settings, shapes
        # Names lack the prefix in a checkpoint of the class without a head.
        tables = [f"{part.at}.{name}".lstrip(".") for part in family.parts for name in part.table]
        bodies = [name for name in tables if name.startswith(family.prefix) and "{" not in name]
        self._is_bare = bool(family.prefix) and not family.older_names and not any(name in shapes for name in bodies)
        # The longest beginning that a tensor has: "model." begins the names below "model.language_model." too.
        self._starts = {
            start: next(
                (
                    each
                    for each in sorted((start, *others), key=len, reverse=True)
                    if any(name.startswith(each) for name in shapes)
                ),
                start,
            )
            for start, others in family.older_names.items()
        }
        self._declared: set[str] = set()
        self._norms: list[graph.Norm] = []
        self._linears: dict[str, graph.Linear] = {}
        self._tables: list[graph.Table] = []
        self._attentions: list[graph.Attention] = []

    def graph(self) -> graph.Graph:
        for part, indices in self._parts():
            self._add(part, indices)
        for part, indices in self._parts():
            self._add_attentions(part, indices)
        self._refuse_undeclared()
        counts = self._settings.counts()
        if not any(linear.is_head for linear in self._linears.values()):
            # The paths of a class without a head lack the prefix.
            self._norms = [
                dataclasses.replace(norm, module=norm.module.removeprefix(self._family.prefix)) for norm in self._norms
            ]
        found = graph.Graph(
            family=self._family,
            architecture=self._settings.architecture,
            width=self._settings.number(self._family.config.width),
            norms=tuple(self._norms),
            linears=tuple(self._linears.values()),
            tables=tuple(self._tables),
            attentions=tuple(self._attentions),
            returned=frozenset(
                self._named(_filled(place, counts)) for place in self._family.classes[self._settings.architecture]
            ),
            is_tied=any(linear.tied_to for linear in self._linears.values()),
            shared=self._shared_modules(self._family.tie),
        )
        graph.check_places(found)
        graph.check_widths(found, self._shapes)
        return found

    def _parts(self) -> Iterator[tuple[Part, dict[str, int]]]:
        """Every part of the checkpoint with the indices of its placeholders; parts at one place alternate."""
        for at, neighbours in itertools.groupby(self._family.parts, key=lambda part: part.at):
            parts = [part for part in neighbours if self._applies(part)]
            words = list(dict.fromkeys(match[1] for match in _PLACEHOLDER.finditer(at))) if parts else []
            # Each repetition has a tensor, so a larger count in config.json ends at the first that is missing.
            counts = (min(self._settings.count(word), len(self._shapes) + 1) for word in words)
            for numbers in itertools.product(*map(range, counts)):
                indices = dict(zip(words, numbers, strict=True))
                for part in parts:
                    if min(numbers, default=part.first) >= part.first and self._has(part, indices):
                        yield part, indices

    def _has(self, part: Part, indices: dict[str, int]) -> bool:
        """Whether the tensors that decide about a part say that it is there."""
        given, lacking = (
            self._named(_filled(name, self._settings.counts() | indices)) for name in (part.given, part.lacking)
        )
        if (given and given not in self._shapes) or (lacking and lacking in self._shapes):
            return False
        return not part.either or self._is_chosen(part, indices)

    def _is_chosen(self, part: Part, indices: dict[str, int]) -> bool:
        """Whether this one of the alternatives is in the checkpoint.

        Raises:
            ModelError: If none is, or several are.
        """
        rivals = [rival for rival in self._family.parts if rival.either == part.either and self._applies(rival)]
        # A placeholder without an index has the first.
        tensors = [
            list(self._tensors(rival, dict.fromkeys(self._family.repeat, rival.first) | indices)) for rival in rivals
        ]
        there = [
            rival for rival, names in zip(rivals, tensors, strict=True) if not self._shapes.keys().isdisjoint(names)
        ]
        if len(there) == 1:
            return there[0] is part
        options = " or ".join(names[0] for names in tensors)
        raise ModelError(
            f"expected {options} in the checkpoint of a {self._family.model_type} model, found "
            f"{'both' if there else 'neither'}; models/{self._family.model_type}.toml does not describe this model"
        )

    def _tensors(self, part: Part, indices: dict[str, int]) -> Iterator[str]:
        at = _filled(part.at, indices)
        for key, norm in part.norm.items():
            yield from (self._below(at, key) + suffix for suffix in (".weight", ".bias") if norm.weight)
        for key, linear in part.linear.items():
            yield self._below(at, key) + linear.weight
        for key in part.table:
            yield self._below(at, key)

    def _add(self, part: Part, indices: dict[str, int]) -> None:
        indices = self._settings.counts() | indices
        at = _filled(part.at, indices)
        for key, table in part.table.items():
            if self._applies(table):
                self._add_table(self._below(at, _filled(key, indices)), table, at, indices)
        for key, norm in part.norm.items():
            if self._settings.holds(norm.when):
                inside = _joined(_filled(part.in_memory, indices) or at, _filled(key, indices))
                self._add_norm(self._below(at, _filled(key, indices)), inside, norm, at, indices)
        for key, linear in part.linear.items():
            if self._applies(linear):
                self._add_linear(self._below(at, _filled(key, indices)), linear, at, indices)

    def _applies(self, entry: LinearEntry | TableEntry | Part) -> bool:
        return (not entry.only or self._settings.architecture in entry.only) and self._settings.holds(entry.when)

    def _add_table(self, name: str, entry: TableEntry, at: str, indices: dict[str, int]) -> None:
        aliases = tuple(self._named(alias) for alias in entry.aliases if self._named(alias) in self._shapes)
        if name not in self._shapes and aliases:
            name, aliases = aliases[0], aliases[1:]
        shape = self._shape(name)
        self._declared |= set(aliases)
        self._tables.append(
            graph.Table(
                name=name,
                axis=entry.axis % len(shape) if shape else 0,
                width=self._settings.number(entry.width or self._family.config.width),
                writes=self._place(entry.writes, at, indices),
                aliases=aliases,
            )
        )

    def _add_norm(self, name: str, module: str, entry: NormEntry, at: str, indices: dict[str, int]) -> None:
        weight = self._either(f"{name}.weight", f"{name}.gamma") if self._settings.flag(entry.weight) else None
        bias = self._either(f"{name}.bias", f"{name}.beta") if self._settings.flag(entry.bias) else None
        for tensor in (weight, bias):
            if tensor is not None:
                self._shape(tensor)
        eps_key = entry.eps or self._family.config.eps
        self._norms.append(
            graph.Norm(
                name=name,
                module=module,
                kind=entry.kind,
                weight=weight,
                bias=bias,
                offset=entry.offset,
                eps=self._settings.eps(entry.eps),
                eps_key=self._settings.path(eps_key) if isinstance(eps_key, str) else "",
                of=tuple(self._place(linear, at, indices) for linear in entry.of),
                reads=self._place(entry.reads, at, indices),
                joined=entry.joined,
                gives=self._place(entry.gives, at, indices) or name,
                writes=tuple(self._place(space, at, indices) for space in entry.writes),
                opaque=entry.opaque,
            )
        )

    def _add_linear(self, name: str, entry: LinearEntry, at: str, indices: dict[str, int]) -> None:
        tie, tied_to, parted_bias = self._family.tie, None, None
        is_shared = tie is not None and self._named(tie.head) == name
        for alias in entry.aliases:
            name = self._either(name + entry.weight, self._named(alias) + entry.weight).removesuffix(entry.weight)
        weight = name + entry.weight
        if tie is not None and is_shared and self._is_tied(tie, weight):
            tied_to = next(
                table.name for table in self._tables if self._named(tie.table) in (table.name, *table.aliases)
            )
            self._declared.add(weight)
        else:
            self._shape(weight)
        axes = entry.axes
        if entry.turned:
            facing = self._shapes[weight][axes[0] if entry.reads else axes[1]]
            axes = axes if facing == self._settings.number(self._family.config.width) else axes[::-1]
        bias = name + entry.bias_name if self._settings.flag(entry.bias) else None
        if bias is not None and tie is not None and is_shared and tie.bias:
            self._declared.add(self._named(tie.bias))
            if tied_to is not None and bias not in self._shapes:
                bias, parted_bias = self._named(tie.bias), bias
        if bias is not None:
            self._shape(bias)
        self._linears[name] = graph.Linear(
            name=name,
            weight=weight,
            bias=bias,
            in_axis=axes[0],
            out_axis=axes[1],
            reads=self._place(entry.reads, at, indices),
            is_joined=entry.joined,
            beside=self._place(entry.beside, at, indices),
            writes=self._place(entry.writes, at, indices),
            through=entry.through,
            scaled_by=entry.scaled_by,
            is_head=entry.is_head,
            tied_to=tied_to,
            parted_bias=parted_bias,
        )

    def _is_tied(self, tie: Tie, weight: str) -> bool:
        """Whether a head has no table of its own."""
        if tie.fixed and weight not in self._shapes:
            return True
        are_two = bool(tie.unless) and self._settings.holds(tie.unless)
        return self._settings.flag(tie.key) and not are_two

    def _shared_modules(self, tie: Tie | None) -> dict[str, str]:
        if tie is None or not tie.shared:
            return {}
        word = _PLACEHOLDER.findall(tie.shared)[0][0]
        indices = ({word: index} for index in range(self._settings.count(word)))
        places = [
            self._named(_filled(tie.shared, each))
            for each in indices
            if self._shapes.keys() & {self._named(_filled(tie.user, each))}
        ]
        stored = {place for place in places if any(name.startswith(f"{place}.") for name in self._shapes)}
        different = self._settings.number(tie.different)
        others = {place: places[index % different] for index, place in enumerate(places) if place not in stored}
        if strange := set(others.values()) - stored:
            raise ModelError(
                f"expected the tensors of {strange.pop()} in the checkpoint, found none; give a whole model"
            )
        return others

    def _add_attentions(self, part: Part, indices: dict[str, int]) -> None:
        indices = self._settings.counts() | indices
        at = _filled(part.at, indices)
        for key, entry in part.attention.items():
            if not self._settings.holds(entry.when):
                continue
            heads = self._settings.number(entry.heads or self._family.config.heads)
            kv_heads = entry.kv_heads or self._family.config.kv_heads
            sinks = self._place(entry.sinks, at, indices)
            self._attentions.append(
                graph.Attention(
                    name=self._below(at, key),
                    value=self._linears[self._place(entry.value, at, indices)],
                    output=self._linears[self._place(entry.output, at, indices)],
                    key=self._linears[self._place(entry.key, at, indices)] if entry.key else None,
                    layout=entry.layout,
                    heads=heads,
                    kv_heads=kv_heads
                    if isinstance(kv_heads, int)
                    else self._settings.number(kv_heads, otherwise=heads),
                    rotary=entry.rotary,
                    sinks=sinks if sinks in self._shapes else None,
                    softcap=bool(entry.softcap and self._settings.flag(entry.softcap)),
                    clip=entry.clip if entry.clip and self._settings.flag(entry.clip) else None,
                )
            )

    def _place(self, reference: str, at: str, indices: dict[str, int]) -> str:
        """The name of a point, a space or a module that an entry refers to."""
        if not reference:
            return ""
        name = _filled(reference, indices)
        return self._below(at, name[1:]) if name.startswith(".") else self._named(name)

    def _below(self, at: str, key: str) -> str:
        return self._named(_joined(at, key))

    def _either(self, name: str, older: str) -> str:
        """The name of a tensor, or, if only that is there, an older name that transformers reads as the same."""
        return older if name not in self._shapes and older in self._shapes else name

    def _named(self, name: str) -> str:
        """A name as it is in this checkpoint."""
        if self._is_bare:
            name = name.removeprefix(self._family.prefix)
        start = next((start for start in self._starts if name.startswith(start)), None)
        return name if start is None else self._starts[start] + name.removeprefix(start)

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; ModelError if it is missing."""
        if name not in self._shapes:
            raise ModelError(
                f"expected the tensor {name}, as models/{self._family.model_type}.toml declares it, and the checkpoint "
                f"lacks it; download it again, or give a checkpoint of {self._settings.architecture}"
            )
        self._declared.add(name)
        return self._shapes[name]

    def _refuse_undeclared(self) -> None:
        patterns = [*self._family.buffers, *(self._named(pattern) for pattern in self._family.buffers)]
        unknown = [
            name
            for name in self._shapes
            if name not in self._declared and not any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if unknown:
            raise ModelError(
                f"expected only tensors that models/{self._family.model_type}.toml declares, found "
                f"{shortened(unknown, 1)}: what it reads or writes is not known, so nothing is folded"
            )


def _joined(at: str, key: str) -> str:
    return ".".join(word for word in (at, key) if word)


def _filled(template: str, indices: Mapping[str, int]) -> str:
    """A name with its placeholders replaced."""
    return _PLACEHOLDER.sub(lambda match: str(indices[match[1]] + int(match[2] or 0)), template)
