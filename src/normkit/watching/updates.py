"""How far each parameter moves in an optimizer step, on a fixed sample of its elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.identification.sharding import local
from normkit.watching.gradients import squares

_ELEMENTS = 1024


class UpdateSampler:
    """Takes up to 1024 elements of each parameter, spread evenly, before a step and after it.

    Args:
        parameters: They may be replaced in place; where one's storage is another after the step, the new one is read.
        device: Where the result is.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._parameters, self._device = tuple(parameters), device
        self._before: list[Tensor] = []

    @property
    def is_waiting(self) -> bool:
        """A sample was taken and not yet compared."""
        return bool(self._before)

    def before(self) -> None:
        """Keep the sample as it is before the optimizer's step."""
        self._before = [sample.clone() for sample in self._samples()]

    def after(self) -> Tensor:
        """Sums of squares of what changed and of what was there before, (parameters, 2); the sample is forgotten."""
        before = [_wide(sample) for sample in self._before]
        moved = torch._foreach_sub([_wide(sample) for sample in self._samples()], before) if before else ()
        result = torch.stack([squares(moved, self._device), squares(before, self._device)], -1)
        self._before = []
        return result

    def _samples(self) -> list[Tensor]:
        samples = []
        for parameter in self._parameters:
            flat = local(parameter).detach().flatten()
            samples.append(flat[:: max(1, math.ceil(flat.numel() / _ELEMENTS))])
        return samples


def _wide(sample: Tensor) -> Tensor:
    return sample if sample.dtype == torch.float64 else sample.float()
