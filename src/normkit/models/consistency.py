"""Checks of a graph: its points and spaces fit together, and so do the sizes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from normkit.errors import ModelError
from normkit.models.graph import Attention, Graph, Linear, Table

_INDEX = re.compile(r"\.(\d+|\{[^{}]*\})$")


def check_places(graph: Graph) -> None:
    """Check that something writes each place that is read, and that something reads each place that is written.

    So a misspelt name in a family's file is an error, and nothing that reads or writes is overlooked.

    Raises:
        ModelError: If there is another place; the message names it, what names it, and the file.
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
        is_added = any(graph.is_read(space) for space in norm.writes)
        is_taken = is_added or bool(graph.readers(norm.gives)) or bool({norm.name, norm.gives} & graph.returned)
        if not norm.opaque and not is_taken:
            yield f"nothing takes {norm.gives!r}, which {norm.name} gives"


def _read(graph: Graph) -> set[str]:
    """The places that are read in any layer, without the index: after the last layer nothing reads what norms write."""
    found = set(graph.returned)
    for part in graph.family.parts:
        found |= {norm.reads for norm in part.norm.values()} | {linear.reads for linear in part.linear.values()}
    return {_stem(place) for place in found}


def _stem(place: str) -> str:
    return _INDEX.sub("", place)


def check_widths(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that all that is added in one space has one width, and all that reads one point.

    Raises:
        ModelError: If a tensor has the wrong size along the axis that faces a norm or a sum, or a bias the wrong size.
    """
    for table in graph.tables:
        shape = shapes[table.name]
        if table.writes and shape[table.axis : table.axis + 1] != (graph.width,):
            raise ModelError(_unfit(table.name, shape, f"{graph.width} along axis {table.axis}, as config.json says"))
    for linear in graph.linears:
        weight = linear.tied_to or linear.weight
        axes = max(linear.in_axis, linear.out_axis) + 1
        if len(shapes[weight]) < axes:
            raise ModelError(_unfit(weight, shapes[weight], f"at least {axes} axes"))
    known: dict[str, tuple[int, str]] = {}
    for name, axis, place in _facing(graph):
        if name not in shapes:
            continue
        shape = shapes[name]
        if axis >= len(shape):
            raise ModelError(_unfit(name, shape, f"at least {axis + 1} axes"))
        width, other = known.setdefault(place, (shape[axis], name))
        if shape[axis] != width:
            raise ModelError(_unfit(name, shape, f"{width} along axis {axis}, as {other} has"))
    for linear in graph.linears:
        if linear.bias is None or linear.weight not in shapes:
            continue
        size = shapes[linear.weight][linear.out_axis]
        if shapes[linear.bias][-1:] != (size,):
            raise ModelError(_unfit(linear.bias, shapes[linear.bias], f"{size} numbers, one for each output"))
    for attention in graph.attentions:
        _check_heads(attention, shapes)


def _check_heads(attention: Attention, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the rows of the values: alone, or fused with the heads of the queries and the keys."""
    value, output = attention.value, attention.output
    heads, kv_heads = attention.heads, attention.kv_heads
    rows, size = shapes[value.weight][value.out_axis], shapes[output.weight][output.in_axis]
    held = kv_heads if attention.layout == "own" else heads + 2 * kv_heads
    fits = heads > 0 and kv_heads > 0 and heads % kv_heads == 0 and size % heads == 0
    if not fits or rows != held * (size // heads):
        wanted = f"rows for {heads} heads, {kv_heads} of them with values, as config.json says"
        raise ModelError(_unfit(value.weight, shapes[value.weight], wanted))


def _facing(graph: Graph) -> Iterator[tuple[str, int, str]]:
    """(tensor, axis, the point or space that the axis faces)."""
    for table in graph.tables:
        if table.writes:
            yield table.name, table.axis, table.writes
    for norm in graph.norms:
        for tensor in (norm.weight, norm.bias):
            if tensor is not None and norm.reads:
                yield tensor, 0, norm.reads
                yield tensor, 0, norm.gives
                yield from ((tensor, 0, space) for space in norm.writes)
    for linear in graph.linears:
        if linear.reads:
            yield linear.tied_to or linear.weight, linear.in_axis, linear.reads
        if linear.writes:
            yield linear.weight, linear.out_axis, linear.writes


def _unfit(name: str, shape: tuple[int, ...], wanted: str) -> str:
    return (
        f"expected {name} to have {wanted}, got the shape {shape}; weights and config.json belong to different models"
    )
