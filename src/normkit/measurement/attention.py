"""Streaming statistics of attention logits: a bound from the norms of queries and keys, exact logits of a few rows.

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

_SAMPLED_ROWS = 16
SATURATED = 0.99
"""A row of attention is saturated where one key takes more than this share."""

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


def softmax_logits(args: Sequence[Any], kwargs: Mapping[str, Any], tokens: tuple[int, int] | None) -> Tensor | None:
    """The input of a softmax call if it looks like attention, or None.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        tokens: (B, T) of the tokens at this point of the model, where that is known.
    """
    logits: Tensor = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if logits.dim() != 4 or dim not in (-1, 3) or not logits.is_floating_point():
        return None
    if tokens is not None and (logits.shape[0], logits.shape[2]) != tokens:
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
    added: Tensor
    """The addition to their logits: -inf for a hidden key, else the additive mask or 0."""


def select(call: QueriesAndKeys, tokens: Tensor | None) -> Selection:
    """Choose what to look at of a call; it depends on its masks and sizes alone.

    Args:
        call: The call.
        tokens: Token mask (B, T) of its query rows, or None.
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
    added = _forbidding(permitted)
    if call.mask is not None and call.mask.dtype != torch.bool:
        added = added + _rows_of(_four(call.mask), rows).float()
    return Selection(valid=valid, keys=keys, rows=rows, permitted=permitted, added=added)


class AttentionAccumulator:
    """Adds up the calls of one attention module.

    Args:
        path: The module's path.
        block: Index of its block, or None.
        source: "sdpa" or "softmax", as in `Attention`.
        heads: Number of query heads.
    """

    def __init__(self, path: str, block: int | None, source: Literal["sdpa", "softmax"], heads: int) -> None:
        self._path, self._block, self._source = path, block, source
        self._head_dim = 0
        self._bounds = torch.zeros(heads, dtype=torch.float64)
        self._entropy = torch.zeros(heads, dtype=torch.float64)
        self._rows = torch.zeros(heads, dtype=torch.int64)
        # Over rows with two keys or more: their number, the sum of their spreads, the saturated ones.
        self._contested, self._spread, self._saturated = torch.zeros(3, heads, dtype=torch.float64)
        self._uniform = 0.0
        self._peak = 0.0

    def add_call(self, call: QueriesAndKeys, chosen: Selection) -> None:
        """Count one scaled_dot_product_attention call, of which `select` has chosen what to look at."""
        query, key = call.query, call.key
        self._head_dim = query.shape[-1]
        longest_query = torch.where(chosen.valid[:, None], _lengths(query), 0.0).amax(-1)
        longest_key = torch.where(chosen.keys, _lengths(key), 0.0).amax(-1)
        groups = query.shape[1] // key.shape[1]
        self._raise_bounds((longest_query * longest_key.repeat_interleave(groups, 1) * abs(call.scale)).amax(0))
        sampled = _rows_of(query, chosen.rows).float() * call.scale
        grouped = sampled.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        logits = (grouped @ key.float().transpose(-1, -2)).reshape(*sampled.shape[:-1], -1)
        self._add_rows(logits, chosen.permitted, chosen.added)

    def add_logits(self, logits: Tensor, tokens: Tensor | None) -> None:
        """Count one softmax over logits of shape (B, H, T, S); `tokens` is the mask (B, T) of its rows, or None."""
        valid = _valid_rows(logits, tokens)
        attended = (logits > _threshold(logits.dtype)) | logits.isnan()
        magnitude = torch.where(attended & valid[:, None, :, None], logits, 0.0).abs()
        self._raise_bounds(magnitude.float().amax((0, 2, 3)))
        rows, kept = _spread(valid)
        permitted = _rows_of(attended, rows) & kept[:, None, :, None]
        self._add_rows(_rows_of(logits, rows).float(), permitted, _forbidding(permitted))

    def result(self) -> Attention:
        """The statistics so far."""
        rows = int(self._rows.sum())
        means = self._entropy / self._rows
        return Attention(
            path=self._path,
            block=self._block,
            source=self._source,
            heads=len(self._bounds),
            head_dim=self._head_dim,
            bound=float(self._bounds.max()),
            bounds=tuple(self._bounds.tolist()),
            sampled_max=self._peak,
            sampled_rows=rows,
            entropy=float(self._entropy.sum()) / rows if rows else math.nan,
            entropy_min=float(means[self._rows > 0].min()) if rows else math.nan,
            uniform_entropy=self._uniform / rows if rows else math.nan,
            spreads=tuple((self._spread / self._contested).tolist()),
            saturations=tuple((self._saturated / self._contested).tolist()),
        )

    def _raise_bounds(self, bounds: Tensor) -> None:
        """Take the larger bound a head; one that is not a number bounds nothing, so it is infinite."""
        known = bounds.cpu().double().nan_to_num(nan=math.inf, posinf=math.inf)
        self._bounds = torch.maximum(self._bounds, known)

    def _add_rows(self, logits: Tensor, permitted: Tensor, added: Tensor) -> None:
        """Count sampled rows (B, H, R, S).

        Args:
            logits: q . k times the scale.
            permitted: Which of them are attended to, broadcast against them.
            added: What is added to them before the softmax: -inf where they are not, else a bias or 0.
        """
        # Multiplying is four times as fast as `where`, but 0 times NaN would let padding in.
        kept = logits * permitted
        if not bool(kept.sum().isfinite()):
            kept = torch.where(permitted, logits, 0.0)
        low, high = (float(end) for end in torch.aminmax(kept))
        self._peak = max(self._peak, math.inf if math.isnan(low) else max(-low, high))
        keys = permitted.expand(-1, -1, -1, logits.shape[-1]).sum(-1)
        spread = torch.where(permitted, kept, -math.inf).amax(-1) - kept.sum(-1) / keys
        share = kept.add_(added).softmax(-1)
        contested = (keys > 1) & spread.isfinite()
        self._contested += contested.sum((0, 2)).cpu()
        self._spread += torch.where(contested, spread, 0.0).cpu().double().sum((0, 2))
        self._saturated += ((share.amax(-1) > SATURATED) & contested).sum((0, 2)).cpu()
        # A share of 1e-30 adds nothing, whatever its logarithm; `torch.special.entr` takes four times as long.
        entropy = -(share.clamp_min(1e-30).log_() * share).sum(-1)
        # A row without a key, or with one that is not a number, has no entropy.
        counted = (keys > 0) & entropy.isfinite()
        self._entropy += torch.where(counted, entropy, 0.0).cpu().double().sum((0, 2))
        self._rows += counted.sum((0, 2)).cpu()
        self._uniform += float(torch.where(counted, keys, 1).cpu().double().log().sum())


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


