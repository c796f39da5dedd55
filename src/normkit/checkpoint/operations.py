"""The operations of folding, each decided for one checkpoint.

gain, bias, final   W (g * z + b) + c = (W diag(g)) z + (c + W b)
value               where the weights of a row of attention sum to one, b_v passes through: b_o + W_o b_v, b_v = 0
centre              LN(P x) = LN(x), where P subtracts the mean
rms                 where P x = x: var(x) = mean(x^2), so that LayerNorm is RMSNorm with the same eps

A bias whose readers cannot all take it stays in the norm as b / g; a coordinate with g = 0 and b != 0 stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from normkit import specs
from normkit.checkpoint.plan import (
    Constant,
    Fate,
    Gain,
    NormChange,
    Operation,
    Product,
    Quotient,
    Reference,
    Rows,
)
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder
from normkit.conventions import gain as gains
from normkit.models import legality
from normkit.models.graph import Attention, Linear, Norm
from normkit.spec import NormSpec


def move_affine(context: FoldContext, builder: PlanBuilder, norm: Norm) -> NormChange:
    """Decide what becomes of the gain and the bias of a norm: into all its readers, or nowhere."""
    readers = context.graph.readers(norm.gives)
    gain, bias = context.gain(norm), context.bias(norm)
    has_gain, has_bias = gain is not None and bool((gain != 1).any()), bias is not None and bool((bias != 0).any())
    is_final = any(reader.is_head for reader in readers)
    wants_gain = gain is not None and ("final" if is_final else "gain") in context.operations
    wants_bias = bias is not None and ("final" if is_final else "bias") in context.operations
    reasons: list[str] = []
    if (
        (wants_gain or wants_bias)
        and (has_gain or has_bias)
        and (reason := legality.against_folding(context.graph, norm, untie=context.untie))
    ):
        operation: Operation = "final" if is_final else "gain" if wants_gain else "bias"
        builder.refuse(operation, norm.name, reason)
        wants_gain, wants_bias, reasons = False, False, [reason]
    lacking = [
        reader.name
        for reader in readers
        if reader.bias is None and not legality.ignores_key_bias(context.graph, reader)
    ]
    folds_bias = wants_bias and has_bias and not lacking
    kept: tuple[int, ...] = ()
    if wants_gain and not folds_bias and gain is not None and bias is not None:
        # No division by the gain can carry the bias at these coordinates.
        kept = tuple(int(index) for index in ((gain == 0) & (bias != 0)).nonzero().flatten())
    moves_gain = wants_gain and gain is not None and _is_moved(gain, kept)
    if moves_gain:
        factor = Gain(weight=str(norm.weight), offset=norm.offset, kept=kept)
        for reader in readers:
            builder.multiply(reader.weight, reader.in_axis, factor)
        builder.set_vector(factor.weight, Constant(value=1.0 - norm.offset, kept=kept))
        if has_bias and not folds_bias:
            builder.set_vector(str(norm.bias), Quotient(gain=factor))
    if folds_bias:
        _move_bias(context, builder, str(norm.bias), readers)
    if wants_bias and has_bias and lacking:
        stays = "stays in the norm, divided by the gain" if moves_gain else "stays in the norm"
        reasons.append(f"its bias {stays}, as {', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} none")
    return NormChange(
        name=norm.name,
        gain=_fate(gain, has_gain, "folded" if moves_gain else None),
        bias=_fate(bias, has_bias, "folded" if folds_bias else "divided" if has_bias and moves_gain else None),
        readers=tuple(reader.name for reader in readers) if moves_gain or folds_bias else (),
        kept=kept,
        reasons=tuple(reasons),
    )


def _is_moved(gain: Tensor, kept: tuple[int, ...]) -> bool:
    """Whether any factor is not 1; the factor of a kept coordinate is 1."""
    factors = gain.clone()
    factors[list(kept)] = 1.0
    return bool((factors != 1).any())


def _move_bias(context: FoldContext, builder: PlanBuilder, bias: str, readers: tuple[Linear, ...]) -> None:
    for reader in readers:
        if reader.bias is not None:
            matrix = reader.weight if reader.weight in context.source.tensors else str(reader.tied_to)
            builder.add(reader.bias, Product(matrix=matrix, in_axis=reader.in_axis, vector=Reference(name=bias)))
    builder.set_vector(bias, Constant(value=0.0))


def _fate(vector: Tensor | None, is_there: bool, moved: Fate | None) -> Fate:
    if vector is None:
        return "none"
    return moved or ("left" if is_there else "identity")


def move_value_bias(context: FoldContext, builder: PlanBuilder, attention: Attention) -> None:
    """Move the bias of the values of an attention into the bias behind it, where that is exact."""
    value, output = attention.value, attention.output
    if value.bias is None:
        return
    head = context.source.tensors[output.weight].shape[output.in_axis] // attention.heads
    match attention.layout:
        case "own":
            rows: Rows | None = None
        case "last":
            rows = Rows(blocks=1, tail=attention.kv_heads * head)
        case _:
            rows = Rows(blocks=attention.kv_heads, tail=head)
    stored = context.vector(value.bias)
    taken = stored if rows is None else stored.view(rows.blocks, -1)[:, -rows.tail :]
    if not builder.is_changed(value.bias) and not bool((taken != 0).any()):
        return
    if reason := legality.against_value_fold(attention):
        builder.refuse("value", attention.name, reason)
        return
    repeat = attention.heads // attention.kv_heads
    moved = Reference(
        name=value.bias, is_folded=True, rows=rows, heads=attention.kv_heads if repeat > 1 else 0, repeat=repeat
    )
    builder.add(str(output.bias), Product(matrix=output.weight, in_axis=output.in_axis, vector=moved))
    builder.zero(value.bias, rows)


def centre_writers(context: FoldContext, builder: PlanBuilder) -> tuple[str, ...]:
    """Centre every writer that may be centred; their names."""
    operation: Operation = "centre" if "centre" in context.operations else "rms"
    centred: list[str] = []
    for space in context.graph.spaces:
        if reason := legality.against_centring(context.graph, space):
            builder.refuse(operation, space, reason)
            continue
        for writer in context.graph.writers(space):
            if reason := legality.against_centring_writer(context.graph, writer, untie=context.untie):
                builder.refuse(operation, writer.name, reason)
                continue
            centred.append(writer.name)
            if isinstance(writer, Linear):
                builder.centre(writer.weight, writer.out_axis)
                if writer.bias is not None:
                    builder.centre_bias(writer.bias)
            else:
                for name in (writer.name, *writer.aliases):
                    builder.centre(name, writer.axis)
    return tuple(centred)


def become_rms(
    context: FoldContext, builder: PlanBuilder, changes: Sequence[NormChange]
) -> tuple[tuple[NormChange, ...], dict[str, NormSpec]]:
    """The changes of all norms with those that become RMSNorms, and path in memory -> spec of these."""
    swaps: dict[str, NormSpec] = {}
    changed = {change.name: change for change in changes}
    if all(norm.kind == "rms" for norm in context.graph.norms):
        builder.refuse("rms", context.graph.architecture, "its norms are RMSNorms")
    for norm in context.graph.norms:
        if norm.kind == "rms":
            continue
        if reason := legality.against_rms(context.graph, norm, untie=context.untie):
            builder.refuse("rms", norm.name, reason)
            continue
        changed[norm.name] = dataclasses.replace(changed[norm.name], becomes_rms=True)
        gain = gains.Gain(norm.weight is not None, norm.offset, has_bias=norm.bias is not None)
        swaps[norm.module] = specs.TORCH_RMS_NORM.replace(eps=norm.eps, **gain.conventions())
    return tuple(changed.values()), swaps


def change_family(
    context: FoldContext, builder: PlanBuilder, num_swapped: int
) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    """The keys of config.json to set and to remove where the model becomes one of another family; None if it does not.

    Args:
        context: The checkpoint.
        builder: Gets the gains of one that the other family has and this one lacks.
        num_swapped: How many norms become RMSNorms; all must.
    """
    graph, becomes = context.graph, context.graph.family.becomes
    if becomes is None:
        return None
    if not context.settings.holds(becomes.when):
        builder.refuse("rms", graph.architecture, becomes.otherwise)
        return None
    if num_swapped < len(graph.norms) or graph.architecture not in becomes.classes:
        return None
    for norm in graph.norms:
        if norm.weight is None:
            dtype = context.source.tensors[graph.tables[0].name].dtype
            builder.create_constant(f"{norm.name}.weight", graph.width, 1.0, dtype)
    written: dict[str, Any] = {
        "model_type": becomes.model_type,
        "architectures": [becomes.classes[graph.architecture]],
    }
    for key, value in becomes.config.items():
        is_taken = isinstance(value, str) and value.startswith("=")
        written[key] = context.settings.value(value[1:]) if is_taken else value
    return written, becomes.drop
