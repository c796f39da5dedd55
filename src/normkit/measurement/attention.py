"""Attention logits counted into tables: a bound from the norms of queries and keys, exact logits of up to 16 rows.

Counting reads nothing back and no shape depends on data, so no device is waited for.
What a call masks out never enters: keys that its mask or causality forbids, query rows that are padding
or have no key left. An additive mask's finite entries (ALiBi, relative positions) count for the entropy,
not for the magnitudes of "sdpa" logits, which are q . k times the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from normkit.measurement.facts import Attention
from normkit.measurement.row_counters import Table, Tables

_SAMPLED_ROWS = 16
SATURATED = 0.99
"""A row of attention is saturated where one key takes more than this share."""

HEAD_SUMS = ("rows", "entropy", "uniform", "contested", "spread", "saturated")
HEAD_PEAKS = ("bound", "sampled")

# Hand-written attention masks with -1e4 to -1e9, and logits that have exploded so far are seen above zero too.
_MASKED = -9.9e3


@dataclass(frozen=True, eq=False, kw_only=True)
class QueriesAndKeys:
    """The arguments of one scaled_dot_product_attention call that its logits depend on."""

    query: Tensor
    """Shape (B, H, T, d)."""
    key: Tensor
    """Shape (B, Hk, S, d), H a multiple of Hk."""
    mask: Tensor | None
    """Boolean (True may attend) or additive, broadcast against (B, H, T, S); or None."""
    causal: bool
    """Key s may be attended from row t if s <= t."""
    scale: float
    """The factor on q . k."""


def queries_and_keys(args: Sequence[Any], kwargs: Mapping[str, Any]) -> QueriesAndKeys | None:
    """The call's arguments, or None if queries and keys are not of shape (B, H, T, d)."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, key, scale = given["query"], given["key"], given.get("scale")
    if query.dim() != 4 or key.dim() != 4:
        return None
    return QueriesAndKeys(
        query=query.detach(),
        key=key.detach(),
        mask=given.get("attn_mask"),
        causal=bool(given.get("is_causal", False)),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
    )


