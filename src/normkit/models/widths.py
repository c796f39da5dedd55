"""Sizes that must agree: all that is added in one space, and all that reads one point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from normkit.errors import ModelError
from normkit.models.graph import Attention, Graph


def check_widths(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint whose tensors do not fit together.

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
    """Values alone, or fused: those of the queries' heads, and two for each head of keys and values."""
    value, output = attention.value, attention.output
    heads, kv_heads = attention.heads, attention.kv_heads
    rows, size = shapes[value.weight][value.out_axis], shapes[output.weight][output.in_axis]
    held = kv_heads if attention.layout == "own" else heads + 2 * kv_heads
    fits = heads > 0 and kv_heads > 0 and heads % kv_heads == 0 and size % heads == 0
    if not fits or rows != held * (size // heads):
        wanted = f"rows for {heads} heads, {kv_heads} of them with values, as config.json says"
        raise ModelError(_unfit(value.weight, shapes[value.weight], wanted))


def _facing(graph: Graph) -> Iterator[tuple[str, int, str]]:
    """Tensor, axis, and the point or space that the axis faces."""
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
