"""How well a text is predicted, in bits per byte: by its own byte frequencies, and by a model."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

from normkit.demo.corpus import SEPARATOR


def unigram_entropy(text: bytes) -> float:
    """The entropy of a text's own byte frequencies: what no model without context can beat.

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
    """
    was_training = model.training
    model.eval()
    stream = torch.tensor(list(SEPARATOR + text))
    whole = (len(stream) - 1) // window * window
    blocks = [
        (stream[:whole].view(-1, window), stream[1 : whole + 1].view(-1, window)),
        (stream[None, whole:-1], stream[None, whole + 1 :]),
    ]
    nats = 0.0
    for inputs, targets in blocks:
        for some_inputs, some_targets in zip(inputs.split(batch), targets.split(batch), strict=True):
            if some_targets.numel():
                logits = model(input_ids=some_inputs).logits.flatten(0, 1)
                nats += F.cross_entropy(logits, some_targets.flatten(), reduction="sum").item()
    model.train(was_training)
    return nats / math.log(2) / len(text)
