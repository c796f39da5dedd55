"""Pairs of small batches that differ in what some rows should not know of, and how far these rows move."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.measurement.running import Batch, mapped, name_of_ids, vocabulary

Kind = Literal["batch", "time", "padding", "mode"]

# A prime is seldom the width of anything else.
_ROWS, _TOKENS = 2, 19
_SEED = 0
# Rows far smaller than the largest are held against this share of it.
_FLOOR = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Perturbation:
    """Two batches, and the rows that should be the same for both."""

    kind: Kind
    """The difference: another sample, later tokens, or the content of padding."""
    before: Batch
    after: Batch
    """Tensors of the same shapes."""
    kept: Tensor
    """(B, T), True at the tokens whose rows should not change."""


def perturbations(model: nn.Module, batch: Batch) -> tuple[Perturbation, ...] | None:
    """The perturbations for a model: other samples, later tokens, and padding for a model that takes a mask.

    Args:
        model: The model; it is not changed.
        batch: The first two rows and the first 19 tokens are used; for a single row, a second one is made.

    Returns:
        The perturbations, or None without token ids of shape (B, T) that could be changed.
    """
    name = name_of_ids(batch)
    if name is None:
        return None
    small = _small(batch, name)
    other = _other_ids(small[name], vocabulary(model))
    if other is None:
        return None
    if batch[name].shape[0] == 1:
        small[name] = torch.cat([small[name][:1], other[1:]])
        other = torch.cat([other[:1], small[name][:1]])
    ids = small[name]
    rows, tokens = ids.shape
    row, token = torch.arange(rows)[:, None], torch.arange(tokens)[None, :]

    def perturbation(kind: Kind, changed: Tensor, given: Batch) -> Perturbation:
        changed, kept = changed.expand(rows, tokens), ~changed.expand(rows, tokens)
        if kind == "batch":
            kept = (row > 0).expand(rows, tokens)
        after = {**given, name: torch.where(changed.to(ids.device), other, ids)}
        return Perturbation(kind=kind, before=given, after=after, kept=kept)

    plan = [perturbation("batch", row == 0, small)]
    if tokens > 1:
        plan.append(perturbation("time", token >= tokens // 2, small))
    if tokens > 2 and _takes_mask(model):
        padding = (row > 0) & (token >= tokens - tokens // 3)
        mask = (~padding).long().to(ids.device)
        plan.append(perturbation("padding", padding, {**small, "attention_mask": mask}))
    return tuple(plan)


def change(before: Tensor, after: Tensor, kept: Tensor) -> float:
    """Largest difference of a row that should not move over its largest magnitude; 0 where there is no such row.

    Args:
        before: A tensor with rows for B samples and T tokens, in some layout; another has no such row.
        after: The same, of a second run.
        kept: (B, T), True at the rows to compare.
    """
    kept = kept.to(before.device)
    if before.shape != after.shape or (rows := _rows(before, kept)) is None:
        return 0.0
    others = _rows(after, kept)
    assert others is not None
    a, b = (part[0][part[1]].flatten(1).double() for part in (rows, others))
    if not a.numel():
        return 0.0
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    size = a.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).amax(1)
    largest = float(before.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
    return float((difference.amax(1) / size.clamp_min(max(_FLOOR * largest, 1e-300))).max())


def put_back(before: Tensor, after: Tensor, kept: Tensor) -> Tensor:
    """`after` with those rows of `before` that should not have moved."""
    kept = kept.to(before.device)
    patched = after.contiguous().clone(memory_format=torch.contiguous_format)
    old, new = _rows(before.contiguous(), kept), _rows(patched, kept)
    assert old is not None
    assert new is not None
    new[0][new[1]] = old[0][old[1]]
    return patched


def _rows(values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor] | None:
    """The tensor as (B, T, ...), or (B, 1, ...) where it has no tokens, and which of these rows are kept."""
    batch, tokens = kept.shape
    if values.dim() < 2:
        return None
    size = values.shape[0]
    if size == tokens and values.shape[1] == batch and size != batch:
        return values.transpose(0, 1), kept
    if size % batch == 0:
        inner = values.shape[1:]
        axis = next((axis for axis, length in enumerate(inner) if length == tokens), None)
        if axis is not None:
            # Heads may be folded into the samples.
            return values.reshape(batch, size // batch, *inner).movedim(axis + 2, 1), kept
        if size == batch * tokens:
            return values.reshape(batch, tokens, *inner), kept
        if size == batch:
            return values.unsqueeze(1), kept.all(1, keepdim=True)
    return None


def _small(batch: Batch, name: str) -> dict[str, Any]:
    """Two rows of few tokens, all of them attended to."""
    given, tokens = batch[name].shape
    chosen = [row % given for row in range(_ROWS)]

    def small(key: str, value: Tensor) -> Tensor:
        if value.dim() and value.shape[0] == given:
            value = value[chosen]
        if value.dim() > 1 and value.shape[1] == tokens:
            value = value[:, :_TOKENS]
        return torch.ones_like(value) if key.endswith("attention_mask") else value

    changed: dict[str, Any] = mapped(dict(batch), small)
    return changed


def _other_ids(ids: Tensor, entries: int | None) -> Tensor | None:
    """Another id at each place, drawn from those that there are; None if there is no other."""
    known = torch.unique(ids)
    generator = torch.Generator().manual_seed(_SEED)
    if len(known) == 1:
        return (ids + 1) % entries if entries is not None and entries > 1 else None
    steps = torch.randint(1, len(known), ids.shape, generator=generator).to(ids.device)
    places: Tensor = (torch.searchsorted(known, ids.contiguous()) + steps) % len(known)
    others: Tensor = known[places]
    return others


def _takes_mask(model: nn.Module) -> bool:
    parameters: Mapping[str, object] = signatures.signature(model.forward).parameters
    return "attention_mask" in parameters
