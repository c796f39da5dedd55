"""Synthetic tasks whose least possible loss is known: copying, modular addition, a Markov chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from normkit.errors import InputError
from normkit.study.loop import Batch

_FAR = 10_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """A source of token ids, each predicted from those before it.

    Attributes:
        name: In words.
        vocabulary: Token ids.
        window: Tokens that are read; a sequence has one more, which is only predicted.
        floor: The expected `windows.next_token_loss` of the best predictor, nats a token.
        draw: Sequences (count, window + 1) of a count, from a generator.
    """

    name: str
    vocabulary: int
    window: int
    floor: float
    draw: Callable[[int, torch.Generator], Tensor]

    def batches(self, *, batch: int, seed: int) -> Iterator[Batch]:
        """Endless batches (batch, window + 1) of token ids.

        Args:
            batch: Sequences in a batch.
            seed: Of all of them.
        """
        generator = torch.Generator().manual_seed(seed)
        for _ in count():
            yield (self.draw(batch, generator),)


def copying(*, symbols: int, length: int) -> Task:
    """Random symbols, a marker, and the same symbols again.

    Of the 2 length tokens after the first, length - 1 are random and the others certain, so that the floor is
    (length - 1) log(symbols) / (2 length).

    Args:
        symbols: Each as likely as another; the marker is one more token.
        length: Symbols to copy.

    Raises:
        InputError: If symbols or length are less than 1.
    """
    _require(symbols=symbols, length=length)

    def draw(sequences: int, generator: torch.Generator) -> Tensor:
        drawn = torch.randint(symbols, (sequences, length), generator=generator)
        return torch.cat([drawn, torch.full((sequences, 1), symbols), drawn], dim=1)

    floor = (length - 1) * math.log(symbols) / (2 * length)
    return Task(name=f"copying {length} symbols", vocabulary=symbols + 1, window=2 * length, floor=floor, draw=draw)


def modular_addition(*, modulus: int, problems: int) -> Task:
    """Triples a, b, (a + b) mod p, one after the other, with a and b at random.

    Of the 3 problems - 1 tokens after the first, 2 problems - 1 are random and the sums certain, so that the floor is
    (2 problems - 1) log(p) / (3 problems - 1).

    Args:
        modulus: p.
        problems: Triples in a sequence.

    Raises:
        InputError: If modulus or problems are less than 1.
    """
    _require(modulus=modulus, problems=problems)

    def draw(sequences: int, generator: torch.Generator) -> Tensor:
        terms = torch.randint(modulus, (sequences, problems, 2), generator=generator)
        return torch.cat([terms, terms.sum(-1, keepdim=True) % modulus], dim=-1).flatten(1)

    length = 3 * problems
    floor = (2 * problems - 1) * math.log(modulus) / (length - 1)
    return Task(name=f"addition modulo {modulus}", vocabulary=modulus, window=length - 1, floor=floor, draw=draw)


def markov_chain(*, symbols: int, window: int, order: int = 1, sharpness: float = 1.5, seed: int = 0) -> Task:
    """A stationary chain in which the last `order` symbols decide how likely each next one is.

    With H_j the entropy of j symbols in a row and h the entropy rate, the floor is
    (H_order - H_1 + (window + 1 - order) h) / window: a predictor knows less than `order` symbols at first.

    Args:
        symbols: Token ids.
        window: Tokens that are read.
        order: Symbols that decide.
        sharpness: Standard deviation of the logits of `transitions`; 0 gives independent symbols.
        seed: Of the transitions.

    Raises:
        InputError: If symbols, window or order are less than 1, or the window is shorter than the order.

    Source:
        Cover & Thomas 2006, theorem 4.2.4, for the entropy rate.
    """
    _require(symbols=symbols, window=window, order=order)
    if window < order:
        raise InputError(f"window must be at least the order, {order}, got {window}; lengthen it")
    likely = transitions(symbols=symbols, order=order, sharpness=sharpness, seed=seed)
    contexts = stationary(likely)
    bounds = likely.cumsum(-1)[:, :-1].contiguous()

    def draw(sequences: int, generator: torch.Generator) -> Tensor:
        context = torch.multinomial(contexts, sequences, replacement=True, generator=generator)
        ids = [context // symbols**place % symbols for place in reversed(range(order))]
        for uniform in torch.rand(window + 1 - order, sequences, generator=generator, dtype=torch.float64):
            ids.append((bounds[context] <= uniform[:, None]).sum(-1))
            context = (context * symbols + ids[-1]) % symbols**order
        return torch.stack(ids, dim=1)

    rate = float(contexts @ _entropy(likely))
    start = float(_entropy(contexts) - _entropy(contexts.view(symbols, -1).sum(1)))
    return Task(
        name=f"a Markov chain of order {order}",
        vocabulary=symbols,
        window=window,
        floor=(start + (window + 1 - order) * rate) / window,
        draw=draw,
    )


def transitions(*, symbols: int, order: int, sharpness: float, seed: int) -> Tensor:
    """How likely each symbol is after each context, (symbols ** order, symbols), float64: softmax of normal logits.

    Args:
        symbols: Of the chain.
        order: Symbols in a context; the oldest counts symbols ** (order - 1) in the row's number.
        sharpness: Standard deviation of the logits.
        seed: Of the logits.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(symbols**order, symbols, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(-1)


def stationary(likely: Tensor) -> Tensor:
    """How likely each context is in the long run: the fixed point of one step of the chain.

    Args:
        likely: Of `transitions`.
    """
    contexts, symbols = likely.shape
    now = torch.full((contexts,), 1 / contexts, dtype=likely.dtype)
    for _ in range(_FAR):
        before, now = now, (now[:, None] * likely).view(symbols, contexts).sum(0)
        if torch.allclose(before, now, rtol=1e-14, atol=0):
            break
    return now


def _entropy(likely: Tensor) -> Tensor:
    """In nats, over the last axis."""
    terms: Tensor = torch.special.entr(likely)
    return terms.sum(-1)


def _require(**whole: int) -> None:
    for name, value in whole.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