def _forbidding(permitted: Tensor) -> Tensor:
    """The additive mask that hides every key that is not permitted."""
    return torch.zeros(permitted.shape, device=permitted.device).masked_fill_(~permitted, -math.inf)


def _spread(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Up to 16 row indices (B, R) spread evenly over the valid rows of (B, T), and which of them to count."""
    wanted = min(_SAMPLED_ROWS, valid.shape[1])
    count = valid.sum(-1, keepdim=True)
    steps = torch.arange(wanted, device=valid.device)
    position = (steps * (count - 1) / max(1, wanted - 1)).round().long().clamp_min(0)
    repeated = torch.diff(position, dim=-1, prepend=torch.full_like(count, -1)) == 0
    valid_first = valid.byte().argsort(dim=-1, descending=True, stable=True)
    return valid_first.gather(-1, position), ~repeated & (count > 0)


def _any(flags: Tensor, dim: int) -> Tensor:
    """`torch.any`, which takes ten times as long on a CPU as the largest of bytes."""
    return flags.view(torch.uint8).amax(dim).bool()


def _rows_of(scores: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, R) along axis 2 of (1 or B, 1 or H, 1 or T, S), one set for each batch element: (B, H, R, S)."""
    if scores.shape[2] == 1:
        return scores
    batch = torch.arange(len(rows), device=rows.device)[:, None]
    return scores.expand(len(rows), -1, -1, -1)[batch, :, rows].transpose(1, 2)