def softmax_logits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The input of a softmax call if it looks like attention, or None."""
    logits: Tensor = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if logits.dim() != 4 or dim not in (-1, 3) or not logits.is_floating_point():
        return None
    return logits.detach()


@dataclass(frozen=True, eq=False, kw_only=True)
class Selection:
    """The pairs that the masks of a call allow, and the query rows that are sampled."""

    valid: Tensor
    """Query rows that are tokens and have a key to attend to, (B, T)."""
    keys: Tensor
    """Keys that any of them may attend to, (B, 1, S)."""
    rows: Tensor
    """Up to 16 rows a batch element, spread evenly over the valid ones, (B, R)."""
    permitted: Tensor
    """Keys that each of these may attend to, (1 or B, 1 or H, R, S)."""
    bias: Tensor | None
    """The additive mask of these rows, 0 where it hides a key; None without one."""


def select(call: QueriesAndKeys, tokens: Tensor | None) -> Selection:
    """Choose what to look at of a call; it depends on its masks and sizes alone.

    The mask of its tokens, (B, T), tells which query rows count.
    """
    valid = _valid_rows(call.query, tokens)
    length = call.key.shape[2]
    positions = torch.arange(length, device=valid.device)
    if call.mask is None:
        allowed = torch.ones(1, 1, 1, length, dtype=torch.bool, device=valid.device)
        keys = torch.ones(len(valid), 1, length, dtype=torch.bool, device=valid.device)
    else:
        mask = _four(call.mask)
        allowed = mask if mask.dtype == torch.bool else mask > _threshold(mask.dtype)
        some_head = _any(allowed, 1)
        valid = valid & _any(some_head, -1)
        keys = _any(some_head.view(torch.uint8) * valid.view(torch.uint8)[..., None], 1)[:, None]
        keys = keys.expand(-1, -1, length)
    rows, kept = _spread(valid)
    permitted = _rows_of(allowed, rows).expand(-1, -1, -1, length) & kept[:, None, :, None]
    if call.causal:
        queries = torch.arange(valid.shape[1], device=valid.device)
        keys = keys & (positions <= torch.where(valid, queries, -1).amax(-1)[:, None, None])
        permitted = permitted & (positions <= rows[:, None, :, None])
    bias = None
    if call.mask is not None and call.mask.dtype != torch.bool:
        bias = _rows_of(_four(call.mask).masked_fill(~allowed, 0.0), rows).float()
    return Selection(valid=valid, keys=keys, rows=rows, permitted=permitted, bias=bias)


def head_tables(calls: int, heads: int) -> tuple[Table, ...]:
    """The tables of so many attention calls of up to so many heads."""
    return (
        Table(name="heads", shape=(calls, heads, len(HEAD_SUMS))),
        Table(name="head peaks", shape=(calls, heads, len(HEAD_PEAKS)), keeps_largest=True),
    )


def add_call(tables: Tables, place: int, call: QueriesAndKeys, chosen: Selection, first: int = 0) -> None:
    """Count one scaled_dot_product_attention call.

    `first` is the number of its first head, where other processes have others.
    """
    # Keys of several heads are interleaved in memory; multiplying these takes a CPU three times as long.
    query, key = call.query, call.key.float().contiguous()
    longest_query = torch.where(chosen.valid[:, None], _lengths(query), 0.0).amax(-1)
    longest_key = torch.where(chosen.keys, _lengths(key), 0.0).amax(-1)
    groups = query.shape[1] // key.shape[1]
    # One bound for each sequence, so that it makes no difference which process has which sequences.
    bounds = (longest_query * longest_key.repeat_interleave(groups, 1) * abs(call.scale)).amax(0)
    sampled = _rows_of(query, chosen.rows).float() * call.scale
    # The rows of query heads that share a key are stacked.
    grouped = sampled.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    logits = (grouped @ key.transpose(-1, -2)).reshape(*sampled.shape[:-1], -1)
    _count(tables, place, logits, chosen.permitted, chosen.bias, bounds, first)


def add_logits(tables: Tables, place: int, logits: Tensor, tokens: Tensor | None, first: int = 0) -> None:
    """Count one softmax over logits of shape (B, H, T, S); `tokens` is the mask (B, T) of its rows, or None."""
    valid = _valid_rows(logits, tokens)
    attended = (logits > _threshold(logits.dtype)) | logits.isnan()
    bounds = torch.where(attended & valid[:, None, :, None], logits, 0.0).abs().amax((0, 2, 3)).float()
    rows, kept = _spread(valid)
    permitted = _rows_of(attended, rows) & kept[:, None, :, None]
    _count(tables, place, _rows_of(logits, rows).float(), permitted, None, bounds, first)


def _count(
    tables: Tables, place: int, logits: Tensor, permitted: Tensor, bias: Tensor | None, bounds: Tensor, first: int
) -> None:
    """Count sampled rows (B, H, R, S).

    `permitted` are the keys attended to, `bias` is what is added before the softmax, `bounds` has one number a head.
    """
    kind, heads = tables["heads"].dtype, slice(first, first + logits.shape[1])
    hidden = ~permitted
    # On a CPU this takes a quarter of what `where` takes.
    kept = logits.masked_fill(hidden, 0.0)
    keys = permitted.expand(-1, -1, -1, logits.shape[-1]).sum(-1).expand(logits.shape[:-1])
    seen = kept.masked_fill(hidden, -math.inf)
    highest = seen.amax(-1, keepdim=True)
    peak = torch.maximum(highest.amax((0, 2, 3)), -kept.amin((0, 2, 3)))
    # A number that is not one bounds nothing.
    peaks = torch.stack([bounds, peak], -1).to(kind).nan_to_num(nan=math.inf)
    of_all = tables["head peaks"][place, heads]
    of_all.copy_(torch.maximum(of_all, peaks))
    spread = highest.squeeze(-1) - kept.sum(-1) / keys
    contested = (keys > 1) & spread.isfinite()
    if bias is not None:
        kept = kept + bias
        seen = kept.masked_fill(hidden, -math.inf)
        highest = seen.amax(-1, keepdim=True)
    share = seen.softmax(-1)
    # The entropy -sum p log p, where log p is the log of the largest share plus the distance of a logit from its peak.
    largest = share.amax(-1)
    entropy = -torch.linalg.vecdot(share, kept - highest) - largest.log()
    # A row without a key, or with one that is not a number, has no entropy.
    known = (keys > 0) & entropy.isfinite()
    sums = torch.stack(
        [
            known.sum((0, 2)).to(kind),
            torch.where(known, entropy, 0.0).to(kind).sum((0, 2)),
            torch.where(known, keys, 1).to(kind).log().sum((0, 2)),
            contested.sum((0, 2)).to(kind),
            torch.where(contested, spread, 0.0).to(kind).sum((0, 2)),
            ((largest > SATURATED) & contested).sum((0, 2)).to(kind),
        ],
        -1,
    )
    tables["heads"][place, heads].add_(sums)


def attention_at(
    tables: Mapping[str, Tensor],
    place: int,
    *,
    path: str,
    block: int | None,
    source: Literal["sdpa", "softmax"],
    heads: int,
    head_dim: int,
) -> Attention:
    """The attention that one line of the tables counts, in float64 on the CPU; the keywords are its fields."""
    sums, peaks = tables["heads"][place, :heads], tables["head peaks"][place, :heads].clamp_min(0.0)
    rows, entropy, uniform, contested, spread, saturated = sums.unbind(-1)
    bounds, sampled = peaks.unbind(-1)
    total = float(rows.sum())
    return Attention(
        path=path,
        block=block,
        source=source,
        heads=heads,
        head_dim=head_dim,
        bound=float(bounds.max()),
        bounds=tuple(bounds.tolist()),
        sampled_max=float(sampled.max()),
        sampled_rows=round(total),
        entropy=float(entropy.sum()) / total if total else math.nan,
        entropy_min=float((entropy / rows)[rows > 0].min()) if total else math.nan,
        uniform_entropy=float(uniform.sum()) / total if total else math.nan,
        spreads=tuple((spread / contested).tolist()),
        saturations=tuple((saturated / contested).tolist()),
    )


def _threshold(dtype: torch.dtype) -> float:
    return max(torch.finfo(dtype).min / 2, _MASKED)


def _lengths(heads: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(heads.float(), dim=-1)
    return lengths


def _four(mask: Tensor) -> Tensor:
    """A mask with all of its four axes, those it is broadcast along of size 1."""
    return mask.detach().reshape(*(1,) * (4 - mask.dim()), *mask.shape)


def _valid_rows(scores: Tensor, tokens: Tensor | None) -> Tensor:
    """The query rows (B, T) that are tokens."""
    if tokens is None:
        return torch.ones(scores.shape[0], scores.shape[2], dtype=torch.bool, device=scores.device)
    return tokens.to(scores.device)


def _spread(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Up to 16 row indices (B, R) spread evenly over the valid rows of (B, T), and which of them to count."""
    wanted = min(_SAMPLED_ROWS, valid.shape[1])
    count = valid.sum(-1, keepdim=True)
    steps = torch.arange(wanted, device=valid.device)
    last = max(1, wanted - 1)
    # Rounded in whole numbers: a quotient would have the default dtype, which may be one of 16 bits.
    position = ((2 * steps * (count - 1) + last) // (2 * last)).clamp_min(0)
    repeated = torch.diff(position, dim=-1, prepend=torch.full_like(count, -1)) == 0
    # The place of the first row with so many valid ones up to it.
    places = torch.searchsorted(valid.cumsum(-1), position + 1).clamp_max(valid.shape[1] - 1)
    return places, ~repeated & (count > 0)


def _any(flags: Tensor, dim: int) -> Tensor:
    """`torch.any`, which takes ten times as long on a CPU as the largest of bytes."""
    return flags.view(torch.uint8).amax(dim).bool()


def _rows_of(scores: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, R) along axis 2 of (1 or B, 1 or H, 1 or T, S), one set for each batch element: (B, H, R, S)."""
    if scores.shape[2] == 1:
        return scores
    batch = torch.arange(len(rows), device=rows.device)[:, None]
    return scores.expand(len(rows), -1, -1, -1)[batch, :, rows].transpose(1, 2)
