"""What is written to a sum is centred, and then a LayerNorm that reads it is an RMSNorm, with the same eps.

LN(P x) = LN(x),   and for P x = x:   var(x) = mean(x^2)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from normkit import specs
from normkit.checkpoint.draft import Draft
from normkit.checkpoint.plan import NormChange, Operation
from normkit.checkpoint.request import Request
from normkit.conventions.gain import Gain
from normkit.models import legality
from normkit.models.graph import Linear
from normkit.spec import NormSpec


def centre_writers(request: Request, draft: Draft) -> tuple[str, ...]:
    """Draft the centring of every writer that may be centred; their names."""
    operation: Operation = "centre" if "centre" in request.operations else "rms"
    centred: list[str] = []
    for space in request.graph.spaces:
        if reason := legality.against_centring(request.graph, space):
            draft.refuse(operation, space, reason)
            continue
        for writer in request.graph.writers(space):
            if reason := legality.against_centring_writer(request.graph, writer, untie=request.untie):
                draft.refuse(operation, writer.name, reason)
                continue
            centred.append(writer.name)
            if isinstance(writer, Linear):
                draft.centre(writer.weight, writer.out_axis)
                if writer.bias is not None:
                    draft.centre_bias(writer.bias)
            else:
                for name in (writer.name, *writer.aliases):
                    draft.centre(name, writer.axis)
    return tuple(centred)


def become_rms(
    request: Request, draft: Draft, changes: Sequence[NormChange]
) -> tuple[tuple[NormChange, ...], dict[str, NormSpec]]:
    """What becomes of the norms, and path in memory -> spec of those that need not centre any longer."""
    swaps: dict[str, NormSpec] = {}
    changed = {change.name: change for change in changes}
    if all(norm.kind == "rms" for norm in request.graph.norms):
        draft.refuse("rms", request.graph.architecture, "its norms are RMSNorms")
    for norm in request.graph.norms:
        if norm.kind == "rms":
            continue
        if reason := legality.against_rms(request.graph, norm, untie=request.untie):
            draft.refuse("rms", norm.name, reason)
            continue
        changed[norm.name] = dataclasses.replace(changed[norm.name], becomes_rms=True)
        gain = Gain(norm.weight is not None, norm.offset, has_bias=norm.bias is not None)
        swaps[norm.module] = specs.TORCH_RMS_NORM.replace(eps=norm.eps, **gain.conventions())
    return tuple(changed.values()), swaps


def other_class(request: Request, draft: Draft, swapped: int) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    """The keys of config.json to set and those to drop when the model becomes one of another family; None if not."""
    graph, becomes = request.graph, request.graph.family.becomes
    if becomes is None:
        return None
    if not request.settings.holds(becomes.when):
        draft.refuse("rms", graph.architecture, becomes.otherwise)
        return None
    if swapped < len(graph.norms) or graph.architecture not in becomes.classes:
        return None
    for norm in graph.norms:
        if norm.weight is None:
            dtype = request.source.tensors[graph.tables[0].name].dtype
            draft.create_constant(f"{norm.name}.weight", graph.width, 1.0, dtype)
    written: dict[str, Any] = {
        "model_type": becomes.model_type,
        "architectures": [becomes.classes[graph.architecture]],
    }
    for key, value in becomes.config.items():
        is_taken = isinstance(value, str) and value.startswith("=")
        written[key] = request.settings.value(value[1:]) if is_taken else value
    return written, becomes.drop
