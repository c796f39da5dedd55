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
from normkit.inspection.baseline import Baseline, declared, infer, write
from normkit.inspection.result import Finding, Inspection
from normkit.watching.beginning import Wanted, begun
from normkit.watching.chronicle import Chronicle
from normkit.watching.gauging import PULSE, Gauging
from normkit.watching.hooks import Failures, Hook
from normkit.watching.journal import Journal
from normkit.watching.judgement import Circumstances, judged
from normkit.watching.meeting import is_distributed_run
from normkit.watching.ranks import Ranks
from normkit.watching.readings import Reading
from normkit.watching.subject import Subject
from normkit.watching.surveying import Arguments, describe_optimizers, learning_rates, unwrapped
from normkit.watching.voice import Voice

LATE = (
    "a compiler had traced the model before the watch put its hooks in; begin the watch first, and give it batch= "
    "where model.compile() was called or another object than the compiled one"
)
_watched: WeakSet[nn.Module] = WeakSet()

_PATIENCE = 5.0
"""Seconds that what is on its way is waited for at the end, or when asked: another process may never send its part."""

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
    the first place with NaN at every step. Nothing of an activation's size is kept, and in the step no device is waited
    for. The model, its gradients and the random numbers are what they would be without the watch.

    Args:
        model: The model as the loop calls it, compiled, in a data-parallel wrapper or sharded.
        optimizer: One or several; None where none is to be judged.
        every: Steps between two measurements of everything.
        batch: Arguments of the model, a mapping or a tuple, on which its norms are found when the watch begins;
            by default they are found at its first call. Needed where `model.compile()` was called.
        out: Folder for report.html and report.json, written when something breaks and at the end, and history.jsonl,
            one line a report; None writes nothing.
        scaler: The `torch.amp.GradScaler` of a float16 run; `step` is to be called before its `unscale_`.
        intent: What the norms are meant to be, or the file that says so; one that is not there is written at the end.
        name: What to call the run in the report.
        say: Called with one line when something breaks; prints to stderr by default.

    Raises:
        InputError: If `every` is no positive whole number, `optimizer` is none, `batch` cannot be used, or another
            watch over the model is not closed.

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
        self._scaler, self._name = scaler, name
        self._ranks = Ranks()
        self._out = out
        is_first = not (is_distributed_run() and torch.distributed.get_rank())
        self._voice = Voice(say, None if out is None else Journal(out), speaks=is_first)
        self._gauging: Gauging | None = None
        self._subject = Subject(model=self._model, structure=None)
        self._baseline, self._unwritten = declared(intent)
        self._chronicle = Chronicle()
        self._first_call: RemovableHandle | None = None
        self._step = 0
        self._is_over = False
        self._now, self._noticed = 0, dict[str, int]()
        self._observer, self._peaks = "", learning_rates(optimizers)

    def __enter__(self) -> Watch:
        """Begin: find the norms on `batch`, or have them found at the first call."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End: take the hooks out; an exception goes on as it would."""
        self.close(reason="" if kind is None else f"the run was left by {kind.__name__}")

    def start(self) -> Watch:
        """Begin, where no `with` is used; `close` ends it."""
        arguments = None if self._batch is None else Arguments.of(self._batch)
        if self._model in _watched:
            raise InputError("the model is watched already; close that watch before another one begins")
        _watched.add(self._model)
        self._remark_strangers()
        if arguments is not None:
            self._begin(arguments)
        else:
            # Before the hooks of fully_shard, which begin a forward pass that the survey would come into.
            self._first_call = self._given.register_forward_pre_hook(
                Hook(Failures(), "the model", self._at_first_call), with_kwargs=True, prepend=True
            )
        return self

    def _remark_strangers(self) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        held = [parameter for each in self._optimizers for group in each.param_groups for parameter in group["params"]]
        if count := sum(id(parameter) not in own for parameter in held):
            whose = f"{count} of {len(held)} parameters of the optimizers"
            self._voice.remark(f"{whose} are not the model's and not watched")

    def _at_first_call(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._first_call is None:
            return
        self._first_call.remove()
        self._first_call = None
        self._voice.guarded("the beginning", self._begin, Arguments(args=args, kwargs=kwargs))
        if self._gauging is not None:
            self._gauging.begin_call(args, kwargs, is_inner=self._given is self._model)

    def _begin(self, arguments: Arguments) -> None:
        """Find the norms and put the hooks in."""
        wanted = Wanted(
            given=self._given,
            model=self._model,
            optimizers=self._optimizers,
            every=self._every,
            scaler=self._scaler,
            baseline=self._baseline,
        )
        beginning = begun(wanted, arguments)
        self._subject, self._gauging, self._ranks = beginning.subject, beginning.gauging, beginning.ranks
        self._voice.speaks, self._observer = beginning.speaks, beginning.observer
        if self._out is not None:
            self._voice.journal = Journal(self._out / beginning.folder)
        for remark in beginning.remarks:
            self._voice.remark(remark)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Tell the watch that a step's gradients are complete, before they are clipped, unscaled or used.

        Args:
            loss: Of the step, as it is to be judged: a tensor of any device, a number, or None.
        """
        if self._is_over:
            return
        if not (loss is None or isinstance(loss, (Tensor, SupportsFloat))):
            raise InputError(f"loss must be a tensor, a number or None, got {type(loss).__name__}")
        if self._gauging is not None:
            self._voice.guarded("a step", self._take, self._gauging, loss)
            self._gauging.switch.on = (self._step + 1) % self._every == 0
        elif self._step == 0 and self._first_call is not None:
            self._voice.remark(f"the model was not called before the end of the first step, or {LATE}")
        self._step += 1

    def _take(self, gauging: Gauging, loss: Tensor | float | None) -> None:
        # Schedules end at 0: what a report shows is the largest.
        self._peaks = [max(pair) for pair in zip(self._peaks, learning_rates(self._optimizers), strict=False)]
        self._now = self._step
        gauging.take(self._step, loss)
        if self._step == 0:
            self._remark_unreduced(gauging)
        if failures := gauging.failures.of:
            place, reason = next(iter(failures.items()))
            count = len(failures)
            self._voice.remark(f"{count} places could not be measured, the first is {place}: {reason}", "places")
        self._read_mail()

    def remark(self, line: str) -> None:
        """Say, once, that something cannot be watched, and why; the report holds it.

        Args:
            line: One line.
        """
        self._voice.remark(line)

    def _remark_unreduced(self, gauging: Gauging) -> None:
        if gauging.unreduced:
            count, example = len(gauging.unreduced), gauging.parameters[min(gauging.unreduced)].path
            self._voice.remark(
                f"gradients of {count} parameters, such as {example}, are parts of a sum that the processes take "
                "later: they are left out of the gradient's norm"
            )

    def _read_mail(self, patience: float = 0.0) -> None:
        assert self._gauging is not None
        chronicle, broken = self._chronicle, self._chronicle.reason
        chronicle.settle(self._gauging)
        for step, values in self._gauging.pulses.arrived(patience):
            if step == 0:
                self._remark_unseen(round(float(values[PULSE.index("seen")])), self._gauging.plan.hooked)
            chronicle.add_pulse(step, values, self._gauging)
        chronicle.settle(self._gauging, is_over=self._is_over)
        reports = chronicle.reports
        for step, vectors in self._gauging.reports.arrived(patience):
            chronicle.add_report(Reading(step=step, tables=self._gauging.pooled(step, vectors)), self._gauging)
        if chronicle.reason and not broken:
            self._tell()
        if chronicle.reports > reports:
            # Less and less often: what is wrong with a model shows early, and what goes wrong in it raises an alarm.
            self._report(judged=chronicle.reason != "" or chronicle.reports.bit_count() == 1)

    def _read_all(self, gauging: Gauging) -> None:
        gauging.send()
        self._read_mail(_PATIENCE)
        self._read_lines(gauging)
        if missing := len(gauging.reports):
            self._voice.remark(f"{missing} reports had no answer from all processes within {_PATIENCE:g} s", "answers")

    def _read_lines(self, gauging: Gauging) -> None:
        """Take in the steps since the last report; what processes pool, they pool in reports alone."""
        chronicle, last = self._chronicle, self._step - 1
        if not self._is_over and not gauging.loop.has_stepped(last):
            # An optimizer may yet use the gradients of the newest step.
            last -= 1
        if gauging.is_alone and chronicle.reading is not None and last > chronicle.reading.step:
            chronicle.add_steps(gauging.since_report(), chronicle.reading.step + 1, last, gauging)

    def _remark_unseen(self, seen: int, hooked: int) -> None:
        if seen < hooked:
            why = LATE if seen == 0 else f"the others did not run, or {LATE}"
            self._voice.remark(f"{seen} of {hooked} norms and blocks were seen in the first step: {why}")

    def _report(self, *, judged: bool) -> None:
        if not self._voice.speaks:
            return
        if self._voice.journal is not None:
            self._voice.guarded("history.jsonl", self._voice.journal.add, self._chronicle)
        if not judged:
            return
        inspection = self._inspection(self._chronicle.reason or "a look on the way")
        for found in inspection.findings:
            if found.severity == "error" and self._voice.is_new(found.rule):
                self._noticed[found.rule] = self._now
                self._voice.tell(f"step {self._now}: {found.rule} {found.title.lower()}: {found.measured}")
        if self._chronicle.reason:
            self._voice.write(inspection)

    def _tell(self) -> None:
        """Say on one line what broke, and write the page."""
        if not self._voice.speaks:
            return
        chronicle = self._chronicle
        where = f", first at {chronicle.place}" if chronicle.place else ""
        page = ""
        try:
            if (written := self._voice.write(self._inspection(chronicle.reason))) is not None:
                page = f"; {written}"
        finally:
            self._voice.tell(f"step {chronicle.reason_step}: {chronicle.reason}{where}{page}")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong as far as has been measured, worst first."""
        return self.inspection().findings

    def inspection(self) -> Inspection:
        """Everything measured so far, judged: the page that is also written when something breaks."""
        if self._gauging is not None and not self._is_over:
            self._read_all(self._gauging)
        return self._inspection(self._chronicle.reason or "asked")

    def _inspection(self, reason: str) -> Inspection:
        return judged(
            self._subject,
            self._gauging,
            self._chronicle,
            Circumstances(
                name=self._name,
                steps=self._step,
                every=self._every,
                reason=reason,
                observer=self._observer,
                remarks=tuple(self._voice.remarks),
                optimizers=describe_optimizers(self._optimizers, self._peaks),
                ranks=self._ranks.size,
                noticed=self._noticed,
            ),
        )

    def close(self, reason: str = "") -> None:
        """End the watch: the model is as it was, and the report, where one is wanted, is written. May be called twice.

        Args:
            reason: Why the run ended, if not as it should.
        """
        if self._is_over:
            return
        self._is_over = True
        _watched.discard(self._model)
        if self._first_call is not None:
            self._first_call.remove()
        if self._gauging is not None:
            self._gauging.remove()
        self._voice.guarded("the end", self._end, reason)

    def _end(self, reason: str) -> None:
        if self._gauging is not None:
            if self._ranks.size == 1 or not reason:
                self._read_all(self._gauging)
            else:
                # Another process may have died: nothing is sent that it would have to answer.
                self._read_mail()
        if self._voice.speaks and (self._voice.journal is not None or self._unwritten is not None):
            inspection = self._inspection(self._chronicle.reason or reason or "end of the run")
            self._voice.write(inspection)
            if self._unwritten is not None and inspection.sites:
                meant = infer(inspection, self._subject.intent, source=self._unwritten.name)
                write(meant, self._unwritten)
