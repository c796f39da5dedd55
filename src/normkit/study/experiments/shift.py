"""Internal covariate shift: noise after a BatchNorm that makes it, and measures of what one step changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normkit.study.model_parts import BatchNorm
from normkit.study.training_run import Batch, Loss, Observe

_STEP_SIZES = (0.5, 1.0, 2.0, 4.0)


class NoisyBatchNorm(BatchNorm):
    """BatchNorm whose output is scaled and shifted in training by random numbers, new for each step and feature.

        y = s_t BatchNorm(x) + m_t,  m_t uniform in (-noise, noise),  s_t uniform in (1, 1 + noise)

    Step t is the number of batches that the norm has seen, a buffer; each step has a generator of its own, so that a
    continued run draws the same numbers. In evaluation mode there is no noise.

    Args:
        width: Features.
        noise: Its size, in units of the deviation of the output.
        seed: The seed of the run and the number of the layer.

    Source:
        After Santurkar et al. 2018, arXiv:1805.11604, section 2.1; their noise also has a part for each sample, which
        is left out here.
    """

    def __init__(self, width: int, *, noise: float, seed: tuple[int, int]) -> None:
        super().__init__(width)
        self.noise, self.seed = noise, seed

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., n), then disturb it."""
        normalized = super().forward(x)
        if not self.training or self.num_batches_tracked is None:
            return normalized
        run, layer = self.seed
        generator = torch.Generator().manual_seed((run * 1000 + layer) * 1_000_003 + int(self.num_batches_tracked))
        first, second = torch.rand(2, self.num_features, generator=generator, dtype=torch.float64).to(x.device, x.dtype)
        disturbed: Tensor = normalized * (1 + self.noise * first) + self.noise * (2 * second - 1)
        return disturbed


def observer(batch: Batch, loss_of: Loss, *, rate: float, every: int) -> Observe:
    """The result of `measure`, at step 1 and after every `every` steps.

    Args:
        batch: Always the same.
        loss_of: The loss.
        rate: Length of the step over that of the gradient.
        every: Steps between measurements.
    """

    def observe(model: nn.Module, step: int) -> Mapping[str, float]:
        if (step - 1) % every:
            return {}
        weight = next(model.parameters())
        moved = tuple(part.to(weight.device, weight.dtype if part.is_floating_point() else None) for part in batch)
        return {"at": step, **measure(model, moved, loss_of, rate)}

    return observe


def measure(model: nn.Module, batch: Batch, loss_of: Loss, rate: float) -> dict[str, float]:
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
    for size in _STEP_SIZES:
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
