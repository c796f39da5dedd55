"""A recurrent net with a norm inside its recurrence: tanh of the norm of what comes in and what was there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit import specs
from normkit.study.initialisation import initialise
from normkit.study.norms import NormLayer, norm_layer


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """All choices of a `Recurrent` net.

    Attributes:
        inputs: Features of an input at one time.
        width: Features of the state.
        outputs: Features of the output, such as classes.
        norm: A spec, a function width -> layer, or None.
        norms: Layers for the first so many times, each with gain, bias and running statistics of its own; the last
            of them serves all later times. 1 is one norm for all times.
    """

    inputs: int = 8
    width: int = 64
    outputs: int = 10
    norm: NormLayer = specs.TORCH_LAYER_NORM
    norms: int = 1


class Recurrent(nn.Module):
    """state_t = tanh(norm(W x_t + U state_(t-1) + b)) from state_0 = 0, and a linear layer after the last.

    Matrices start with variance 2 / (inputs + outputs), biases at 0 and gains at 1; one seed gives two configurations
    of equal sizes the same values, whatever their norms.

    Args:
        config: The choices.
        seed: Of the initial weights.

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
