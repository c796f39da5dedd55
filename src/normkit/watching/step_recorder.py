"""Everything that a watch measures of one model in its steps, on the device; copied to the host to be read later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from normkit.identification.sharding import local
from normkit.measurement.hooks import Failures
from normkit.measurement.instruments import Instruments
from normkit.measurement.row_counters import GRADIENT_SUMS, Table, Tables
from normkit.measurement.structure import Structure
from normkit.reference import HALF
from normkit.watching.batch_norms import RunStatistics
from normkit.watching.inputs import INPUTS, InputRecorder
from normkit.watching.loop import LOOP, LoopRecorder
from normkit.watching.modulations import RunModulations
from normkit.watching.parameters import (
    MOVES,
    PARAMETER_SUMS,
    UpdateSampler,
    sample,
    sums_of_squares,
    watched_parameters,
)
from normkit.watching.ranks import AsyncCopy, CopyQueue, Ranks, ShardedParameters

STEP_RECORD = ("loss", "squares", "bad place", "bad parameter", "seen", *INPUTS)
"""The values sent at every step: the loss, the sum of squares of all gradients that this process holds, the first place
and the first parameter with NaN or infinity (-1: none), how many places were seen, and what the model was fed."""

_MOST_STEPS = 256


class StepRecorder:
    """The measurements of one model, given without its wrappers.

    `invariant` are the paths of the parameters whose length makes no difference, `readers` what `RunModulations` takes.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        every: int,
        scaler: Any,
        ranks: Ranks,
        invariant: frozenset[str] = frozenset(),
        readers: Mapping[str, str] | None = None,
    ) -> None:
        self.layout = structure.layout(is_pooled=True)
        self.parameters = watched_parameters(model, structure, optimizers)
        # Other parameters are wide enough, or small enough, to feel their updates.
        self._begun = {
            index: sample(each.tensor).clone()
            for index, each in enumerate(self.parameters)
            if each.site and each.tensor.dtype in HALF
        }
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._scaler, self._ranks, self.invariant = scaler, ranks, invariant
        self._window = min(every, _MOST_STEPS)
        count = len(self.parameters)
        shares = ranks.shares(count)
        by_id = {id(each.tensor): share for each, share in zip(self.parameters, shares, strict=True)}
        self._sharded = ShardedParameters(self.layout.sites, by_id)
        self.tables = Tables(
            [
                *self.layout.tables(),
                Table(name="parameters", shape=(count, len(PARAMETER_SUMS))),
                Table(name="updates", shape=(self._window, count, len(MOVES))),
                Table(name="steps", shape=(self._window, 2 + count)),
                Table(name="loop", shape=(self._window, len(LOOP))),
                Table(name="ran", shape=(self._window, len(self.layout.sentinels))),
                Table(name="bad places", shape=(self._window,), keeps_largest=True),
                self._sharded.table,
            ],
            self._device,
        )
        self.step_records = CopyQueue()
        """`STEP_RECORD` of each step."""
        self.reports = CopyQueue()
        """The packed tables of all processes for each measured step."""
        self.instruments = Instruments(model, self.layout, self.tables)
        self.batch_norms = RunStatistics(model, structure.others, self.instruments)
        self.modulations = RunModulations(model, readers or {}, self.instruments)
        tensors = [parameter.tensor for parameter in self.parameters]
        self._shares = torch.tensor(shares, dtype=self.tables["steps"].dtype, device=self._device)
        self._sampler = UpdateSampler(tensors, self._device)
        self.loop = LoopRecorder(optimizers, self.parameters, self._device, self.failures, self._sampler.stepped)
        self._inputs = InputRecorder(self._device, self.failures, self.loop.begin_backward)
        self._step = -1
        self._order = torch.tensor(self.layout.forward_order, dtype=torch.long, device=self._device)
        self._unsent: tuple[int, Tensor] | None = None
        self.unreduced: set[int] = set()
        """Places of the parameters whose gradients are partial sums, which the processes have not added yet."""

    @property
    def is_scaled(self) -> bool:
        """A scaler multiplies the loss, and skips the steps whose gradients overflow."""
        return self._scaler is not None and bool(self._scaler.is_enabled())

    @property
    def failures(self) -> Failures:
        """The measurements that failed."""
        return self.instruments.failures

    @property
    def is_alone(self) -> bool:
        """One process trains the model."""
        return self._ranks.size == 1

    def install(self, given: nn.Module) -> None:
        """Put the hooks into the model, given as the loop calls it, and into the optimizers."""
        self.instruments.install()
        self.batch_norms.install(given)
        self.modulations.install()
        self._inputs.install(given)
        self.loop.install()

    def remove(self) -> None:
        """Take the hooks out; the model is as it was."""
        self.instruments.remove()
        self.batch_norms.remove()
        self._inputs.remove()
        self.loop.remove()

    def rehearse(self, run: Callable[[], object]) -> None:
        """Measure a small forward pass and forget it: what fails in it is not tried again in the training."""
        self.failures.is_rehearsal = True
        try:
            run()
        finally:
            self.failures.is_rehearsal = False
            self.instruments.live = False
            self.tables.clear()
            self.batch_norms.begin()
            self.instruments.sentinel.zero_()

    def begin_call(self, args: Sequence[object], kwargs: Mapping[str, Any], *, is_inner: bool) -> None:
        """Tell the hooks of a call of the model (`is_inner`), or of its wrapper, that began before they were there."""
        if is_inner:
            self.instruments.begin_call(kwargs)
        for begin in (self._inputs.add, self.batch_norms.add):
            self.failures.run("the input", begin, None, args, kwargs)

    def record_step(self, step: int, loss: Tensor | float | None) -> None:
        """Measure a step whose gradients are complete and whose optimizer has not moved yet."""
        self._end_step()
        self.send()
        # The loss was multiplied by this number on the device; None without a scaler.
        kind = self.tables["steps"].dtype
        scale = self._scaler.scale(torch.ones((), device=self._device)).to(kind) if self.is_scaled else None
        unit = None
        if scale is not None:
            # The factor in each gradient is 1 where `unscale_` was called, as far as the scaler tells.
            states = getattr(self._scaler, "_per_optimizer_states", {})
            done = {key for key, state in states.items() if getattr(state.get("stage"), "name", "") == "UNSCALED"}
            # A parameter whose optimizer the scaler has not seen is treated like those it has.
            holders = [id(parameter.optimizer) for parameter in self.parameters]
            unscaled = [bool(done) and (holder in done or holder not in states) for holder in holders]
            unit = torch.where(torch.tensor(unscaled, device=self._device), 1.0, scale)
        gradients = [self._gradient(index, parameter.tensor) for index, parameter in enumerate(self.parameters)]
        of_gradients = sums_of_squares(gradients, self._device)
        if unit is not None:
            of_gradients = torch.where(of_gradients < 0, of_gradients, of_gradients / unit.square())
        known = of_gradients.clamp_min(0.0) if of_gradients.numel() else of_gradients
        if isinstance(loss, Tensor):
            loss = local(loss.detach()).to(self._device, kind).mean()
        else:
            loss = torch.tensor(math.nan if loss is None else float(loss), dtype=kind, device=self._device)
        sentinel = self.instruments.sentinel[self._order]
        numbers = (
            loss,
            known.sum(),
            _first(sentinel[:, 0].isnan()),
            _first(~known.isfinite()),
            # A place that was seen to hold NaN counts as seen.
            (sentinel[:, 1] != 0).sum(),
        )
        record = torch.cat([torch.stack([number.to(kind) for number in numbers]), self._inputs.take()])
        self.step_records.put(step, AsyncCopy(record))
        bad = record[STEP_RECORD.index("bad place")]
        place = step % self._window
        self.tables["bad places"][place] = torch.where(bad >= 0, -bad, -math.inf)
        line = self.tables["steps"][place]
        line.zero_()
        line[0], line[1] = 1.0, loss
        line[2:] = known * self._shares
        self.loop.record_step(step, unit)
        self._step = step
        moves = self.tables["updates"][place]
        moves.zero_()
        moves[:, 2:] = self._sampler.begin() * self._shares[:, None]
        # A place that holds NaN has run too.
        self.tables["ran"][place] = (self.instruments.sentinel[:, 1] != 0).to(kind)
        if self.instruments.on:
            self._measure_parameters(gradients, of_gradients, unit)
            self._sharded.write(self.tables["norm values"])
            if scale is not None:
                squares = self.tables["activation gradients"][:, GRADIENT_SUMS.index("squares")]
                squares.div_(scale.square())
            self._unsent = (step, self.tables.packed())
            kept = moves.clone()
            self.tables.clear()
            # Changes between two steps belong to the later one, which ends with the next call.
            self.tables["updates"][place] = kept
        self.instruments.sentinel.zero_()

    def _end_step(self) -> None:
        """Write what the loop did with the gradients of the last step, and how far its optimizers have moved so far."""
        if self._step >= 0:
            place = self._step % self._window
            self.tables["updates"][place, :, :2] = self._sampler.moved() * self._shares[:, None]
            self.tables["loop"][place] = self.loop.finished()

    def _gradient(self, index: int, parameter: Tensor) -> Tensor | None:
        """A parameter's gradient; None where its layout differs, as that of partial sums that an optimizer takes.

        None of a frozen one, too, which may still hold a gradient of the training before.
        """
        if not parameter.requires_grad:
            return None
        placements = getattr(parameter, "placements", None)
        if placements is None or parameter.grad is None:
            return parameter.grad
        if getattr(parameter.grad, "placements", None) == placements:
            self.unreduced.discard(index)
            return parameter.grad
        self.unreduced.add(index)
        return None

    def _measure_parameters(
        self, gradients: Sequence[Tensor | None], of_gradients: Tensor, unit: Tensor | None
    ) -> None:
        table = self.tables["parameters"]
        tensors = [parameter.tensor for parameter in self.parameters]
        columns = {name: table.new_zeros(len(tensors)) for name in PARAMETER_SUMS}
        sizes = [local(tensor).numel() for tensor in tensors]
        columns["elements"] = torch.tensor(sizes, dtype=table.dtype, device=self._device)
        columns["squares"] = sums_of_squares(tensors, self._device)
        columns["gradient squares"] = of_gradients.clamp_min(0.0)
        columns["gradients"] = (of_gradients >= 0).to(table.dtype)
        # The other columns are measured for a few parameters only, one by one.
        moments: dict[int, Tensor] = {}
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if parameter.site:
                columns["sum"][index] = local(parameter.tensor).detach().sum(dtype=table.dtype)
            if parameter.path in self.invariant and gradient is not None:
                weight, slope = local(parameter.tensor).detach(), local(gradient).detach()
                inner = (weight.to(table.dtype) * slope.to(table.dtype)).sum()
                columns["inner"][index] = inner if unit is None else inner / unit[index]
            if gradient is not None and (begun := self._begun.get(index)) is not None:
                now, slope = sample(parameter.tensor), sample(gradient)
                if now.shape == begun.shape == slope.shape:
                    columns["held"][index] = (slope != 0).sum()
                    columns["kept"][index] = ((slope != 0) & (now == begun)).sum()
            if parameter.optimizer is not None and parameter.group is not None:
                state = parameter.optimizer.state.get(parameter.tensor, {})
                squares, steps = state.get("exp_avg_sq"), state.get("step")
                is_read = squares is not None and not (isinstance(steps, Tensor) and steps.device.type != "cpu")
                if is_read and {"eps", "betas"} <= parameter.group.keys():
                    # Which of a sample of Adam's second moments have a root below ten times its eps.
                    bias = 1 - float(parameter.group["betas"][1]) ** float(steps)
                    moments[index] = sample(squares) < (10 * parameter.setting("eps")) ** 2 * bias
        if moments:
            places = torch.tensor(list(moments), device=self._device)
            sizes = [flags.numel() for flags in moments.values()]
            flags = torch.cat([flags.to(self._device) for flags in moments.values()]).to(table.dtype)
            of_each = places.repeat_interleave(torch.tensor(sizes, device=self._device), output_size=len(flags))
            columns["small"].index_add_(0, of_each, flags)
            columns["moments"][places] = torch.tensor(sizes, dtype=table.dtype, device=self._device)
        table.copy_(torch.stack([columns[name] for name in PARAMETER_SUMS], -1) * self._shares[:, None])

    def send(self) -> None:
        """Send the report of the last measured step, with how far the optimizer has moved since."""
        if self._unsent is None:
            return
        self._end_step()
        step, vector = self._unsent
        self._unsent = None
        for name in ("updates", "loop"):
            self.tables.part(vector, name)[step % self._window] = self.tables[name][step % self._window]
        self.reports.put(step, self._ranks.gather(step, vector))

    def pooled(self, step: int, vectors: Tensor) -> Mapping[str, Tensor]:
        """The tables in a report of several processes pooled, and how far the processes differ."""
        pooled = self.tables.unpacked(self._ranks.pooled(vectors, self.tables, step % self._window))
        return {**pooled, "spreads": self._ranks.spreads(vectors, self.tables)}

    def norms_at(self, tables: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """While this lasts, norms that are split over processes have the parameters of a report."""
        return self._sharded.read(tables["norm values"])

    def since_report(self) -> Mapping[str, Tensor]:
        """The tables of the steps since the last report, of one process alone; this waits for the device."""
        self._end_step()
        return {name: self.tables[name].cpu() for name in ("steps", "updates", "loop", "ran", "bad places")}

    def broken(self) -> tuple[str, ...]:
        """Parameters of this process that hold NaN or infinity; this waits for the device."""
        sums = sums_of_squares([parameter.tensor for parameter in self.parameters], self._device).tolist()
        return tuple(
            parameter.path for parameter, total in zip(self.parameters, sums, strict=True) if not math.isfinite(total)
        )


def _first(flags: Tensor) -> Tensor:
    """The first place that is set; -1 where none is."""
    if not flags.numel():
        return torch.full((), -1, device=flags.device)
    return torch.where(flags.any(), flags.int().argmax(), -1)
