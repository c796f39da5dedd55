"""How attention logits are counted while a model trains: a bound from all queries and keys, exact values of some rows.

max |q| max |k| scale bounds every logit of a head in a sequence, whatever computes the attention. The exact logits are
those of up to eight query rows, spread evenly, with all of their keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.measurement.attention import SATURATED, QueriesAndKeys
from normkit.measurement.tables import Table, Tables

HEAD_SUMS = ("rows", "entropy", "uniform", "contested", "spread", "saturated")
HEAD_PEAKS = ("bound", "sampled")
_SAMPLED_ROWS = 8
_MASKED = -9.9e3


def head_tables(calls: int, heads: int) -> tuple[Table, ...]:
    """The tables of so many attention calls of up to so many heads."""
    return (
        Table(name="heads", shape=(calls, heads, len(HEAD_SUMS))),
        Table(name="head peaks", shape=(calls, heads, len(HEAD_PEAKS)), keeps_largest=True),
    )


def add_call(tables: Tables, place: int, call: QueriesAndKeys, mask: Tensor | None, first: int = 0) -> None:
    """Count one scaled_dot_product_attention call.

    Args:
        tables: Of `head_tables`.
        place: The call's row in them.
        call: Its queries and keys.
        mask: True where a query's token counts, (B, T), or None for all.
        first: Number of the first head, where other processes have others.
    """
    if not call.query.numel():
        return
    # Keys of several heads are interleaved in memory; multiplying these takes a CPU three times as long.
    query, key = call.query.float(), call.key.float().contiguous()
    batch, heads, length, _ = query.shape
    counted = _tokens(mask, query)
    # A masked key may hold anything; where it is not known which keys are padding, all of them are taken.
    keys = counted if key.shape[2] == length else None
    groups = heads // key.shape[1]
    longest_query = _longest(query, counted)
    longest_key = _longest(key, keys).repeat_interleave(groups, 1)
    # One bound for each sequence, so that it makes no difference which process has which sequences.
    bound = (longest_query * longest_key).amax(0) * abs(call.scale)
    rows = _spread(length, query.device)
    # The rows of query heads that share a key are stacked.
    sampled = (query[:, :, rows] * call.scale).reshape(batch, key.shape[1], groups * len(rows), query.shape[-1])
    logits = (sampled @ key.transpose(-1, -2)).reshape(batch, heads, len(rows), key.shape[2])
    if counted is None and call.mask is None:
        _count(tables, place, logits, _triangle(rows, key.shape[2]) if call.causal else None, bound, None, first)
        return
    permitted = torch.ones(1, 1, len(rows), key.shape[2], dtype=torch.bool, device=query.device)
    if counted is not None:
        permitted = permitted & counted[:, :, rows, None]
    if keys is not None:
        permitted = permitted & keys[:, :, None, :]
    if call.causal:
        permitted = permitted & _triangle(rows, key.shape[2])
    added = None
    if call.mask is not None:
        given = call.mask.detach()
        given = given.reshape(*(1,) * (4 - given.dim()), *given.shape)
        given = given if given.shape[2] == 1 else given[:, :, rows]
        if given.dtype == torch.bool:
            permitted = permitted & given
        else:
            is_let_through = given > _threshold(given.dtype)
            permitted = permitted & is_let_through
            added = torch.where(is_let_through, given, 0.0).float()
    _count(tables, place, torch.where(permitted, logits, 0.0), permitted, bound, added, first)


def add_logits(tables: Tables, place: int, logits: Tensor, mask: Tensor | None, first: int = 0) -> None:
    """Count one softmax over logits of shape (B, H, T, S)."""
    if not logits.numel():
        return
    attended = (logits > _threshold(logits.dtype)) | logits.isnan()
    counted = _tokens(mask, logits)
    if counted is not None:
        attended = attended & counted[..., None]
    bound = torch.where(attended, logits, 0.0).abs().amax((0, 2, 3)).float()
    rows = _spread(logits.shape[2], logits.device)
    permitted = attended[:, :, rows]
    _count(tables, place, torch.where(permitted, logits[:, :, rows].float(), 0.0), permitted, bound, None, first)


def _count(
    tables: Tables,
    place: int,
    logits: Tensor,
    permitted: Tensor | None,
    bound: Tensor,
    added: Tensor | None,
    first: int,
) -> None:
    """Count sampled rows; an additive mask changes their entropy, not their magnitude.

    Logits that a mask forbids are 0 already; those that a causal mask forbids are multiplied by 0 here, which is
    quicker, and keeps NaN.
    """
    kind = tables["heads"].dtype
    heads = slice(first, first + logits.shape[1])
    if permitted is None:
        permitted = torch.ones(1, 1, 1, logits.shape[3], dtype=torch.bool, device=logits.device)
    elif permitted.dim() == 2:
        logits = logits * permitted.to(logits.dtype)
    peak = torch.maximum(logits.amax((0, 2, 3)), -logits.amin((0, 2, 3)))
    peaks = torch.stack([bound, peak], -1).to(kind).nan_to_num(nan=math.inf)
    of_all = tables["head peaks"][place, heads]
    of_all.copy_(torch.maximum(of_all, peaks))
    keys = permitted.sum(-1).expand(logits.shape[:-1])
    forbidding = torch.zeros(permitted.shape, dtype=logits.dtype, device=logits.device)
    forbidding.masked_fill_(~permitted, -math.inf)
    spread = (logits + forbidding).amax(-1) - logits.sum(-1) / keys
    contested = (keys > 1) & spread.isfinite()
    kept = logits if added is None else logits + added
    summed = kept + forbidding
    share = summed.softmax(-1)
    # The entropy -sum p log p, where log p is the log of the largest share plus the distance of a logit from its peak.
    below = kept - summed.amax(-1, keepdim=True)
    largest = share.amax(-1)
    entropy = -(share * below).sum(-1) - largest.log()
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


def _longest(heads: Tensor, counted: Tensor | None) -> Tensor:
    """The largest length of the vectors (B, H, T, d) that count, for each sequence and head: (B, H)."""
    lengths: Tensor = torch.linalg.vector_norm(heads, dim=-1)
    return (lengths if counted is None else torch.where(counted, lengths, 0.0)).amax(2)


def _triangle(rows: Tensor, keys: int) -> Tensor:
    """True for each key that a row may attend to under a causal mask: (rows, keys)."""
    return torch.arange(keys, device=rows.device) <= rows[:, None]


def _spread(length: int, device: torch.device) -> Tensor:
    """Up to eight of so many rows, spread evenly from the first to the last."""
    count = min(_SAMPLED_ROWS, length)
    return torch.arange(count, device=device) * (length - 1) // max(count - 1, 1)


def _threshold(dtype: torch.dtype) -> float:
    return max(torch.finfo(dtype).min / 2, _MASKED)


def _tokens(mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """True where a query row (B, 1, T) of scores (B, H, T, ...) counts; None where all do."""
    batch, _, length = scores.shape[:3]
    if mask is None or mask.shape != (batch, length):
        return None
    return mask[:, None]
