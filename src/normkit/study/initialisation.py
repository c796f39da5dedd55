"""Initial weights that arms share: each parameter is drawn for its name and a seed, whatever else the model has."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

_EMBEDDING_DEVIATION = 0.5


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Draw the weights of linear, convolutional and embedding layers anew, in place.

    A matrix of fan-in i and fan-out o gets variance 2 / (i + o), an embedding 1 / 4, a bias 0. The generator of a
    parameter is seeded by its path and `seed`, so that two models share what has the same path and shape. Norms are
    left at gain 1 and bias 0.

    Args:
        model: Whose weights to draw.
        seed: Of all of them.

    Source:
        Glorot & Bengio 2010, equation 16.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d):
            continue
        weight = module.weight
        if isinstance(module, nn.Embedding):
            deviation = _EMBEDDING_DEVIATION
        else:
            places = weight[0, 0].numel()
            deviation = math.sqrt(2 / (places * (weight.shape[0] + weight.shape[1])))
        weight.copy_(deviation * torch.randn(weight.shape, generator=_generator(path, seed), dtype=torch.float64))
        bias = None if isinstance(module, nn.Embedding) else module.bias
        if bias is not None:
            nn.init.zeros_(bias)


def _generator(path: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{path}:{seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
