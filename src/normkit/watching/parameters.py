"""The parameters of a watched model: what each one is, its norm and its gradient's, and how far it moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.identification.sharding import local
from normkit.measurement.batch_norms import with_statistics
from normkit.measurement.layout import block_of
from normkit.measurement.row_counters import widest_dtype
from normkit.measurement.structure import Structure
from normkit.measurement.training import ParameterKind

PARAMETER_SUMS = (
    "elements",
    "sum",
    "squares",
    "gradient squares",
    "gradients",
    "inner",
    "small",
    "moments",
    "held",
    "kept",
)
"""For each parameter: its elements, their sum (norms only) and squares, the squares of its gradient and whether it has
one, the inner product of the two (scale-invariant ones only); how many of a sample of Adam's second moments have a root
below ten times its eps, and the size of that sample; how many of a sample of a norm's 16-bit parameter have a gradient
now, and how many of these are bit for bit as they were when the watch began."""

MOVES = ("moved", "before", "outside", "left")
"""Sums of squares over a parameter's sample: of what a step changed and of the values before that step; of what changed
between the optimizer's last step and this one and of the values that the optimizer had left."""


def sample(tensor: Tensor, count: int = 1024) -> Tensor:
    """Up to so many elements of the part that this process holds, spread evenly, as a view where that is possible."""
    held = local(tensor).detach()
    flat = (torch.view_as_real(held) if held.is_complex() else held).flatten()
    return flat[:: max(1, math.ceil(flat.numel() / count))]


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchedParameter:
    """One parameter."""

    path: str
    tensor: Tensor
    kind: ParameterKind
    """Gains and biases of norms by what was identified, not by name."""
    site: str
    """Path of the norm it belongs to, or ""."""
    block: int | None
    group: Mapping[str, Any] | None
    """The optimizer's group that holds it."""
    group_index: int
    """Index of that group among those of all optimizers; -1 without one."""
    optimizer: torch.optim.Optimizer | None

    def setting(self, name: str) -> float:
        """A number of its group, such as "lr"; NaN where there is none or it is on another device."""
        value = math.nan if self.group is None else self.group.get(name, math.nan)
        if isinstance(value, Tensor):
            return float(value) if value.device.type == "cpu" else math.nan
        return float(value) if isinstance(value, (int, float)) else math.nan


