"""The batch norms of a run: what entered each in the newest measured step, against its running statistics before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.identification.sites import NormSite, OtherNorm
from normkit.measurement.batch_norms import DataStatistics, with_statistics
from normkit.measurement.hooks import Failures, Hooks


class RunStatistics(DataStatistics):
    """Counts on the device of the model; nothing reaches the host before it is asked for.

    Args:
        model: The model, without its wrappers.
        others: Its norms that no spec describes.
        listens: Whether a forward pass of training is running in a step that is measured.
        failures: What could not be measured.
    """

    def __init__(
        self, model: nn.Module, others: Sequence[OtherNorm], listens: Callable[[], bool], failures: Failures
    ) -> None:
        super().__init__(model, others)
        self._model, self._listens = model, listens
        self._running: dict[str, tuple[Tensor, Tensor]] = {}
        self._is_new: set[str] = set()
        self._hooks = Hooks(self, failures)
        self.begin_step()

    def install(self) -> None:
        """Put the hooks in."""
        self._hooks.install(self._model, self.sites, (), ())

    def remove(self) -> None:
        """Take the hooks out."""
        self._hooks.remove()

    def begin_step(self) -> None:
        """Forget the last measured step where the next one runs; its calls count together."""
        self._is_new = {site.path for site in self.sites}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Count what enters a batch norm, and keep its running statistics as they are before the first call."""
        if torch.compiler.is_compiling() or not self._listens():
            return
        if site.path in self._is_new:
            self._is_new.discard(site.path)
            holder = with_statistics(self._model.get_submodule(site.path))
            self._running[site.path] = holder.running_mean.detach().clone(), holder.running_var.detach().clone()
            self.forget(site.path)
        super().before_site(site, x)

    def of(self, path: str, mean: Tensor, variance: Tensor, eps: float, gain: Tensor | None = None) -> dict[str, Any]:
        """As for data, against the running statistics before the step."""
        if path in self._running:
            mean, variance = (part.double().cpu() for part in self._running[path])
        return super().of(path, mean, variance, eps, gain)
