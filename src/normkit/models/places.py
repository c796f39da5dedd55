"""Points and spaces that must fit together: a name that is misspelt in a family's file is an error, never a gap."""

from __future__ import annotations

import re
from collections.abc import Iterator

from normkit.errors import ModelError
from normkit.models.graph import Graph, Linear, Norm, Table

_INDEX = re.compile(r"\.(\d+|\{[^{}]*\})$")


def check_places(graph: Graph) -> None:
    """Refuse a graph in which something reads what nothing gives, or something is given that nothing takes.

    Raises:
        ModelError: If there is such a place; the message names it, who names it, and the file.
    """
    for fault in _faults(graph):
        raise ModelError(f"models/{graph.family.model_type}.toml: {fault}")


def _faults(graph: Graph) -> Iterator[str]:
    points = {norm.gives for norm in graph.norms} | {norm.name for norm in graph.norms}
    writers: list[Linear | Table] = [*graph.linears, *graph.tables]
    written = {writer.writes for writer in writers}
    written |= {space for norm in graph.norms for space in norm.writes}
    for linear in graph.linears:
        if linear.reads and linear.reads not in points | written:
            yield f"{linear.name} reads {linear.reads!r}, which no norm gives and nothing writes"
    for norm in graph.norms:
        if norm.reads and norm.reads not in written:
            yield f"{norm.name} reads {norm.reads!r}, which nothing writes"
    for place in graph.returned - points - written:
        yield f"{graph.architecture} returns {place!r}, which no norm gives and nothing writes"
    for writer in writers:
        if writer.writes and not graph.is_read(writer.writes):
            yield f"{writer.name} writes {writer.writes!r}, which nothing reads"
    read = _read(graph)
    for norm in graph.norms:
        for space in norm.writes:
            if _stem(space) not in read:
                yield f"{norm.name} writes {space!r}, which nothing reads"
        if not norm.opaque and not _is_taken(graph, norm):
            yield f"nothing takes {norm.gives!r}, which {norm.name} gives"


def _is_taken(graph: Graph, norm: Norm) -> bool:
    is_added = any(graph.is_read(space) for space in norm.writes)
    return is_added or bool(graph.readers(norm.gives)) or bool({norm.name, norm.gives} & graph.returned)


def _read(graph: Graph) -> set[str]:
    """What is read in any layer, without its index: behind the last layer nothing reads what the norms write."""
    found = set(graph.returned)
    for part in graph.family.parts:
        found |= {norm.reads for norm in part.norm.values()} | {linear.reads for linear in part.linear.values()}
    return {_stem(place) for place in found}


def _stem(place: str) -> str:
    return _INDEX.sub("", place)
