"""Text as windows of bytes, at random places for training and at fixed places for measuring."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.study import corpus
from normkit.study.loop import Batch


@cache
def text_of_the_library() -> tuple[bytes, bytes]:
    """Training and held-out text: the running Python's standard library."""
    text = corpus.read()
    return text.training, text.held_out


def windows(text: bytes, *, batch: int, window: int, seed: int) -> Iterator[Batch]:
    """Endless batches (batch, window + 1) of token ids from anywhere in a text: the last is only predicted.

    Args:
        text: Bytes.
        batch: Windows in a batch.
        window: Bytes of context.
        seed: Of the places.
    """
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(stream) - window, (batch,), generator=generator)
        yield (stream[starts[:, None] + torch.arange(window + 1)].long(),)


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy, in nats, of each token after the first under the logits of a model of token ids."""
    (ids,) = batch
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: bytes, *, window: int, count: int = 64) -> float:
    """Mean cross-entropy in evaluation mode over `count` windows spread evenly over a text, in nats a byte."""
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.linspace(0, len(stream) - window - 1, count).long()
    ids = stream[starts[:, None] + torch.arange(window + 1)].long()
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    losses = [next_token_loss(model, (part.to(device),)).item() * len(part) for part in torch.split(ids, 16)]
    model.train(was_training)
    return sum(losses) / count
