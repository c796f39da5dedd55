"""A multilayer perceptron with any norm before its activations: linear, norm, activation, and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit import specs
from normkit.errors import InputError
from normkit.study.initialisation import initialise
from normkit.study.norms import NormLayer, norm_layer

Activation = Literal["relu", "tanh", "linear"]

ACTIVATIONS: dict[Activation, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu": (F.relu, 2.0),
    "tanh": (torch.tanh, 1.0),
    "linear": (lambda x: x, 1.0),
}
"""Name -> the function and the factor on the variance of the weights before it (ReLU halves mean squares)."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """All choices of an `MLP`.

    Attributes:
        inputs: Features of an input row.
        width: Features of each hidden layer.
        layers: Hidden layers; an output layer without norm follows them.
        outputs: Features of an output row, such as classes.
        norm: A spec, a function width -> layer, or None.
        activation: A key of `ACTIVATIONS`.

    Raises:
        InputError: If the activation is unknown, or there is no hidden layer.
    """

    inputs: int = 64
    width: int = 64
    layers: int = 2
    outputs: int = 10
    norm: NormLayer = specs.TORCH_LAYER_NORM
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.layers < 1:
            raise InputError(f"at least one hidden layer is needed, got {self.layers}")


class MLP(nn.Module):
    """`layers` times activation(norm(W x + b)), then W x + b.

    Matrices of fan-in i and fan-out o start from a normal distribution of variance c / (i + o), with c = 2 before tanh,
    no activation and the output, and c = 4 before ReLU; biases start at 0. One seed gives two configurations
    of equal sizes the same values, whatever their norms.

    Args:
        config: The choices.
        seed: Of the initial weights.

    Source:
        Ioffe & Szegedy 2015 (arXiv:1502.03167), section 3.2, for the norm's place; Glorot & Bengio 2010, equation 16,
        and He et al. 2015 (arXiv:1502.01852), section 2.2, for the weights.

    Example:
        >>> MLP(MLPConfig(inputs=4, width=8, outputs=3))(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(self, config: MLPConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        widths = [config.inputs, *[config.width] * config.layers]
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.norms = nn.ModuleList(norm_layer(config.norm, config.width) for _ in self.hidden)
        self.output = nn.Linear(config.width, config.outputs)
        initialise(self, seed)
        self._activation, variance = ACTIVATIONS[config.activation]
        with torch.no_grad():
            for path, weight in self.hidden.named_parameters():
                if path.endswith("weight"):
                    weight.mul_(variance**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (..., outputs) of rows (..., inputs)."""
        for linear, norm in zip(self.hidden, self.norms, strict=True):
            x = self._activation(norm(linear(x)))
        outputs: Tensor = self.output(x)
        return outputs