def watched_parameters(
    model: nn.Module, structure: Structure, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[WatchedParameter, ...]:
    """The parameters of a model, in its order; one with several names appears once."""
    norms = norm_parameters(structure)
    held = {
        id(tensor): (index, group, optimizer)
        for index, (group, optimizer) in enumerate((each, one) for one in optimizers for each in one.param_groups)
        for tensor in group["params"]
    }
    owners = {id(tensor): module for module in model.modules() for tensor in module.parameters(recurse=False)}
    # The weight that makes the logits, of a model of transformers.
    find, output = getattr(model, "get_output_embeddings", None), None
    with suppress(AttributeError, NotImplementedError):
        output = getattr(find(), "weight", None) if find is not None else None
    found = []
    for path, tensor in model.named_parameters():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            # Packed integers of a quantized weight have no length.
            continue
        kind: ParameterKind
        if isinstance(owners[id(tensor)], nn.Embedding):
            kind = "embedding"
        elif tensor is output:
            kind = "output"
        else:
            kind = "weight" if tensor.dim() > 1 else "bias"
        site, kind = norms.get(id(tensor), ("", kind))
        index, group, optimizer = held.get(id(tensor), (-1, None, None))
        found.append(
            WatchedParameter(
                path=path,
                tensor=tensor,
                kind=kind,
                site=site,
                block=block_of(path, structure.blocks),
                group=group,
                group_index=index,
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
    modules = {call.path: call.module for call in structure.called.modules}
    for other in structure.others:
        holder = with_statistics(modules[other.path]) if other.passport.verdict == "batch" else None
        for name, kind in kinds:
            if isinstance(tensor := getattr(holder, name, None), Tensor):
                found[id(tensor)] = (other.path, kind)
    return found


def sums_of_squares(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Sum of squares of each tensor, in float64; -1 for None.

    Args:
        tensors: Parameters or gradients, of any dtypes, sparse or not; of a distributed one the part of this process.
        device: The device of the result.
    """
    kind = widest_dtype(device)
    held = [tensor for tensor in tensors if tensor is not None]
    is_usual = all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and tensor.device == device
        for tensor in held
    )
    if len(held) == len(tensors) and is_usual:
        norms: Sequence[Tensor] = torch._foreach_norm(held, 2) if held else (torch.zeros(0, device=device),)
        return torch.stack(tuple(norms)).detach().flatten().to(kind).square()
    found = torch.full((len(tensors),), -1.0, dtype=kind, device=device)
    given = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            # The entries that a tensor has, as real numbers.
            one = local(tensor).detach()
            if one.layout is not torch.strided:
                one = one.coalesce().values() if one.layout is torch.sparse_coo else one.to_dense()
            given[place] = torch.view_as_real(one) if one.is_complex() else one
    for is_wide, dtype in ((False, torch.float32), (True, torch.float64)):
        places = [place for place, tensor in given.items() if (tensor.dtype == torch.float64) == is_wide]
        if places:
            norms = torch._foreach_norm([given[place] for place in places], 2, dtype)
            lengths = torch.stack([norm.to(device) for norm in norms]).to(kind)
            found[torch.tensor(places, device=device)] = lengths.square()
    return found


class UpdateSampler:
    """Takes up to 1024 elements of each parameter, spread evenly, before a step, after it, and before the next.

    Args:
        parameters: They may be replaced in place; if one has another storage after a step, the new one is read.
        device: The device of the results.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._parameters, self._device = tuple(parameters), device
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self._places: list[Tensor] = []
        self._sizes: list[int] = []

    def stepped(self) -> None:
        """An optimizer has moved the parameters: later changes are not its own."""
        self._after = self._samples() if self._before else []

    def moved(self) -> Tensor:
        """Sums of squares of what the current step has changed so far, and of the values before it: (parameters, 2).

        Zeros where no step is under way.
        """
        return self._compared(self._after or self._samples() if self._before else [], self._before)

    def begin(self) -> Tensor:
        """Keep the sample as it is before an optimizer's step.

        Returns:
            Sums of squares of what has changed since `stepped` and of what that step had left: (parameters, 2). Zeros
            where `stepped` was not called since the last step began.
        """
        now = self._samples()
        left = self._after
        self._before, self._after = now, []
        return self._compared(now, left)

    def _compared(self, now: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
        # A sample of other sizes has emptied `before`.
        if not before:
            return torch.zeros(len(self._parameters), 2, dtype=widest_dtype(self._device), device=self._device)
        changes = [new - old for new, old in zip(now, before, strict=True)]
        return torch.stack([self._squares(changes), self._squares(before)], -1)

    def _samples(self) -> list[Tensor]:
        """One vector for each device and width of numbers."""
        parts: dict[tuple[torch.device, bool], list[tuple[int, Tensor]]] = {}
        for index, parameter in enumerate(self._parameters):
            taken = sample(parameter)
            parts.setdefault((taken.device, taken.dtype == torch.float64), []).append((index, taken))
        sizes = [len(taken) for found in parts.values() for _, taken in found]
        if sizes != self._sizes:
            # A parameter of another size than before cannot be compared with its past.
            self._sizes, self._places, self._before, self._after = sizes, [], [], []
            for (device, _), found in parts.items():
                counts = torch.tensor([len(taken) for _, taken in found])
                self._places.append(torch.tensor([index for index, _ in found]).repeat_interleave(counts).to(device))
        vectors = [torch.cat([taken for _, taken in found]) for found in parts.values()]
        return [vector if vector.dtype == torch.float64 else vector.float() for vector in vectors]

    def _squares(self, vectors: Sequence[Tensor]) -> Tensor:
        """Sum of squares of each parameter's part."""
        kind = widest_dtype(self._device)
        total = torch.zeros(len(self._parameters), dtype=kind, device=self._device)
        for vector, places in zip(vectors, self._places, strict=True):
            sums = torch.zeros(len(self._parameters), dtype=kind, device=vector.device)
            total = total + sums.index_add_(0, places, vector.to(kind).square()).to(self._device)
        return total
