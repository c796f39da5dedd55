"""Small nets with any norm before their activations: a perceptron, a recurrent net, and a net for images.

Beside the perceptron: what one step of gradient descent changes in it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit import specs
from normkit.errors import InputError
from normkit.study.model_parts import NormLayer, initialise, norm_layer
from normkit.study.training_run import Batch, Loss

Activation = Literal["relu", "tanh", "linear"]

ACTIVATIONS: dict[Activation, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu": (F.relu, 2.0),
    "tanh": (torch.tanh, 1.0),
    "linear": (lambda x: x, 1.0),
}
"""Name -> the function, and the factor on the variance of the weights before it (ReLU halves mean squares)."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """All choices of an `MLP`.

    Raises:
        InputError: If the activation is unknown, or there is no hidden layer.
    """

    inputs: int = 64
    """Features of an input row."""
    width: int = 64
    """Features of each hidden layer."""
    layers: int = 2
    """Hidden layers; an output layer without a norm follows them."""
    outputs: int = 10
    """Features of an output row, such as classes."""
    norm: NormLayer = specs.TORCH_LAYER_NORM
    """A spec, a function width -> layer, or None."""
    activation: Activation = "relu"
    """A key of `ACTIVATIONS`."""

    def __post_init__(self) -> None:
        """Refuse a configuration that cannot be built."""
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.layers < 1:
            raise InputError(f"at least one hidden layer is needed, got {self.layers}")


class MLP(nn.Module):
    """`layers` times activation(norm(W x + b)), then W x + b.

    Matrices of fan-in i and fan-out o start from a normal distribution of variance c / (i + o), with c = 2 before tanh,
    no activation and the output, and c = 4 before ReLU; biases start at 0. With one seed, configurations of
    equal sizes start with the same values, whatever their norms.

    Source:
        Ioffe & Szegedy 2015 (arXiv:1502.03167), section 3.2, for the place of the norm; Glorot & Bengio 2010, equation
        16, and He et al. 2015 (arXiv:1502.01852), section 2.2, for the weights.

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


def step_changes(model: nn.Module, batch: Batch, loss_of: Loss, rate: float) -> dict[str, float]:
    """The changes that a step of gradient descent on a batch would make in an MLP in training mode.

    - "loss" before the step;
    - "shift": how far mean and standard deviation of the inputs of each linear layer but the first move: the root mean
      square over features, over the root mean square of the deviations; the mean over layers;
    - "gradient_change": |G' - G| / |G| of a layer's weight gradient G, where G' is the gradient after a step of only
      the layers before it; the mean over layers but the first;
    - "smoothness": the largest |g' - g| / |x' - x| over points x' = x - a g at 0.5, 1, 2 and 4 times the step.

    For the shift the noise changes, as it does from step to step; for the others it is the same before and after.

    Args:
        model: Contains an `MLP`.
        batch: On the model's device.
        loss_of: The loss.
        rate: Length of the step over that of the gradient.

    Source:
        Santurkar et al. 2018, arXiv:1805.11604: definition 2.1, there without the division, and figure 4.
    """
    loss, gradient = _gradient(model, batch, loss_of)
    twin = copy.deepcopy(model).train()
    before = _input_statistics(twin, batch)
    _descend(twin, gradient, rate)
    shifts = [
        ((mean - new_mean).square() + (deviation - new_deviation).square()).mean() / deviation.square().mean()
        for (mean, deviation), (new_mean, new_deviation) in zip(before, _input_statistics(twin, batch), strict=True)
    ]
    changes = []
    matrices = [path for path in gradient if path.endswith("weight") and "norms" not in path]
    for number, weight in enumerate(matrices):
        earlier = {path: part for path, part in gradient.items() if _number(path) < number}
        _, new = _gradient(model, batch, loss_of, earlier, rate)
        changes.append((new[weight] - gradient[weight]).norm() / gradient[weight].norm())
    length = torch.stack([part.norm() for part in gradient.values()]).norm()
    slopes = []
    for size in (0.5, 1.0, 2.0, 4.0):
        _, new = _gradient(model, batch, loss_of, gradient, size * rate)
        distance = torch.stack([(new[path] - part).norm() for path, part in gradient.items()]).norm()
        slopes.append(distance / (size * rate * length))
    return {
        "loss": loss,
        "shift": float(torch.stack(shifts[1:]).sqrt().mean()),
        "gradient_change": float(torch.stack(changes[1:]).mean()),
        "smoothness": float(torch.stack(slopes).max()),
    }


