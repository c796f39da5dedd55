"""The loss of a causal language model on the text that it is inspected on."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.measurement.running import Batch, name_of_ids, runner, token_ids, token_mask, vocabulary

# Logits that are made float32 at a time: 64 MB.
_MOST_LOGITS = 2**24
# Machine epsilons of the largest logit: unchanged logits differ if a kernel groups its rows by their content.
_STILL = 4


class NextTokenLoss:
    """Adds up the cross-entropy of each next token, for a model whose logits do not depend on later tokens.

    Causality is tried on a few tokens, not read off the name of the class: a masked language model or an encoder
    has no such loss.

    Args:
        model: The model, in evaluation mode.
        few: A few tokens.
        output: What the model returned for them.
    """

    def __init__(self, model: nn.Module, few: Batch, output: object) -> None:
        self._size, self._sum, self._count = vocabulary(model) or 0, 0.0, 0
        self._is_causal = self._size > 0 and self._depends_on_past_only(model, few, output)

    def add(self, batch: Batch, output: object) -> None:
        """Add a batch and the model's output for it; padding does not count."""
        ids, logits = token_ids(batch), self._logits(batch, output)
        if not self._is_causal or ids is None or logits is None:
            return
        mask = token_mask(batch)
        counts = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        kept = (counts[:, 1:] & counts[:, :-1]).to(logits.device)
        targets = ids[:, 1:].to(logits.device)
        many = max(1, _MOST_LOGITS // logits.shape[-1])
        for row, column in product(range(len(ids)), range(0, targets.shape[1], many)):
            part = slice(column, column + many)
            losses = F.cross_entropy(logits[row, :-1][part].float(), targets[row, part], reduction="none")
            losses = losses[kept[row, part]]
            self._sum, self._count = self._sum + float(losses.double().sum()), self._count + len(losses)

    @property
    def value(self) -> float:
        """Mean over tokens in nats; NaN if the model has no such loss."""
        return self._sum / self._count if self._count else math.nan

    def _depends_on_past_only(self, model: nn.Module, few: Batch, output: object) -> bool:
        """The logits of the first half of the tokens stay the same if the other half changes."""
        name = name_of_ids(few)
        if name is None or (ids := few[name]).shape[1] < 2:
            return False
        half = ids.shape[1] // 2
        changed = torch.cat([ids[:, :half], (ids[:, half:] + 1) % self._size], dim=1)
        try:
            after = self._logits(few, runner(model, {**few, name: changed})())
        # Any third-party forward runs here, on fewer tokens than it may take.
        except Exception:
            return False
        before = self._logits(few, output)
        if before is None or after is None:
            return False
        moved = (after - before)[:, :half].abs().max()
        return bool(moved <= _STILL * torch.finfo(before.dtype).eps * before.abs().max())

    def _logits(self, batch: Batch, output: object) -> Tensor | None:
        """The logits, of shape (B, T, V) with V the size of the vocabulary; None if the output has none."""
        output = getattr(output, "logits", output)
        logits, ids = output[0] if isinstance(output, tuple) and output else output, token_ids(batch)
        if not isinstance(logits, Tensor) or ids is None or logits.dim() != 3:
            return None
        fits = logits.shape[:2] == ids.shape and logits.shape[2] == self._size and logits.is_floating_point()
        return logits if fits else None
