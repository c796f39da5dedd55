"""`WatchCallback`: a watch over what a `transformers.Trainer` trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from transformers import TrainerCallback

from normkit.identification.tracing import members
from normkit.measurement.hooks import Failures, Hook
from normkit.watching.callback import WatchingCallback
from normkit.watching.watcher import Watch

COMPILED = (
    "the model's own call is compiled: its loss is not seen, and its gradients only after the Trainer clipped them"
)


class WatchCallback(WatchingCallback, TrainerCallback):
    """Watches the model of a `transformers.Trainer` from `on_train_begin` to `on_train_end`.

    A step is an optimizer step, with everything that is accumulated for it. Its gradients are read where its last
    backward pass ends: complete, reduced over the processes, and before the Trainer clips them, which it does before it
    calls any callback. Its loss is the sum over the micro-batches of the model's own loss times the Trainer's factor
    (1 / micro-batches, or 1 where the model has divided by all tokens of the step). A loss that the Trainer computes
    from the logits (`compute_loss_func`, label smoothing) is not seen.

    With `torch_compile=True` give `batch`; the loss is then not seen, and gradients are read after clipping. The watch
    of the newest training is kept after its end.

    The Trainer has no event for a training that raised. If the program catches the exception and goes on, use the
    callback as a context manager, which ends the watch: `with WatchCallback() as callback: ...`. Otherwise the watch
    ends, and its hooks are removed, with `close`, with the next training, or when the callback is deleted; as long as
    the callback is kept, its hooks stay.

    Args:
        every: Steps between two measurements of everything.
        batch: Keyword arguments of the model on which its norms are found; by default its first call.
        out: Folder for report.html, report.json and history.jsonl; None writes nothing.
        intent: What the norms are meant to be, or the file that says so.
        name: What to call the run in the report.
        say: Called with one line when something breaks; prints to stderr by default.

    Example:
        >>> callback = WatchCallback(every=10)
        >>> callback.inspection()
        Traceback (most recent call last):
        ...
        normkit.errors.InputError: nothing was trained yet; give the callback to a Trainer and call its train()
    """

    _begins = "train"
    _training: _Training | None = None
    _end: Callable[[], object] | None = None

    def close(self) -> None:
        """End the watch where training raised: the model is as it was, the report is written. May be called twice."""
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        """Return the callback; its watch ends with the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the watch where training raised; the exception goes on as it would."""
        if kind is not None and self._training is not None:
            self._training.close(f"the run was left by {kind.__name__}")
        self.close()

    def on_train_begin(self, *_args: Any, model: nn.Module, optimizer: Any, **_others: Any) -> None:
        """Begin a watch over the Trainer's model and optimizer."""
        self.close()
        # The wrapper by accelerate knows the scaler, and which micro-batch is the last.
        inner, scaler = getattr(optimizer, "optimizer", optimizer), getattr(optimizer, "scaler", None)
        self._run = self._watch(model, inner, scaler=scaler).start()
        self._training = _Training(self._run, model, optimizer)
        # The finalizer keeps the training, which keeps the model: neither may keep the callback.
        self._end = weakref.finalize(self, self._training.close, "the training did not come to its end")

    def on_pre_optimizer_step(self, *_args: Any, **_others: Any) -> None:
        """Take the step, if the end of its backward pass was not seen."""
        if self._training is not None:
            self._training.end_step()

    def on_train_end(self, *_args: Any, **_others: Any) -> None:
        """End the watch."""
        if self._training is not None:
            self._training.close()
        self.close()


class _Training:
    """One training: where its backward passes begin and end, and with what loss.

    The model is the Trainer's without its wrappers, the optimizer is wrapped by accelerate.
    """

    def __init__(self, run: Watch, model: nn.Module, optimizer: Any) -> None:
        self.watch, self._optimizer = run, optimizer
        self._loss: Tensor | None = None
        self._is_taken = False
        self._hook = model.register_forward_hook(Hook(Failures(), "the loss", self._after_forward))

    def close(self, reason: str = "") -> None:
        """End the watch."""
        self._hook.remove()
        self.watch.close(reason)

    def end_step(self) -> None:
        """Take the step now if it was not taken when its gradients were complete."""
        if not self._is_taken:
            self.watch.remark(COMPILED)
            self._take()
        self._is_taken, self._loss = False, None

    def _after_forward(self, module: nn.Module, _args: object, output: object) -> None:
        # The Trainer trains in training mode; the survey of the watch, and others, call the model in another mode.
        if torch.compiler.is_compiling() or not module.training:
            return
        tensors = [value for value in members(output) if isinstance(value, Tensor) and value.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, self._at_backward, mode="any")
        loss = _loss(output)
        if loss is not None and loss.requires_grad:
            # A copy: the Trainer may multiply the loss in place.
            value = loss.detach().to(torch.float32, copy=True)
            register_multi_grad_hook((loss,), partial(self._add, value), mode="any")

    def _add(self, loss: Tensor, gradient: Tensor) -> None:
        """Add a micro-batch: what is differentiated is the loss times the gradient that arrives at it."""
        share = (loss * gradient.detach()).sum()
        self._loss = share if self._loss is None else self._loss + share

    def _at_backward(self, _gradient: Tensor) -> None:
        # Queued twice: a wrapper that reduces gradients at the end of the pass may have queued that after our first.
        _queue(partial(_queue, self._after_backward))

    def _after_backward(self) -> None:
        state = getattr(self._optimizer, "gradient_state", None)
        if not self._is_taken and getattr(state, "sync_gradients", True):
            self._take()
            self._is_taken = True

    def _take(self) -> None:
        loss, scaler = self._loss, getattr(self._optimizer, "scaler", None)
        if loss is not None and scaler is not None and scaler.is_enabled():
            loss = loss / scaler.scale(torch.ones_like(loss))
        self.watch.step(loss)


def _loss(output: object) -> Tensor | None:
    """The loss where the Trainer looks for it: under its name, else the first member of the output."""
    loss = output.get("loss") if isinstance(output, Mapping) else next(iter(members(output)), None)
    return loss if isinstance(loss, Tensor) and loss.is_floating_point() and loss.dim() <= 1 else None


def _queue(run: Callable[[], None]) -> None:
    """Run something when the current backward pass has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(run)
