"""The mean taken out of what is written to sums, and LayerNorms that become RMSNorms.

centre  LN(P x) = LN(x), where P subtracts the mean
rms     where P x = x: var(x) = mean(x^2), so that LayerNorm is RMSNorm with the same eps
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from normkit.checkpoint.offsets import become
from normkit.checkpoint.plan import NormChange, Operation
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder
from normkit.checkpoint.scaling import spec_of
from normkit.models.graph import Linear
from normkit.spec import NormSpec


def centre_writers(context: FoldContext, builder: PlanBuilder) -> tuple[str, ...]:
    """Centre every writer that may be centred; their names."""
    operation: Operation = "centre" if "centre" in context.operations else "rms"
    centred: list[str] = []
    for space in context.graph.spaces:
        if reason := context.graph.against_centring(space):
            builder.refuse(operation, space, reason)
            continue
        for writer in context.graph.writers(space):
            if reason := context.graph.against_centring_writer(writer, untie=context.untie):
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
        if reason := context.graph.against_rms(norm, untie=context.untie):
            builder.refuse("rms", norm.name, reason)
            continue
        changed[norm.name] = dataclasses.replace(changed[norm.name], becomes_rms=True)
        swaps[norm.module] = spec_of(dataclasses.replace(norm, kind="rms"), norm.eps)
    return tuple(changed.values()), swaps


def change_family(
    context: FoldContext, builder: PlanBuilder, num_swapped: int
) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    """The keys of config.json to set and to remove if the model becomes one of another family, else None.

    All norms must become RMSNorms. The builder gets the gains of one that the other family has and this one lacks.
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
    return become(context, becomes), becomes.drop
