"""The use of complete gradients by a training loop: it clips them, hands them to an optimizer, or skips the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.measurement.hooks import Failures
from normkit.measurement.row_counters import widest_dtype
from normkit.watching.parameters import WatchedParameter, sample, sums_of_squares

LOOP = ("complete", "used", "left", "along", "moved")
"""On a sample of the gradients: sums of squares when they were complete and as an optimizer got them; the inner product
of the latter with what is still there when the next backward pass begins, and with how far the optimizer moved their
parameters; the sum of squares of that."""

_PARAMETERS, _ELEMENTS = 16, 256
# Where optimizers run in the backward pass there are as many of them as parameters.
_MOST_OPTIMIZERS = 8


def learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """The rate of each group, one optimizer after the other; 0 where it has none, or one on another device."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return [
        float(rate) if rate is not None and not (isinstance(rate, Tensor) and rate.device.type != "cpu") else 0.0
        for rate in rates
    ]


def describe_optimizers(optimizers: Sequence[torch.optim.Optimizer], peaks: Sequence[float]) -> tuple[str, ...]:
    """One line for each optimizer: class, parameters, learning rate and decay of its groups.

    `peaks` are the largest `learning_rates` so far.
    """
    lines, left = [], list(peaks)
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            now, peak = group.get("lr"), left.pop(0) if left else 0.0
            settings = []
            if now is not None:
                settings.append(f"rate {float(now):.3g}" if peak <= float(now) else f"rate up to {peak:.3g}")
            if group.get("weight_decay") is not None:
                settings.append(f"decay {float(group['weight_decay']):.3g}")
            size = f"{sum(parameter.numel() for parameter in group['params']):,} parameters"
            groups.append(f"{size} with {', '.join(settings)}" if settings else size)
        lines.append(f"{type(optimizer).__name__}: {'; '.join(groups)}")
    return tuple(lines)