def _gradient(
    model: nn.Module, batch: Batch, loss_of: Loss, step: Mapping[str, Tensor] | None = None, rate: float = 0.0
) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients by path, of a copy in training mode after a step of some of its parameters."""
    twin = copy.deepcopy(model).train()
    _descend(twin, step or {}, rate)
    parameters = dict(twin.named_parameters())
    loss = loss_of(twin, batch)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return loss.item(), dict(zip(parameters, gradients, strict=True))


@torch.no_grad()
def _descend(model: nn.Module, gradient: Mapping[str, Tensor], rate: float) -> None:
    parameters = dict(model.named_parameters())
    for path, part in gradient.items():
        parameters[path].sub_(part, alpha=rate)


@torch.no_grad()
def _input_statistics(model: nn.Module, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Mean and standard deviation of each feature of the inputs of linear layers, in the order in which they run."""
    statistics: list[tuple[Tensor, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, inputs: statistics.append((inputs[0].mean(0), inputs[0].std(0, correction=0)))
        )
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    model(batch[0])
    for hook in hooks:
        hook.remove()
    return statistics


def _number(path: str) -> float:
    """The number of a parameter's layer in an `MLP`, from 0; infinite for the output layer."""
    place = path.split(".")[-2]
    return int(place) if place.isdigit() else math.inf


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """All choices of a `Recurrent` net."""

    inputs: int = 8
    """Features of an input at one time."""
    width: int = 64
    """Features of the state."""
    outputs: int = 10
    """Features of the output, such as classes."""
    norm: NormLayer = specs.TORCH_LAYER_NORM
    """A spec, a function width -> layer, or None."""
    norms: int = 1
    """Number of norms: each of the first times has its own gain, bias and running statistics, and the last norm serves
    all later times."""


class Recurrent(nn.Module):
    """state_t = tanh(norm(W x_t + U state_(t-1) + b)) from state_0 = 0, and a linear layer after the last.

    Matrices start with variance 2 / (inputs + outputs), biases at 0 and gains at 1. With one seed, configurations of
    equal sizes start with the same values, whatever their norms.

    Source:
        Ba et al. 2016 (arXiv:1607.06450), equation 4; a norm for each time: Cooijmans et al. 2016 (arXiv:1603.09025).

    Example:
        >>> Recurrent(RecurrentConfig(inputs=3))(torch.zeros(2, 7, 3)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: RecurrentConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.incoming = nn.Linear(config.inputs, config.width)
        self.recurrent = nn.Linear(config.width, config.width, bias=False)
        self.norms = nn.ModuleList(norm_layer(config.norm, config.width) for _ in range(config.norms))
        self.output = nn.Linear(config.width, config.outputs)
        initialise(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (batch, outputs) of sequences (batch, time, inputs)."""
        outputs: Tensor = self.output(self.states(x)[:, -1])
        return outputs

    def states(self, x: Tensor) -> Tensor:
        """The state after each input: (batch, time, width)."""
        incoming = self.incoming(x)
        state = incoming.new_zeros(len(x), self.config.width)
        states = []
        for time, arriving in enumerate(incoming.unbind(1)):
            norm = self.norms[min(time, len(self.norms) - 1)]
            state = torch.tanh(norm(arriving + self.recurrent(state)))
            states.append(state)
        return torch.stack(states, 1)


@dataclass(frozen=True, kw_only=True)
class ConvolutionalConfig:
    """All choices of a `Convolutional` net."""

    channels: int = 16
    """Channels of the first layer; each later layer has twice as many, and half the pixels per side."""
    layers: int = 3
    """Convolutions."""
    outputs: int = 10
    """Classes."""
    norm: NormLayer = specs.POOLFORMER
    """A norm of images (batch, channels, height, width): a spec with the axes of images, such as `specs.POOLFORMER` (a
    whole image) or `specs.CONVNEXT` (the channels of each position), a function channels -> layer, or None."""


class Convolutional(nn.Module):
    """`layers` times relu(norm(3 x 3 convolution)), the mean over positions, and a linear layer.

    Kernels of p places start from a normal distribution of variance 4 / (p (inputs + outputs)), twice Glorot's because
    of the ReLU. With one seed, configurations of equal sizes start with the same values, whatever their norms.

    Source:
        Ioffe & Szegedy 2015 (arXiv:1502.03167), section 3.2, for the place of the norm.

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
    """A norm of the last axis, applied to axis 1 of an image, so that each position is a row."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, images: Tensor) -> Tensor:
        """Normalise (batch, channels, height, width)."""
        normalized: Tensor = self.norm(images.movedim(1, -1))
        return normalized.movedim(-1, 1)
