"""How well a text is predicted, in bits per byte: by its own byte frequencies, and by a model."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

from normkit.errors import InputError
from normkit.identification.state import in_mode
from normkit.study.corpus import SEPARATOR

_IGNORED = -100


def unigram_entropy(text: bytes) -> float:
    """The entropy of a text's own byte frequencies: the best that a model without context can reach.

    H = -sum(p * log2(p)) over the bytes that occur.

    Returns:
        Bits per byte.
    """
    counts = Counter(text)
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: bytes, window: int = 256, batch: int = 32) -> float:
    """Mean of -log2(probability) that a byte-level language model gives the bytes of a text.

    The text follows a separator and is cut into windows; each byte is predicted once, from the bytes
    before it in its window, so the first ones of a window are predicted from little.

    Args:
        model: Called with `input_ids`, returns `.logits`; ids are byte values.
        text: What to predict.
        window: Bytes of context at most.
        batch: Windows computed together.

    Returns:
        Bits per byte.

    Raises:
        InputError: If the text is empty.
    """
    if not text:
        raise InputError("expected a text of at least one byte, got an empty one; give a longer text")
    stream = torch.tensor(list(SEPARATOR + text))
    padding = -len(text) % window
    inputs = F.pad(stream[:-1], (0, padding)).view(-1, window)
    targets = F.pad(stream[1:], (0, padding), value=_IGNORED).view(-1, window)
    nats = 0.0
    with in_mode(model, training=False):
        for first in range(0, len(inputs), batch):
            rows = slice(first, first + batch)
            logits = model(input_ids=inputs[rows]).logits.flatten(0, 1)
            nats += F.cross_entropy(logits, targets[rows].flatten(), ignore_index=_IGNORED, reduction="sum").item()
    return nats / math.log(2) / len(text)
