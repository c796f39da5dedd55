"""`LightningWatch`: a watch over what a Lightning `Trainer` trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.measurement.baseline import Baseline
from normkit.watching.callback import WatchingCallback

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import Callback
except ImportError:
    raise InputError(
        'LightningWatch needs Lightning, which is not installed: pip install "normkit[lightning]"'
    ) from None


class LightningWatch(WatchingCallback, Callback):
    """Watches the network of a LightningModule from `on_fit_start` to `on_train_end` or `on_exception`.

    The watched module must be called as a module in `training_step`, which Lightning does not do with the
    LightningModule itself: by default it is the only submodule that has parameters, or, if there are several, the
    LightningModule, whose `training_step` must then call `self(...)`.

    A step is an optimizer step, as in `trainer.global_step`. Its gradients are those at `on_before_optimizer_step`:
    accumulated, unscaled, before Lightning clips; in manual optimization as the loop made them, with those of other
    optimizers in their current state. Its loss is the sum of what was differentiated since the last step, so with
    accumulation the mean over the micro-batches.

    Args:
        every: Steps between two measurements of everything; with several optimizers, rounded up to a number that has
            no divisor in common with theirs, so that all of them are measured in turn.
        module: Path of the submodule to watch.
        batch: Arguments of the watched module, on which its norms are found; by default its first call. Needed where
            it is compiled.
        out: Folder for report.html, report.json and history.jsonl; None writes nothing.
        intent: What the norms are meant to be, or the file that says so.
        name: What to call the run in the report.
        say: Called with one line when something breaks; prints to stderr by default.

    Example:
        >>> callback = LightningWatch(every=10)
        >>> callback.inspection()
        Traceback (most recent call last):
        ...
        normkit.errors.InputError: nothing was trained yet; give the callback to a Trainer and call its fit()
    """

    _begins = "fit"

    def __init__(
        self,
        *,
        every: int = 25,
        module: str = "",
        batch: Any = None,
        out: str | Path | None = None,
        intent: Baseline | str | Path | None = None,
        name: str = "",
        say: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(every=every, batch=batch, out=out, intent=intent, name=name, say=say)
        self._every, self._module = every, module
        self._loss: Tensor | None = None

    def close(self, reason: str = "") -> None:
        """End the watch; the model is as it was. Lightning's events do this. May be called twice.

        `reason` says why the run ended, if not as it should.
        """
        if self._run is not None:
            self._run.close(reason)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a watch over the network and all optimizers.

        Raises:
            InputError: If it cannot be known which module to watch.
        """
        self.close("another training began")
        every, optimizers = self._every, tuple(trainer.optimizers)
        while isinstance(every, int) and math.gcd(every, len(optimizers)) > 1 and len(optimizers) > 1:
            every += 1
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        network = _network(pl_module, self._module, is_wrapped=trainer.strategy.model is not pl_module)
        self._loss = None
        self._run = self._watch(network, optimizers, every=every, scaler=scaler).start()

    def on_before_backward(self, trainer: Any, _module: Any, loss: Tensor) -> None:
        """Add what is about to be differentiated to the loss of the step."""
        # A copy, as the loop may change the loss in place.
        share = loss.detach().to(torch.float32, copy=True)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            share = share / scaler.scale(torch.ones_like(share))
        self._loss = share if self._loss is None else self._loss + share

    def on_before_optimizer_step(self, *_args: Any) -> None:
        """Take a step."""
        if self._run is not None:
            self._run.step(self._loss)
        self._loss = None

    def on_train_end(self, *_args: Any) -> None:
        """End the watch."""
        self.close()

    def on_exception(self, _trainer: Any, _module: Any, exception: BaseException) -> None:
        """End the watch of a training that raised, or was interrupted."""
        self.close(f"the run was left by {type(exception).__name__}")


def _network(model: nn.Module, path: str, *, is_wrapped: bool) -> nn.Module:
    """The module to watch.

    Where it `is_wrapped`, the strategy calls it with the arguments of `training_step`.
    """
    inner = {name: child for name, child in model.named_children() if next(child.parameters(), None) is not None}
    if path:
        try:
            return model.get_submodule(path)
        except AttributeError:
            known = _named(inner)
            raise InputError(f"module= must be a path in the LightningModule, such as {known}; got {path!r}") from None
    if len(inner) == 1:
        return next(iter(inner.values()))
    if type(model).forward is LightningModule.forward or is_wrapped:
        why = "is wrapped by the strategy" if is_wrapped else "has no forward"
        raise InputError(f"the LightningModule {why}: name the submodule to watch with module=, one of {_named(inner)}")
    return model


def _named(modules: dict[str, nn.Module]) -> str:
    return ", ".join(map(repr, modules)) or "none (it has no submodule with parameters)"
