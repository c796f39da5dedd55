"""`watch`: a model and its optimizers in a training loop; findings while it runs, an answer when it breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.errors import InputError
from normkit.inspection.result import Inspection, infer
from normkit.measurement.baseline import Baseline, declared, write
from normkit.measurement.hooks import Failures, Hook
from normkit.measurement.row_counters import TableReader
from normkit.measurement.running import Batch, arguments
from normkit.rules.finding import Finding
from normkit.rules.parameters import FIRST_STEPS, NO_GRADIENTS
from normkit.watching.loop import describe_optimizers, learning_rates
from normkit.watching.ranks import Ranks
from normkit.watching.rendezvous import is_distributed_run
from normkit.watching.reporting import Messages, ReportFiles, inspection_of_run
from normkit.watching.startup import WatchedModel, start_up, unwrapped
from normkit.watching.step_recorder import STEP_RECORD, StepRecorder
from normkit.watching.time_series import RunHistory

LATE = (
    "a compiler had traced the model before the watch put its hooks in; begin the watch first, and give it batch= "
    "where model.compile() was called or another object than the compiled one"
)
_watched: WeakSet[nn.Module] = WeakSet()

_PATIENCE = 5.0
"""Seconds to wait for pending numbers at the end, or when asked: another process may never send its part."""

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def watch(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    every: int = 25,
    batch: Any = None,
    out: str | Path | None = None,
    scaler: Any = None,
    intent: Baseline | str | Path | None = None,
    name: str = "",
    say: Callable[[str], None] | None = None,
) -> Watch:
    """Watch a model while it trains: where its norms, gradients and updates go, and why a run breaks.

    All norms, blocks and attentions are measured at the first step and every `every` steps; loss, gradient norms and
    the first place with NaN at every step. Nothing of an activation's size is kept, and no step waits for a device. The
    model, its gradients and the random numbers are what they would be without the watch.

    Args:
        model: The model as the loop calls it, compiled, in a data-parallel wrapper or sharded.
        optimizer: One or several; without one, updates are not judged.
        every: Steps between two measurements of everything.
        batch: Arguments of the model, a mapping or a tuple, on which its norms are found when the watch begins;
            by default they are found at its first call. Needed where `model.compile()` was called.
        out: Folder for report.html and report.json, written when something breaks and at the end, and history.jsonl,
            one line per report; None writes nothing.
        scaler: The `torch.amp.GradScaler` of a float16 run; call `step` before its `unscale_`.
        intent: What the norms are meant to be, or the file that says so; a missing file is written at the end.
        name: What to call the run in the report.
        say: Called with one line when something breaks; prints to stderr by default.

    Raises:
        InputError: If `every` is no positive whole number, `optimizer` is no optimizer, `batch` cannot be used, or
            another watch over the model is not closed.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> with watch(model, optimizer, every=2) as run:
        ...     for _ in range(3):
        ...         loss = model(torch.randn(4, 8)).square().mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         run.step(loss)
        ...         _ = optimizer.step()
        >>> run.inspection().training.steps
        3
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InputError(f"every must be a whole number of steps from 1 on, got {every!r}")
    optimizers = () if optimizer is None else tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise InputError(f"optimizer must be one or several torch optimizers, got {type(each).__name__}")
    return Watch(
        model,
        optimizers,
        every=every,
        batch=batch,
        out=None if out is None else Path(out),
        scaler=scaler,
        intent=intent,
        name=name,
        say=say,
    )


