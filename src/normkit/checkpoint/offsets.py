"""`unoffset`: gains that are stored less 1 become plain, in a stock class of another family that computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from normkit.checkpoint.plan import NormChange
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder
from normkit.models.family import Becomes


def store_plain_gains(
    context: FoldContext, builder: PlanBuilder, changes: Sequence[NormChange], *, change_class: bool
) -> tuple[tuple[NormChange, ...], dict[str, Any], tuple[str, ...]]:
    """The changes of all norms, and the keys of config.json to set and to remove; nothing where it is refused."""
    graph, plain = context.graph, context.graph.family.plain
    reason = ""
    if not any(norm.offset for norm in graph.norms):
        reason = "its gains are stored plain"
    elif plain is None:
        reason = graph.family.no_plain_class or "no stock class with plain gains is known that computes the same"
    elif graph.architecture not in plain.classes:
        reason = f"the family {plain.model_type}, which has plain gains, has no class for it"
    elif not context.settings.holds(plain.when):
        reason = plain.otherwise
    elif not change_class:
        reason = f"it would become a {plain.classes[graph.architecture]}, and a model in memory keeps its class"
    if reason or plain is None:
        builder.refuse("unoffset", graph.architecture, reason)
        return tuple(changes), {}, ()
    offsets = {norm.name: norm for norm in graph.norms if norm.offset and norm.weight}
    for norm in offsets.values():
        builder.add_offset(str(norm.weight), norm.offset)
    is_kept = ("left", "identity")
    return (
        tuple(
            replace(change, gain="plain") if change.name in offsets and change.gain in is_kept else change
            for change in changes
        ),
        become(context, plain),
        plain.drop,
    )


def become(context: FoldContext, becomes: Becomes) -> dict[str, Any]:
    """The keys of config.json that make a checkpoint one of another family."""
    written: dict[str, Any] = {
        "model_type": becomes.model_type,
        "architectures": [becomes.classes[context.graph.architecture]],
    }
    for key, value in becomes.config.items():
        is_taken = isinstance(value, str) and value.startswith("=")
        written[key] = context.settings.value(value[1:]) if is_taken else value
    for key, (other, power) in becomes.powers.items():
        written[key] = float(context.settings.value(other)) ** power
    return written
