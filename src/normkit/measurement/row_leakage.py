"""Rows that change when rows that they must not depend on are changed: other samples, later tokens, padding.

A model runs twice on a few tokens, with a change in between, and the input and output of each norm are compared at
the rows that must stay. A norm whose input stayed and whose output changed has let the change in. Its old output is
put back there, so that later norms are judged independently.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from normkit.identification.passport import Passport
from normkit.identification.sites import NormSite, OtherNorm
from normkit.identification.state import buffers_kept, in_mode, undisturbed
from normkit.identification.tracing import first_output, first_tensor
from normkit.measurement.observing import Listener, observed
from normkit.measurement.perturbed_batches import Kind, Perturbation, change, perturbations, put_back
from normkit.measurement.running import Batch, evaluating, runner
from normkit.measurement.structure import Structure

Mode = Literal["evaluation", "training"]

_SEED = 0
# An input that stood still may differ in the last bit or two; an output that moved does so by more than rounding.
_STILL_UNITS, _MOVED_UNITS, _LEAST_MOVE = 4, 8, 1e-3


@dataclass(frozen=True, kw_only=True)
class Leak:
    """One way in which rows depend on other rows, or on the mode."""

    kind: Kind
    """The change: another sample of the batch, later tokens of a causal model, the content of padding, or for
    "mode" only the mode of a batch norm."""
    mode: Mode
    """Mode of the model."""
    path: str
    """A norm whose output changed while its input did not; "" if only the output of the model changed."""
    change: float
    """Largest change of an output row, divided by the largest magnitude in the row; for "mode" the root mean square of
    the change, divided by that of the output in evaluation mode."""


def find_leaks(model: nn.Module, structure: Structure, batch: Batch) -> tuple[Leak, ...] | None:
    """Change another sample, later tokens or the content of padding, and find the norms that let the change in.

    Up to five forward passes of two rows of up to 19 tokens; as many again in training mode where a norm behaves
    differently there. Parameters, buffers, modes and random generators are left as they were. Later tokens count only
    where the model without these norms' leaks is causal.

    Args:
        model: The model.
        structure: The structure of the model.
        batch: Keyword arguments with token ids of shape (B, T).

    Returns:
        The leaks, norms in forward order; None if it could not be tried: no token ids, or the model refuses them.
    """
    plan = perturbations(model, batch)
    if plan is None:
        return None
    leaks: list[Leak] = []
    with undisturbed(), evaluating(model), buffers_kept(model):
        try:
            seen = _Comparison(model, structure, plan)
            leaks += seen.leaks("evaluation")
        # Any third-party forward runs here, on an input that it was not made for.
        except Exception:
            return None
        passports = [norm.passport for norm in structure.sites] + [norm.passport for norm in structure.others]
        if any(map(_differs_in_training, passports)):
            leaks += seen.mode_gaps()
            with in_mode(model, training=True), _tolerated():
                leaks += seen.leaks("training")
    return tuple(leaks)


class _Comparison:
    """Runs of one model on pairs of batches."""

    def __init__(self, model: nn.Module, structure: Structure, plan: Sequence[Perturbation]) -> None:
        self._model, self._structure, self._plan = model, structure, plan
        self._entered: dict[str, Tensor] = {}

    def leaks(self, mode: Mode) -> list[Leak]:
        found = []
        given: Batch | None = None
        for perturbation in self._plan:
            # Two changes of one batch are held against one run of it.
            if perturbation.before is not given:
                given, before = perturbation.before, _Recorder()
                output = self._run(given, before)
            after = _Comparer(before, perturbation.kept)
            changed = self._run(perturbation.after, after)
            rest = max((change(a, b, perturbation.kept) for a, b in zip(output, changed, strict=True)), default=0.0)
            moved = rest > _moves(output[0].dtype) if output else False
            if perturbation.kind == "time" and (moved or after.moved_input):
                # The rest of the model looks ahead as well: it is not causal.
                continue
            found += [Leak(kind=perturbation.kind, mode=mode, path=path, change=by) for path, by in after.moved.items()]
            if moved and not after.moved:
                found.append(Leak(kind=perturbation.kind, mode=mode, path="", change=rest))
            if mode == "evaluation":
                self._entered = {path: inputs[0] for path, inputs in before.inputs.items()} | self._entered
        return found

    def mode_gaps(self) -> list[Leak]:
        """The effect of the mode alone on the outputs of batch norms, for the inputs that they had."""
        gaps = []
        for other in self._structure.others:
            x, module = self._entered.get(other.path), self._model.get_submodule(other.path)
            if x is None or other.passport.verdict != "batch":
                continue
            with _tolerated():
                plain = first_output(module(x.clone()))
                with in_mode(module, training=True):
                    batched = first_output(module(x.clone()))
                if plain is None or batched is None:
                    continue
                gap = (batched.double() - plain.double()).square().mean() / plain.double().square().mean()
                gaps.append(Leak(kind="mode", mode="training", path=other.path, change=float(gap.sqrt())))
        return gaps

    def _run(self, batch: Batch, listener: _Recorder) -> list[Tensor]:
        """The floating-point tensors that the model returns; every run draws the same random numbers."""
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(_SEED)
        sites, others = self._structure.sites, self._structure.others
        parents = {site.parent for site in sites if site.function is not None}
        with observed(self._model, sites, (), parents, listener), _heard(self._model, others, listener):
            return list(_tensors(runner(self._model, batch)()))


class _Recorder(Listener):
    """Keeps what enters and leaves each norm, call by call."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        self.enter(site.path, x)

    def after_site(self, site: NormSite, y: Tensor) -> Tensor | None:
        return self.leave(site.path, y)

    def enter(self, path: str, x: Tensor) -> None:
        self.inputs.setdefault(path, []).append(x.clone())

    def leave(self, path: str, y: Tensor) -> Tensor | None:
        self.outputs.setdefault(path, []).append(y.clone())
        return None


