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

from normkit.inspection.result import Attention

_SAMPLED_ROWS = 16
# Hand-written attention masks with -1e9, which float32 holds and no real logit reaches.
_MASKED = -1e8


@dataclass(frozen=True, eq=False, kw_only=True)
class QueriesAndKeys:
    """The arguments of one scaled_dot_product_attention call that its logits depend on.

    Attributes:
        query: Shape (B, H, T, d).
        key: Shape (B, Hk, S, d), H a multiple of Hk.
        mask: Boolean (True may attend) or additive, broadcast against (B, H, T, S); or None.
        causal: Key s may be attended from row t if s <= t.
        scale: What q . k is multiplied by.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


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
        args: Of the call.
        kwargs: Of the call.
        tokens: (B, T) of the tokens at this point of the model, where that is known.
    """
    logits: Tensor = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if logits.dim() != 4 or dim not in (-1, 3) or not logits.is_floating_point():
        return None
    if tokens is not None and (logits.shape[0], logits.shape[2]) != tokens:
        return None
    return logits.detach()


class AttentionAccumulator:
    """Adds up the calls of one attention module.

    Args:
        path: The module's path.
        block: Index of its block, or None.
        source: What is seen of a call.
        heads: Number of query heads.
    """

    def __init__(self, path: str, block: int | None, source: Literal["sdpa", "softmax"], heads: int) -> None:
        self._path, self._block, self._source = path, block, source
        self._head_dim = 0
        self._bounds = torch.zeros(heads, dtype=torch.float64)
        self._entropy = torch.zeros(heads, dtype=torch.float64)
        self._rows = torch.zeros(heads, dtype=torch.int64)
        self._uniform = 0.0
        self._peak = 0.0

    def add_call(self, call: QueriesAndKeys, tokens: Tensor | None) -> None:
        """Count one scaled_dot_product_attention call; `tokens` is the mask (B, T) of its query rows, or None."""
        query, key = call.query, call.key
        self._head_dim = query.shape[-1]
        allowed, valid, keys = _allowed(call, tokens)
        longest_query = torch.where(valid[:, None], _lengths(query), 0.0).amax(-1)
        longest_key = torch.where(keys, _lengths(key), 0.0).amax(-1)
        groups = query.shape[1] // key.shape[1]
        self._raise_bounds((longest_query * longest_key.repeat_interleave(groups, 1) * abs(call.scale)).amax(0))
        rows, kept = _spread(valid)
        sampled = _rows_of(query, rows).float() * call.scale
        grouped = sampled.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        logits = (grouped @ key.float().transpose(-1, -2)).reshape(*sampled.shape[:-1], -1)
        permitted = _rows_of(allowed, rows) & kept[:, None, :, None]
        if call.causal:
            permitted = permitted & (torch.arange(key.shape[2], device=rows.device) <= rows[:, None, :, None])
        bias = None
        if call.mask is not None and call.mask.dtype != torch.bool:
            bias = _rows_of(_four(call.mask), rows).float()
        self._add_rows(logits, permitted, bias)

    def add_logits(self, logits: Tensor, tokens: Tensor | None) -> None:
        """Count one softmax over logits of shape (B, H, T, S); `tokens` as in `add_call`."""
        valid = _valid_rows(logits, tokens)
        attended = (logits > _threshold(logits.dtype)) | logits.isnan()
        magnitude = torch.where(attended & valid[:, None, :, None], logits, 0.0).abs()
        self._raise_bounds(magnitude.float().amax((0, 2, 3)))
        rows, kept = _spread(valid)
        self._add_rows(_rows_of(logits, rows).float(), _rows_of(attended, rows) & kept[:, None, :, None], None)

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
        )

    def _raise_bounds(self, bounds: Tensor) -> None:
        """Take the larger bound a head; one that is not a number bounds nothing, so it is infinite."""
        known = bounds.cpu().double().nan_to_num(nan=math.inf, posinf=math.inf)
        self._bounds = torch.maximum(self._bounds, known)

    def _add_rows(self, logits: Tensor, permitted: Tensor, bias: Tensor | None) -> None:
        """Count sampled rows (B, H, R, S), of which what is `permitted`, broadcast against them, is attended to."""
        keys = permitted.expand(-1, -1, -1, logits.shape[-1]).sum(-1)
        # Multiplying is four times as fast as `where`, but 0 times NaN would let padding in.
        kept = logits * permitted
        if not bool(kept.sum().isfinite()):
            kept = torch.where(permitted, logits, 0.0)
        low, high = (float(end) for end in torch.aminmax(kept))
        self._peak = max(self._peak, math.inf if math.isnan(low) else max(-low, high))
        forbidden = torch.zeros(permitted.shape, device=permitted.device).masked_fill_(~permitted, -math.inf)
        attended = kept.add_(forbidden if bias is None else forbidden + bias)
        share = attended.softmax(-1)
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


def _allowed(call: QueriesAndKeys, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the mask allows, (1 or B, 1 or H, 1 or T, 1 or S); valid query rows (B, T); keys they may see (B, 1, S)."""
    valid = _valid_rows(call.query, tokens)
    length = call.key.shape[2]
    if call.mask is None:
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=valid.device)
        keys = torch.ones(len(valid), 1, length, dtype=torch.bool, device=valid.device)
    else:
        mask = _four(call.mask)
        allowed = mask if mask.dtype == torch.bool else mask > _threshold(mask.dtype)
        some_head = _any(allowed, 1)
        valid = valid & _any(some_head, -1)
        keys = _any(some_head.view(torch.uint8) * valid.view(torch.uint8)[..., None], 1)[:, None].expand(-1, -1, length)
    if call.causal:
        positions = torch.arange(valid.shape[1], device=valid.device)
        last = torch.where(valid, positions, -1).amax(-1)
        keys = keys & (torch.arange(length, device=valid.device) <= last[:, None, None])
    return allowed, valid, keys


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
