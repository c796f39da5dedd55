"""The starts that the study `initialisation` compares."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from normkit.study.transformer import Transformer, TransformerConfig

VOCABULARY = 32

SHALLOW = (
    "gain 1, bias 0",
    "gain 0.1",
    "gain 0.5",
    "gain 2",
    "random bias",
    "outputs at 0",
    "outputs over sqrt(2L)",
)
"""Starts of a Pre-LN model, the usual one first."""

DEEP = ("post", "alpha alone", "beta alone", "DeepNorm")
"""Starts of a deep Post-LN model."""


def configuration(name: str, layers: int, **choices: Any) -> TransformerConfig:
    """What the model of an arm is built from; DeepNorm has alpha = (2 L)^(1/4) and beta = (8 L)^(-1/4).

    Args:
        name: Of `SHALLOW` or `DEEP`.
        layers: L.
        choices: Further fields.
    """
    return TransformerConfig(
        vocabulary=VOCABULARY,
        layers=layers,
        placement="post" if name in DEEP else "pre",
        residual_scale=(2 * layers) ** 0.25 if name in ("alpha alone", "DeepNorm") else 1.0,
        branch_gain=(8 * layers) ** -0.25 if name in ("beta alone", "DeepNorm") else 1.0,
        **choices,
    )


@torch.no_grad()
def begin(model: Transformer, name: str, seed: int) -> None:
    """Change the start of a model as an arm says, in place: gains and biases of all norms, or outputs of all branches.

    Args:
        model: As built from `configuration`.
        name: Of the arm.
        seed: Of random biases, normal with a standard deviation of 1.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = {"outputs at 0": 0.0, "outputs over sqrt(2L)": 1 / math.sqrt(2 * len(model.blocks))}.get(name)
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            if name.startswith("gain "):
                module.weight.fill_(float(name.removeprefix("gain ").partition(",")[0]))
            elif name == "random bias":
                module.bias.copy_(torch.randn(module.bias.shape, generator=generator))
        elif scale is not None and isinstance(module, nn.Linear) and path.endswith((".out", ".down")):
            module.weight.mul_(scale)
