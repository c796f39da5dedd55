"""A small convolutional net with any norm before its activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit import specs
from normkit.study.initialisation import initialise
from normkit.study.norms import NormLayer, norm_layer


@dataclass(frozen=True, kw_only=True)
class ConvolutionalConfig:
    """All choices of a `Convolutional` net.

    Attributes:
        channels: Of the first layer; each later layer has twice as many and half the pixels a side.
        layers: Convolutions.
        outputs: Classes.
        norm: Of images (batch, channels, height, width): a spec with the axes of images, as `specs.POOLFORMER` (all
            of an image) or `specs.CONVNEXT` (the channels of each position), a function channels -> layer, or None.
    """

    channels: int = 16
    layers: int = 3
    outputs: int = 10
    norm: NormLayer = specs.POOLFORMER


class Convolutional(nn.Module):
    """`layers` times relu(norm(3 x 3 convolution)), the mean over positions, and a linear layer.

    Kernels of p places start from a normal distribution of variance 4 / (p (inputs + outputs)), twice Glorot's for the
    ReLU; one seed gives two configurations of equal sizes the same values, whatever their norms.

    Args:
        config: The choices.
        seed: Of the initial weights.

    Source:
        Ioffe & Szegedy 2015 (arXiv:1502.03167), section 3.2, for the norm's place.

    Example:
        >>> Convolutional(ConvolutionalConfig())(torch.zeros(2, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ConvolutionalConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        channels = [1, *(config.channels * 2**layer for layer in range(config.layers))]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels[layer], channels[layer + 1], 3, stride=1 if layer == 0 else 2, padding=1)
            for layer in range(config.layers)
        )
        self.norms = nn.ModuleList(norm_layer(config.norm, after) for after in channels[1:])
        self.output = nn.Linear(channels[-1], config.outputs)
        initialise(self, seed)
        with torch.no_grad():
            for path, weight in self.convolutions.named_parameters():
                if path.endswith("weight"):
                    weight.mul_(2**0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Outputs (batch, outputs) of grey images (batch, height, width)."""
        x = images.unsqueeze(1)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        outputs: Tensor = self.output(x.mean((-2, -1)))
        return outputs


class OverChannels(nn.Module):
    """A norm of the last axis, applied to axis 1 of an image: each position is a row.

    Args:
        norm: Maps (..., channels) to the same.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, images: Tensor) -> Tensor:
        """Normalise (batch, channels, height, width)."""
        normalized: Tensor = self.norm(images.movedim(1, -1))
        return normalized.movedim(-1, 1)
