"""A synthetic task whose least possible loss is known: the next symbol of a stationary Markov chain."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normkit.errors import InputError
from normkit.study.training_run import Batch


class MarkovChain:
    """A chain in which each symbol decides how likely the next one is, over sequences of token ids.

    The start is drawn from the stationary distribution, so the expected `next_token_loss` of the best predictor is the
    entropy rate of the chain, in nats per token: `floor`.

    Args:
        symbols: Token ids.
        window: Tokens that are read; a sequence has one more, which is only predicted.
        sharpness: Standard deviation of the logits of `transitions`; 0 gives independent symbols.

    Raises:
        InputError: If symbols or window are less than 1.

    Source:
        Cover & Thomas 2006, theorem 4.2.4, for the entropy rate.
    """

    def __init__(self, symbols: int = 32, *, window: int, sharpness: float = 2.0) -> None:
        for name, value in (("symbols", symbols), ("window", window)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        self.symbols, self.window = symbols, window
        likely = transitions(symbols, sharpness)
        self._start = stationary(likely)
        self._bounds = likely.cumsum(-1)[:, :-1].contiguous()
        self.floor = float(self._start @ torch.special.entr(likely).sum(-1))

    def batches(self, *, batch: int, seed: int) -> Iterator[Batch]:
        """Endless batches (batch, window + 1) of token ids."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            ids = [torch.multinomial(self._start, batch, replacement=True, generator=generator)]
            for uniform in torch.rand(self.window, batch, generator=generator, dtype=torch.float64):
                ids.append((self._bounds[ids[-1]] <= uniform[:, None]).sum(-1))
            yield (torch.stack(ids, dim=1),)


def transitions(symbols: int, sharpness: float) -> Tensor:
    """The probability of each symbol after each symbol, (symbols, symbols), float64: softmax of normal logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(symbols, symbols, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(-1)


def stationary(likely: Tensor) -> Tensor:
    """The long-run probability of each symbol, (symbols,), under transition probabilities (symbols, symbols)."""
    now = torch.full((len(likely),), 1 / len(likely), dtype=likely.dtype)
    for _ in range(10_000):
        before, now = now, (now[:, None] * likely).sum(0)
        if torch.allclose(before, now, rtol=1e-14, atol=0):
            break
    return now