class _Comparer(_Recorder):
    """Compares a second run with a first one."""

    def __init__(self, first: _Recorder, kept: Tensor) -> None:
        super().__init__()
        self.moved: dict[str, float] = {}
        """The change of the output of each norm whose input did not change, by path."""
        self.moved_input = False
        """The input of a norm changed where nothing may."""
        self._first, self._kept = first, kept
        self._calls: Counter[str] = Counter()
        self._still = False

    def enter(self, path: str, x: Tensor) -> None:
        moved = self._change(self._first.inputs, path, x)
        self._still = moved is not None and moved <= _STILL_UNITS * torch.finfo(x.dtype).eps
        self.moved_input |= moved is not None and moved > _moves(x.dtype)

    def leave(self, path: str, y: Tensor) -> Tensor | None:
        moved = self._change(self._first.outputs, path, y)
        call = self._calls[path]
        self._calls[path] += 1
        if not self._still or moved is None or moved <= _moves(y.dtype):
            return None
        self.moved[path] = max(moved, self.moved.get(path, 0.0))
        return put_back(self._first.outputs[path][call], y, self._kept)

    def _change(self, first: dict[str, list[Tensor]], path: str, now: Tensor) -> float | None:
        """None where the first run made no such call."""
        calls = first.get(path, [])
        call = self._calls[path]
        return change(calls[call], now, self._kept) if call < len(calls) else None


@contextmanager
def _heard(model: nn.Module, others: Iterable[OtherNorm], listener: _Recorder) -> Iterator[None]:
    """Tell the recorder of the norms that no spec describes."""
    handles = []

    def listen(path: str, module: nn.Module) -> None:
        def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if (x := first_tensor(args, kwargs)) is not None:
                listener.enter(path, x)

        def after(_module: nn.Module, _args: object, output: object) -> object:
            return listener.leave(path, output) if isinstance(output, Tensor) else None

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    try:
        for other in others:
            listen(other.path, model.get_submodule(other.path))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _tolerated() -> Iterator[None]:
    """Not every model can be called in training mode, or every norm by itself: then that shows nothing."""
    try:
        yield
    except Exception:
        return


def _differs_in_training(passport: Passport) -> bool:
    reading = passport.readings.get("training")
    return reading is not None and (reading.value is None or reading.value["output"] != "as in eval")


def _moves(dtype: torch.dtype) -> float:
    return max(_LEAST_MOVE, _MOVED_UNITS * torch.finfo(dtype).eps)


def _tensors(output: object) -> Iterator[Tensor]:
    """The floating-point tensors of rows in what a model returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.dim() > 1:
            yield output
    elif isinstance(output, dict):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
