"""The parameters of a watched model: what each one is, and what the optimizers do with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.inspection.blocks import block_of
from normkit.inspection.structure import Structure
from normkit.inspection.training import ParameterKind

PARAMETER_SUMS = ("elements", "sum", "squares", "gradient squares", "gradients", "inner", "small", "moments")
"""Of each parameter: its elements, their sum (norms only) and squares, the squares of its gradient and whether it has
one, the inner product of the two (scale-invariant ones only); of a sample of Adam's second moments those whose root is
below ten times its eps, and how many were looked at."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchedParameter:
    """One parameter.

    Attributes:
        path: Its name in the model.
        tensor: The parameter.
        kind: What it is; gains and biases of norms by what was identified.
        site: Path of the norm it belongs to, or "".
        block: Index of its block, or None.
        group: The optimizer's group that holds it, or None.
        optimizer: That optimizer, or None.
    """

    path: str
    tensor: Tensor
    kind: ParameterKind
    site: str
    block: int | None
    group: Mapping[str, Any] | None
    optimizer: torch.optim.Optimizer | None

    def setting(self, name: str) -> float:
        """A number of its group, such as "lr"; NaN where there is none or it lies on another device."""
        value = math.nan if self.group is None else self.group.get(name, math.nan)
        if isinstance(value, Tensor):
            return float(value) if value.device.type == "cpu" else math.nan
        return float(value) if isinstance(value, (int, float)) else math.nan


def watched_parameters(
    model: nn.Module, structure: Structure, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[WatchedParameter, ...]:
    """The parameters of a model, in its order; one that has several names is there once.

    Args:
        model: The model.
        structure: What it is made of.
        optimizers: They may hold other parameters too.
    """
    norms = norm_parameters(structure)
    held = {
        id(tensor): (group, optimizer)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for tensor in group["params"]
    }
    owners = {id(tensor): module for module in model.modules() for tensor in module.parameters(recurse=False)}
    output = _output_weight(model)
    found = []
    for path, tensor in model.named_parameters():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            # Packed integers of a quantised weight have no length.
            continue
        site, kind = norms.get(id(tensor), ("", _kind(tensor, owners[id(tensor)], output)))
        group, optimizer = held.get(id(tensor), (None, None))
        found.append(
            WatchedParameter(
                path=path,
                tensor=tensor,
                kind=kind,
                site=site,
                block=block_of(path, structure.blocks),
                group=group,
                optimizer=optimizer,
            )
        )
    return tuple(found)


def norm_parameters(structure: Structure) -> dict[int, tuple[str, ParameterKind]]:
    """Path of the norm and kind, by the parameter's id: parameters by name in modules, the very tensors in calls."""
    found: dict[int, tuple[str, ParameterKind]] = {}
    calls = {(call.parent, call.function, call.ordinal): call.arguments for call in structure.called.functions}
    kinds: tuple[tuple[str, ParameterKind], ...] = (("weight", "gain"), ("bias", "bias of a norm"))
    for site in structure.sites:
        for name, kind in kinds:
            if site.module is None:
                tensors = [calls.get((site.parent, site.function or "", site.ordinal), {}).get(name)]
            else:
                inside = dict(site.module.named_parameters())
                names = getattr(site.passport, f"{name}_name") or ""
                tensors = [inside.get(each.strip()) for each in names.split(",")]
            found |= {id(tensor): (site.path, kind) for tensor in tensors if tensor is not None}
    return found


def _output_weight(model: nn.Module) -> Tensor | None:
    """The weight that makes the logits, of a model of transformers."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        return getattr(find(), "weight", None) if find is not None else None
    except (AttributeError, NotImplementedError):
        return None


def _kind(tensor: Tensor, owner: nn.Module, output: Tensor | None) -> ParameterKind:
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if tensor is output:
        return "output"
    return "weight" if tensor.dim() > 1 else "bias"