class LoopRecorder:
    """Hooks on the steps of optimizers; `stepped` is called after each of them."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[WatchedParameter],
        device: torch.device,
        failures: Failures,
        stepped: Callable[[], None],
    ) -> None:
        hooked = [each for each in optimizers if hasattr(each, "register_step_post_hook")]
        self._optimizers = hooked if len(hooked) <= _MOST_OPTIMIZERS else []
        self.can_tell = bool(self._optimizers)
        """Whether steps of optimizers are seen."""
        self._all, self._device, self._failures, self._stepped = tuple(optimizers), device, failures, stepped
        held = [index for index, each in enumerate(parameters) if each.optimizer is not None]
        chosen = held[:: max(1, math.ceil(len(held) / _PARAMETERS))]
        self._parameters = [parameters[index] for index in chosen]
        self._chosen = torch.tensor(chosen, dtype=torch.long, device=device)
        self._of = {
            id(optimizer): [place for place, each in enumerate(self._parameters) if each.optimizer is optimizer]
            for optimizer in self._optimizers
        }
        self._places = {key: torch.tensor(places, device=device) for key, places in self._of.items() if places}
        self._kind = widest_dtype(device)
        self._handles: list[Any] = []
        self._complete: Tensor | None = None
        self._used: dict[int, tuple[Sequence[WatchedParameter], Tensor, Tensor]] = {}
        self._left: Tensor | None = None
        self._sums: list[Tensor] = []
        self._steps_taken = 0
        self._step = -1
        self._rate = math.nan
        self._rates: dict[int, float] = {}
        self._skipped: set[int] = set()

    def install(self) -> None:
        """Put the hooks in."""

        def guarded(body: Callable[..., None]) -> Callable[..., None]:
            def hook(*args: object) -> None:
                if not torch.compiler.is_compiling():
                    self._failures.run("the loop", body, *args)

            return hook

        for each in self._optimizers:
            self._handles.append(each.register_step_pre_hook(guarded(self._compare)))
            self._handles.append(each.register_step_post_hook(guarded(self._count)))

    def remove(self) -> None:
        """Take them out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def record_step(self, step: int, unit: Tensor | None) -> None:
        """The gradients of a step are complete; `unit` is the factor of a loss scaler in each of them, or None."""
        if self._step >= 0:
            self._rates[self._step] = self._rate
            if not self._steps_taken and self._optimizers:
                self._skipped.add(self._step)
        self._sums, self._steps_taken, self._step = [], 0, step
        self._used, self._left = {}, None
        # Loops set the rate of a step before it; the rate that an optimizer had in its step replaces this one.
        self._rate = max(learning_rates(self._all), default=math.nan)
        found = sums_of_squares(_gradients(self._parameters), self._device)
        self._complete = found if unit is None else torch.where(found < 0, found, found / unit[self._chosen].square())

    def finished(self) -> Tensor:
        """`LOOP` of the current step; zeros while no optimizer was seen to use its gradients."""
        if not self._sums:
            return torch.zeros(len(LOOP), dtype=self._kind, device=self._device)
        sums = torch.stack(self._sums).sum(0)
        if self._left is not None:
            sums[LOOP.index("left")] = self._left
        return sums

    def begin_backward(self) -> None:
        """A backward pass begins: the gradients that exist now were left by the step before."""
        if self._left is not None or not self._steps_taken:
            return
        found = []
        for parameters, used, _ in self._used.values():
            now = self._joined(_gradients(parameters))
            if now.shape == used.shape:
                found.append(now @ used)
        self._left = torch.stack(found).sum() if found else torch.zeros((), dtype=self._kind, device=self._device)

    def _joined(self, samples: Sequence[Tensor | None]) -> Tensor:
        """All samples but None, copied into one vector."""
        held = [sample.to(self._device) for sample in samples if sample is not None]
        return torch.cat(held).to(self._kind) if held else torch.zeros(0, dtype=self._kind, device=self._device)

    def rate_of(self, step: int) -> float:
        """The largest learning rate that a step was taken with; NaN where that is not known."""
        return self._rate if step == self._step else self._rates.pop(step, math.nan)

    def has_stepped(self, step: int) -> bool | None:
        """Whether an optimizer took this step; None where that is not known, or not yet."""
        if not self._optimizers or step > self._step:
            return None
        if step == self._step:
            return True if self._steps_taken else None
        return step not in self._skipped

    def _compare(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        places = self._places.get(id(optimizer))
        # Where the backward pass runs within the optimizer's step, the gradients are not complete yet.
        if self._complete is None or places is None:
            return
        parameters = [self._parameters[place] for place in self._of[id(optimizer)]]
        gradients = _gradients(parameters)
        used, complete = sums_of_squares(gradients, self._device), self._complete[places]
        known = (used >= 0) & (complete >= 0)
        sums = [torch.where(known, values, 0.0).sum() for values in (complete, used)]
        self._sums.append(torch.stack([*sums, *(sums[0].new_zeros(()),) * (len(LOOP) - len(sums))]))
        parameters = [one for one, each in zip(parameters, gradients, strict=True) if each is not None]
        before = self._joined([sample(one.tensor, _ELEMENTS) for one in parameters])
        self._used[id(optimizer)] = parameters, self._joined(gradients), before

    def _count(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        rates = learning_rates((optimizer,))
        self._rate = max(rates if not self._steps_taken else (self._rate, *rates), default=math.nan)
        self._steps_taken += 1
        if (kept := self._used.get(id(optimizer))) is not None:
            parameters, used, before = kept
            after = self._joined([sample(one.tensor, _ELEMENTS) for one in parameters])
            if after.shape == before.shape == used.shape:
                moved = after - before
                self._sums[-1][LOOP.index("along") :] = torch.stack([moved @ used, moved @ moved])
        if self._steps_taken >= len(self._optimizers):
            self._complete = None
        self._stepped()


def _gradients(parameters: Sequence[WatchedParameter]) -> list[Tensor | None]:
    """A sample of each parameter's gradient; None without one, and for sparse ones."""
    gradients = [parameter.tensor.grad for parameter in parameters]
    return [None if each is None or each.layout is not torch.strided else sample(each, _ELEMENTS) for each in gradients]
