"""How far each parameter moves, in an optimizer step and between two, on a fixed sample of its elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.identification.sharding import local

MOVES = ("moved", "before", "outside", "left")
"""Sums of squares of a parameter's sample: of what a step changed and of what was there before that step; of what
changed between the optimizer's last step and this one and of what the optimizer had left."""

_ELEMENTS = 1024


class UpdateSampler:
    """Takes up to 1024 elements of each parameter, spread evenly, before a step, after it, and before the next.

    Args:
        parameters: They may be replaced in place; where one's storage is another after the step, the new one is read.
        device: Where the results are.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._parameters, self._device = tuple(parameters), device
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self._places: list[Tensor] = []
        self._sizes: list[int] = []

    def stepped(self) -> None:
        """An optimizer has moved the parameters: what changes from here on is not its doing."""
        self._after = self._samples() if self._before else []

    def moved(self) -> Tensor:
        """Sums of squares of what the step under way has changed so far, and of what was there before: (parameters, 2).

        Zeros where no step is under way.
        """
        after = self._after or self._samples() if self._before else []
        if not self._before:
            return torch.zeros(len(self._parameters), 2, dtype=_widest(self._device), device=self._device)
        changes = [new - old for new, old in zip(after, self._before, strict=True)]
        return torch.stack([self._squares(changes), self._squares(self._before)], -1)

    def begin(self) -> Tensor:
        """Keep the sample as it is before an optimizer's step.

        Returns:
            Sums of squares of what has changed since `stepped` and of what that step had left: (parameters, 2). Zeros
            where `stepped` was not called since the last step began.
        """
        now = self._samples()
        left = self._after
        self._before, self._after = now, []
        if not left:
            return torch.zeros(len(self._parameters), 2, dtype=_widest(self._device), device=self._device)
        changes = [new - old for new, old in zip(now, left, strict=True)]
        return torch.stack([self._squares(changes), self._squares(left)], -1)

    def _samples(self) -> list[Tensor]:
        """One vector per device and kind of number."""
        parts: dict[tuple[torch.device, bool], list[tuple[int, Tensor]]] = {}
        for index, parameter in enumerate(self._parameters):
            held = local(parameter).detach()
            flat = (torch.view_as_real(held) if held.is_complex() else held).flatten()
            sample = flat[:: max(1, math.ceil(flat.numel() / _ELEMENTS))]
            parts.setdefault((sample.device, sample.dtype == torch.float64), []).append((index, sample))
        sizes = [len(sample) for found in parts.values() for _, sample in found]
        if sizes != self._sizes:
            # What is given another size in the run has nothing to be compared with.
            self._sizes, self._places, self._before, self._after = sizes, [], [], []
            for (device, _), found in parts.items():
                counts = torch.tensor([len(sample) for _, sample in found])
                self._places.append(torch.tensor([index for index, _ in found]).repeat_interleave(counts).to(device))
        vectors = [torch.cat([sample for _, sample in found]) for found in parts.values()]
        return [vector if vector.dtype == torch.float64 else vector.float() for vector in vectors]

    def _squares(self, vectors: Sequence[Tensor]) -> Tensor:
        """Sum of squares of each parameter's part."""
        kind, total = _widest(self._device), None
        for vector, places in zip(vectors, self._places, strict=True):
            sums = torch.zeros(len(self._parameters), dtype=kind, device=vector.device)
            sums = sums.index_add_(0, places, vector.to(kind).square()).to(self._device)
            total = sums if total is None else total + sums
        return torch.zeros(len(self._parameters), dtype=kind, device=self._device) if total is None else total


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