class Watch:
    """A watch over one run; made by `watch`, and used as a context manager or between `start` and `close`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        *,
        every: int,
        batch: Any,
        out: Path | None,
        scaler: Any,
        intent: Baseline | str | Path | None,
        name: str,
        say: Callable[[str], None] | None,
    ) -> None:
        self._given, self._model = model, unwrapped(model)
        self._optimizers, self._every, self._batch = optimizers, every, batch
        self._out, self._scaler, self._name = out, scaler, name
        is_first = not (is_distributed_run() and torch.distributed.get_rank())
        self._messages = Messages(say, None if out is None else ReportFiles(out), is_reporting=is_first)
        self._ranks = Ranks()
        self._recorder: StepRecorder | None = None
        self._watched = WatchedModel(model=self._model)
        self._baseline, self._unwritten = declared(intent)
        self._history = RunHistory()
        self._first_call: RemovableHandle | None = None
        self._step, self._is_over = 0, False
        self._now, self._noticed = 0, dict[str, int]()
        self._bare_steps = 0
        self._observer, self._peaks = "", learning_rates(optimizers)

    def __enter__(self) -> Watch:
        """Begin: find the norms on `batch`, or have them found at the first call."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End: take the hooks out; an exception is passed on."""
        self.close(reason="" if kind is None else f"the run was left by {kind.__name__}")

    def start(self) -> Watch:
        """Begin without `with`; `close` ends the watch."""
        batch = None if self._batch is None else arguments(self._model, self._batch)
        if self._model in _watched:
            raise InputError("the model is watched already; close that watch before another one begins")
        _watched.add(self._model)
        own = {id(parameter) for parameter in self._model.parameters()}
        held = [parameter for each in self._optimizers for group in each.param_groups for parameter in group["params"]]
        if count := sum(id(parameter) not in own for parameter in held):
            self.remark(f"{count} of {len(held)} parameters of the optimizers are not the model's and not watched")
        if batch is not None:
            self._begin(batch)
        else:
            # Before the hooks of fully_shard, which begin a forward pass that the survey would interrupt.
            self._first_call = self._given.register_forward_pre_hook(
                Hook(Failures(), "the model", self._at_first_call), with_kwargs=True, prepend=True
            )
        return self

    def _at_first_call(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._first_call is None:
            return
        self._first_call.remove()
        self._first_call = None
        self._messages.guarded("the beginning", self._begin, dict[Any, Any](enumerate(args)) | kwargs)
        if self._recorder is not None:
            self._recorder.begin_call(args, kwargs, is_inner=self._given is self._model)

    def _begin(self, batch: Batch) -> None:
        """Find the norms and put the hooks in."""
        found = start_up(
            self._given,
            self._model,
            self._optimizers,
            batch,
            every=self._every,
            scaler=self._scaler,
            baseline=self._baseline,
        )
        self._watched, self._recorder, self._ranks = found.watched, found.recorder, found.ranks
        self._messages.is_reporting, self._observer = found.is_reporting, found.observer
        if self._out is not None:
            self._messages.reports = ReportFiles(self._out / found.folder)
        for remark in found.remarks:
            self.remark(remark)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Tell the watch that a step's gradients are complete, before they are clipped, unscaled or used.

        Args:
            loss: The loss of the step, as it is to be judged: a tensor of any device, a number, or None.
        """
        if self._is_over:
            return
        if not (loss is None or isinstance(loss, (Tensor, SupportsFloat))):
            raise InputError(f"loss must be a tensor, a number or None, got {type(loss).__name__}")
        if self._recorder is not None:
            self._messages.guarded("a step", self._record_step, self._recorder, loss)
            self._recorder.instruments.on = (self._step + 1) % self._every == 0
            self._recorder.batch_norms.begin_step()
        elif self._step == 0 and self._first_call is not None:
            self.remark(f"the model was not called before the end of the first step, or {LATE}")
        self._step += 1

    def remark(self, line: str) -> None:
        """Say, once and in one line, that something cannot be watched, and why; the report holds it."""
        self._messages.remark(line)

    def _record_step(self, recorder: StepRecorder, loss: Tensor | float | None) -> None:
        # Schedules end at 0, so a report shows the largest rate.
        self._peaks = [max(pair) for pair in zip(self._peaks, learning_rates(self._optimizers), strict=False)]
        self._now = self._step
        recorder.record_step(self._step, loss)
        if self._step < FIRST_STEPS and not recorder.unreduced:
            trained = [each.tensor for each in recorder.parameters if each.group is not None]
            self._bare_steps += bool(trained) and all(tensor.grad is None for tensor in trained)
            if self._bare_steps == FIRST_STEPS:
                self.remark(NO_GRADIENTS)
        if self._step == 0 and recorder.unreduced:
            count, example = len(recorder.unreduced), recorder.parameters[min(recorder.unreduced)].path
            self.remark(
                f"gradients of {count} parameters, such as {example}, are parts of a sum that the processes take "
                "later: they are left out of the gradient's norm"
            )
        if failures := recorder.failures.by_place:
            place, reason = next(iter(failures.items()))
            line = f"{len(failures)} places could not be measured, the first is {place}: {reason}"
            self._messages.remark(line, "places")
        self._add_ready(recorder)

    def _add_ready(self, recorder: StepRecorder, patience: float = 0.0) -> None:
        """Add the numbers that have reached the host to the history, and report."""
        history, broken, reports = self._history, self._history.reason, self._history.reports
        history.settle(recorder)
        for step, values in recorder.step_records.take_ready(patience):
            hooked = recorder.layout.hooked
            if step == 0 and (seen := round(float(values[STEP_RECORD.index("seen")]))) < hooked:
                why = LATE if seen == 0 else f"the others did not run, or {LATE}"
                self.remark(f"{seen} of {hooked} norms and blocks were seen in the first step: {why}")
            history.add_step_record(step, values, recorder)
        history.settle(recorder, is_over=self._is_over)
        for step, vectors in recorder.reports.take_ready(patience):
            history.add_report(TableReader(step=step, tables=recorder.pooled(step, vectors)), recorder)
        if history.reason and not broken:
            self._announce()
        if history.reports > reports:
            # Less and less often: a fault of the model shows early, and a fault of the run raises an alarm.
            self._report(judged=history.reason != "" or history.reports.bit_count() == 1)

    def _add_all(self, recorder: StepRecorder) -> None:
        recorder.send()
        self._add_ready(recorder, _PATIENCE)
        history, last = self._history, self._step - 1
        if not self._is_over and not recorder.loop.has_stepped(last):
            # An optimizer may yet use the gradients of the newest step.
            last -= 1
        # Steps since the last report; several processes pool their numbers in reports only.
        if recorder.is_alone and history.last is not None and last > history.last.step:
            history.add_steps(recorder.since_report(), history.last.step + 1, last, recorder)
        if missing := len(recorder.reports):
            line = f"{missing} reports had no answer from all processes within {_PATIENCE:g} s"
            self._messages.remark(line, "answers")

    def _report(self, *, judged: bool) -> None:
        """Write a line of history.jsonl and, where the run is to be judged, tell of errors not told before."""
        messages = self._messages
        if not messages.is_reporting:
            return
        if messages.reports is not None:
            messages.guarded("history.jsonl", messages.reports.add, self._history)
        if not judged:
            return
        inspection = self._inspection(self._history.reason or "a look on the way")
        for found in inspection.findings:
            if found.severity == "error" and messages.is_new(found.rule):
                self._noticed[found.rule] = self._now
                messages.tell(f"step {self._now}: {found.rule} {found.title.lower()}: {found.measured}")
        if self._history.reason:
            messages.write(inspection)

    def _announce(self) -> None:
        """Say on one line what broke, and write the page."""
        history, page = self._history, ""
        if not self._messages.is_reporting:
            return
        where = f", first at {history.place}" if history.place else ""
        try:
            if (written := self._messages.write(self._inspection(history.reason))) is not None:
                page = f"; {written}"
        finally:
            self._messages.tell(f"step {history.reason_step}: {history.reason}{where}{page}")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The faults as far as has been measured, worst first."""
        return self.inspection().findings

    def inspection(self) -> Inspection:
        """Everything measured so far, judged: the page that is also written when something breaks."""
        if self._recorder is not None and not self._is_over:
            self._add_all(self._recorder)
        return self._inspection(self._history.reason or "asked")

    def _inspection(self, reason: str) -> Inspection:
        return inspection_of_run(
            self._watched,
            self._recorder,
            self._history,
            name=self._name,
            steps=self._step,
            every=self._every,
            reason=reason,
            observer=self._observer,
            remarks=self._messages.remarks,
            optimizers=describe_optimizers(self._optimizers, self._peaks),
            ranks=self._ranks.size,
            noticed=self._noticed,
        )

    def close(self, reason: str = "") -> None:
        """End the watch: the model is as it was, and the report, where one is wanted, is written. May be called twice.

        `reason` says why the run ended, if it ended early.
        """
        if self._is_over:
            return
        self._is_over = True
        _watched.discard(self._model)
        if self._first_call is not None:
            self._first_call.remove()
        if self._recorder is not None:
            self._recorder.remove()
        self._messages.guarded("the end", self._end, reason)

    def _end(self, reason: str) -> None:
        messages, unwritten = self._messages, self._unwritten
        if self._recorder is not None:
            if self._ranks.size == 1 or not reason:
                self._add_all(self._recorder)
            else:
                # Another process may have died: nothing is sent that it would have to answer.
                self._add_ready(self._recorder)
        if messages.is_reporting and (messages.reports is not None or unwritten is not None):
            inspection = self._inspection(self._history.reason or reason or "end of the run")
            messages.write(inspection)
            if unwritten is not None and inspection.sites:
                write(infer(inspection, self._watched.intent, source=unwritten.name), unwritten)
