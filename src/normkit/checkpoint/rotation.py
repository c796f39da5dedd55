"""`rotate`: the residual stream, and the values of each head, in other orthogonal coordinates.

    RMSNorm(Q x) = Q RMSNorm(x)        W Q^T (Q x) = W x        (W_o R^T) (R W_v) = W_o W_v

Q, R = H D / sqrt(n) with a Hadamard matrix H and random signs D, or orthogonal matrices of a file. All that is written
to the stream is multiplied by Q,
and the columns of all that reads it too; so are values, and the columns of what reads them, head by head by R.

Source:
    Ashkboos et al. 2024, arXiv:2404.00456; Liu et al. 2024, arXiv:2405.16406 (R1 and R2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from normkit.checkpoint.affine import value_rows
from normkit.checkpoint.given import Given
from normkit.checkpoint.hadamard import construction
from normkit.checkpoint.orthogonal import Matrices
from normkit.checkpoint.plan import Rotation
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder
from normkit.models.graph import Attention, Graph, Linear


def rotate_stream(
    context: FoldContext, builder: PlanBuilder, becomes_rms: Collection[str], by: int | Matrices
) -> tuple[str, ...]:
    """Rotate the sums of the width of the residual stream, or refuse it; the sums that are rotated.

    Args:
        context: What is known of the checkpoint.
        builder: Holds what gains, biases and means have become.
        becomes_rms: Paths of the LayerNorms that become RMSNorms.
        by: The seed of the signs, or the matrices of a file.
    """
    graph = context.graph
    if isinstance(by, Matrices) and by.stream is None:
        return ()
    spaces = [space for space in graph.stream if _width(context, space) == graph.width]
    if isinstance(by, int) and construction(graph.width) is None:
        builder.refuse("rotate", graph.architecture, _no_matrix(f"its width is {graph.width}"))
        return ()
    for place, reason in _obstacles(context, builder, spaces, becomes_rms):
        builder.refuse("rotate", place, f"because of it the residual stream is not rotated: {reason}")
        return ()
    turn = _rotation(graph.width, f"{by}/stream" if isinstance(by, int) else by.stream)
    rotated: list[tuple[str, int]] = []
    for space in spaces:
        for writer in graph.writers(space):
            if isinstance(writer, Linear):
                rotated.append((writer.weight, writer.out_axis))
                if writer.bias is not None:
                    # Experts have a row of biases each.
                    rotated.append((writer.bias, len(context.source.tensors[writer.bias].shape) - 1))
            else:
                rotated += [(name, writer.axis) for name in (writer.name, *writer.aliases)]
        norms = graph.norms_of(space)
        rotated += [(norm.bias, 0) for norm in norms if norm.bias is not None]
        for place in (space, *(norm.gives for norm in norms)):
            readers = graph.readers(place)
            rotated += [
                (str(linear.tied_to) if linear.tied_to and not context.untie else linear.weight, linear.in_axis)
                for linear in readers
            ]
    for name, axis in rotated:
        builder.rotate(name, replace(turn, axis=axis))
    return tuple(spaces)


def rotate_values(context: FoldContext, builder: PlanBuilder, attention: Attention, by: int | Matrices) -> bool:
    """Rotate the values of each head of an attention, or refuse it; whether it was done.

    `by` is the seed of the signs, or the matrices of a file.
    """
    value, output = attention.value, attention.output
    if isinstance(by, Matrices) and attention.name not in by.values:
        return False
    size = head_width(context, attention)
    if attention.clip is not None:
        builder.refuse("rotate", attention.name, f"{attention.clip} cuts off values, coordinate by coordinate")
        return False
    if isinstance(by, int) and construction(size) is None:
        builder.refuse("rotate", attention.name, _no_matrix(f"its heads have {size} values"))
        return False
    turn = _rotation(size, f"{by}/{attention.name}" if isinstance(by, int) else by.values[attention.name])
    rows = value_rows(attention, size)
    for linear in (value, *(each for each in context.graph.linears if each.beside == value.name)):
        builder.rotate(linear.weight, replace(turn, axis=linear.out_axis, rows=rows))
        if linear.bias is not None:
            builder.rotate(linear.bias, replace(turn, rows=rows))
    builder.rotate(output.weight, replace(turn, axis=output.in_axis))
    return True


def head_width(context: FoldContext, attention: Attention) -> int:
    """Values of one head of an attention."""
    output = attention.output
    return context.source.tensors[output.weight].shape[output.in_axis] // attention.heads


def _obstacles(
    context: FoldContext, builder: PlanBuilder, spaces: list[str], becomes_rms: Collection[str]
) -> Iterator[tuple[str, str]]:
    """(place, reason) of all that stands against it."""
    graph = context.graph
    if not spaces:
        yield graph.architecture, "nothing that is known is written to its residual stream"
    for space in spaces:
        if space in graph.returned:
            yield space, f"{graph.architecture} returns the {space}"
        for norm in graph.norms_of(space):
            if norm.kind == "layer" and norm.name not in becomes_rms:
                yield norm.name, "it stays a LayerNorm, and the mean that it takes out does not turn with its input"
            if norm.weight is not None and not builder.has_plain_gain(
                norm.weight, context.vector(norm.weight), norm.offset
            ):
                why = graph.against_folding(norm, untie=context.untie) or "coordinates with a bias have a gain of zero"
                yield norm.name, f"its gain stays, and no gain commutes with a rotation: {why}"
            if norm.opaque:
                yield norm.name, f"its output goes to {norm.opaque}"
            if {norm.name, norm.gives} & graph.returned:
                yield norm.name, f"its output is what {graph.architecture} returns"
            if any(other not in spaces and graph.is_read(other) for other in norm.writes):
                yield norm.name, "its output is added to a sum that is not rotated"
        for writer in graph.writers(space):
            if isinstance(writer, Linear) and (step := writer.through or writer.scaled_by):
                yield writer.name, f"{step} stands between it and the {space}"
        for norm in graph.added(space):
            if norm.reads not in spaces:
                yield norm.name, f"its output is added to the {space}, and what it reads is not rotated"


def _width(context: FoldContext, space: str) -> int:
    """Features of a sum."""
    graph: Graph = context.graph
    for writer in graph.writers(space):
        name, axis = (writer.weight, writer.out_axis) if isinstance(writer, Linear) else (writer.name, writer.axis)
        return context.source.tensors[name].shape[axis]
    return next((context.source.tensors[norm.weight].shape[0] for norm in graph.added(space) if norm.weight), 0)


def _rotation(size: int, by: str | Given | None) -> Rotation:
    """Along axis 0, by a seed or by a matrix."""
    if isinstance(by, str):
        return Rotation(axis=0, size=size, seed=by, construction=str(construction(size)))
    return Rotation(axis=0, size=size, seed="", construction="", matrix=by)


def _no_matrix(what: str) -> str:
    return f"{what}, for which no Hadamard matrix is known here"
