"""Attention scores as products of normalized rows: how large they can get, and how sharp attention is at what scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import ShapeError
from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import length
from normkit.spec import NormSpec


def logit_bound(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """The largest size that a score of these queries and keys could have, were their directions free.

    |scale| * max_t |q_t| * max_s |k_s| >= |scale * q_t . k_s| for all t and s, by Cauchy and Schwarz, with equality
    where the longest query and the longest key are parallel. After a norm |x| is at most sqrt(n) before gain and bias,
    so the bound depends on the weights alone: |scale| * n * |W_Q| * |W_K| in 2-norms, whatever the input.

    Args:
        query: Shape (..., T, d).
        key: Shape (..., S, d).
        scale: The factor of the products; None for 1 / sqrt(d).

    Returns:
        Tensor of the broadcast leading shape (...), in the query's dtype. Without queries or keys it is 0.

    Raises:
        DtypeError: If a tensor is not of a floating dtype.
        ShapeError: If query and key have not the same d.

    Example:
        >>> from normkit.geometry import logit_bound
        >>> logit_bound(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0], [6.0, 8.0]]), scale=1.0)
        tensor(50.)

    Source:
        Cauchy-Schwarz inequality; stated here.
    """
    if require_floating(query).shape[-1] != require_floating(key).shape[-1]:
        raise ShapeError(
            f"queries and keys of one width are needed, got {query.shape[-1]} and {key.shape[-1]} features; "
            "give those of one head"
        )
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale)
    return factor * _longest(query) * _longest(key).to(query.dtype)


def attention_entropy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The entropy of the softmax of each row of logits, in nats: 0 for one key, log(S) for all S alike.

    H = -sum(p * log(p)) with p = softmax(logits) over the keys that may be seen. A logit of -inf hides its key as the
    mask does. The gradient is finite where attention is one-hot, and 0 for a hidden key.

    Args:
        logits: Shape (..., S), scaled as they enter the softmax.
        mask: Bools that broadcast to the logits, True where a key may be seen; None for all.

    Returns:
        Tensor of shape (...) in the logits' dtype; NaN where a row has no key to see.

    Raises:
        DtypeError: If logits is not of a floating dtype.

    Example:
        >>> from normkit.geometry import attention_entropy
        >>> attention_entropy(torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 500.0]]), torch.tensor([True, True, False]))
        tensor([0.6931, 0.6931])

    Source:
        Shannon entropy; stated here.
    """
    seen = require_floating(logits) != -math.inf
    seen = seen if mask is None else seen & mask
    logarithm = torch.where(seen, logits, -math.inf).log_softmax(-1)
    terms = torch.where(seen, logarithm.exp() * torch.where(seen, logarithm, 0.0), 0.0)
    return torch.where(seen.any(-1), -terms.sum(-1), math.nan)


def entropy_over_scale(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    scales: Sequence[float] | Tensor,
    spec: NormSpec | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scaled: Literal["input", "weights"] = "input",
) -> Tensor:
    """The entropy of one head's attention when its input, or its weights, are multiplied by each of some scales.

    H of softmax(Q K^T / sqrt(d)) with Q = N(c x) W_Q^T and K = N(c x) W_K^T for each scale c, where N is the norm of
    `spec` and nothing without one; with scaled="weights", Q = N(x) (c W_Q)^T and K = N(x) (c W_K)^T. A norm with
    eps = 0 makes the first the same for every c > 0. It does nothing about the second: the scores grow with c**2.

    Args:
        x: Rows of one text, shape (T, n); each attends to all.
        query_weight: W_Q, shape (d, n).
        key_weight: W_K, shape (d, n).
        scales: The numbers c.
        spec: The norm in front of both projections, or None.
        weight: Its stored gain, or None.
        bias: Its bias, or None.
        scaled: Whether c multiplies the "input" or the "weights".

    Returns:
        Tensor of shape (len(scales), T), in nats and x's dtype.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If the weights do not read rows of n features to as many features each.

    Example:
        >>> from normkit.geometry import entropy_over_scale
        >>> x, eye = torch.eye(3) + 0.5, torch.eye(3)
        >>> entropy_over_scale(x, eye, eye, [1.0, 4.0])[:, 0]
        tensor([1.0581, 0.0020])
        >>> entropy_over_scale(x, eye, eye, [1.0, 4.0], NormSpec(eps=0.0))[:, 0]
        tensor([0.4753, 0.4753])

    Source:
        Derived here.
    """
    if require_floating(x).dim() != 2 or query_weight.shape != key_weight.shape or key_weight.shape[1:] != x.shape[1:]:
        raise ShapeError(
            f"x of shape (T, n) and two weights of shape (d, n) are needed, got {tuple(x.shape)}, "
            f"{tuple(query_weight.shape)} and {tuple(key_weight.shape)}; give one text and one head"
        )
    factors = torch.as_tensor(scales, dtype=x.dtype, device=x.device)[:, None, None]
    rows = factors * x if scaled == "input" else x
    if spec is not None:
        rows = reference.forward(rows, spec, weight, bias).to(x.dtype)
    projections = (projection.to(x.dtype).T for projection in (query_weight, key_weight))
    query, key = (rows @ (factors * matrix if scaled == "weights" else matrix) for matrix in projections)
    return attention_entropy(query @ key.mT / math.sqrt(query_weight.shape[0]))


def _longest(rows: Tensor) -> Tensor:
    """The largest length of a row, with the gradient 0 at a row of zeros."""
    if not rows.shape[-2]:
        return rows.new_zeros(rows.shape[:-2])
    return length(rows).amax(-1)
