"""The batch norms of a run: what entered each in the newest measured step, against its running statistics before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.identification.sites import NormSite, OtherNorm
from normkit.measurement.batch_norms import Channels, DataStatistics, with_statistics
from normkit.measurement.hooks import Hook, Hooks
from normkit.measurement.instruments import Instruments


class RunStatistics(DataStatistics):
    """Counts on the device of the model; nothing reaches the host before it is asked for.

    Args:
        model: The model, without its wrappers.
        others: Its norms that no spec describes.
        instruments: Tell which steps are measured, and whether a forward pass of training is running.
    """

    def __init__(self, model: nn.Module, others: Sequence[OtherNorm], instruments: Instruments) -> None:
        super().__init__(model, others)
        self._model, self._instruments = model, instruments
        self._running: dict[str, tuple[Tensor, Tensor]] = {}
        # By path, what entered in the first measured step, and the running statistics before it.
        self._first: dict[str, tuple[Channels, tuple[Tensor, Tensor]]] = {}
        self._is_new: set[str] = set()
        self._hooks = Hooks(self, instruments.failures)
        self.begin()

    def install(self, given: nn.Module) -> None:
        """Put the hooks into the model, given as the loop calls it."""
        self._hooks.install(self._model, self.sites, (), ())
        if self.sites:
            hook = Hook(self._instruments.failures, "the samples", self.add)
            self._hooks.handles.append(given.register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks out."""
        self._hooks.remove()

    def begin(self) -> None:
        """Forget what was counted: the first step follows."""
        self._first.clear()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last measured step where the next one runs; its calls count together."""
        self._is_new = {site.path for site in self.sites}
        self._has_begun = False

    def add(self, _module: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Look at the samples of one call of training in a measured step."""
        if torch.compiler.is_compiling() or not (self._instruments.on and torch.is_grad_enabled()):
            return
        if not self._has_begun:
            self.given, self.repeated, self._has_begun = 0, 0, True
        self.batch({**dict(enumerate(args)), **kwargs})

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Count what enters a batch norm, and keep its running statistics as they are before the first call."""
        if torch.compiler.is_compiling() or not self._instruments.listens():
            return
        if site.path in self._is_new:
            self._is_new.discard(site.path)
            holder = with_statistics(self._model.get_submodule(site.path))
            self._running[site.path] = holder.running_mean.detach().clone(), holder.running_var.detach().clone()
            self.forget(site.path)
            self._first.setdefault(site.path, (self._counted[site.path], self._running[site.path]))
        super().before_site(site, x)

    def of(self, path: str, mean: Tensor, variance: Tensor, eps: float, gain: Tensor | None = None) -> dict[str, Any]:
        """As for data, against the running statistics before the step."""
        if path not in self._running:
            return super().of(path, mean, variance, eps, gain)
        counted, first = self._first[path]
        mean, variance, *then = (part.double().cpu() for part in (*self._running[path], *first))
        found = super().of(path, mean, variance, eps, gain)
        if found:
            found["first_change"] = float(counted.change((then[0], then[1]), eps, 0 in self._shared[path]).median())
        return found
