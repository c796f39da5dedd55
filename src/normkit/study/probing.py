"""What `inspect` says of a model at the end of its training: the findings of every training run."""

from __future__ import annotations

import inspect as signatures
from typing import Any

import torch
from torch import Tensor, nn

from normkit.inspection.inspecting import inspect
from normkit.inspection.running import evaluating
from normkit.study.loop import Batch, Loss

_TOKENS = 512
"""Enough for what `inspect` reads of a small model; each further one costs time."""


def findings(model: nn.Module, batch: Batch, loss_of: Loss) -> tuple[dict[str, Any], ...]:
    """Inspect a model on what the loss of a batch calls it with.

    Args:
        model: A trained one; left as it is.
        batch: Preferably not trained on.
        loss_of: The loss; its first call of the model is the one that is looked at.

    Returns:
        Of each finding, in the order of `inspect`: "rule", "severity", "title", "sites", as JSON has them.
    """
    inspection = inspect(model, _inputs(model, batch, loss_of))
    return tuple(
        {"rule": found.rule, "severity": found.severity, "title": found.title, "sites": list(found.sites)}
        for found in inspection.findings
    )


def _inputs(model: nn.Module, batch: Batch, loss_of: Loss) -> dict[str, Tensor]:
    """The arguments, by name, with which a loss calls a model on the first rows of a batch."""
    rows = max(1, _TOKENS // _tokens(batch[0]))
    calls: list[dict[str, Tensor]] = []
    signature = signatures.signature(model.forward)

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with evaluating(model), torch.no_grad():
            loss_of(model, tuple(tensor[:rows] for tensor in batch))
    finally:
        handle.remove()
    return calls[0]


def _tokens(tensor: Tensor) -> int:
    """Of one row: of ids (batch, time) or vectors (batch, time, n); one of vectors (batch, n)."""
    has_time = tensor.dim() > 2 or (tensor.dim() == 2 and not tensor.is_floating_point())
    return tensor.shape[1] if has_time else 1
