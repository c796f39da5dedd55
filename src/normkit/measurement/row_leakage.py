"""Rows that change when rows that they must not depend on are changed: other samples, later tokens, padding.

A model runs twice on a few tokens, with a change in between, and the input and output of each norm are compared at
the rows that must stay. A norm whose input stayed and whose output changed has let the change in. Its old output is
put back there, so that later norms are judged independently.
"""

from __future__ import annotations

import inspect as signatures
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from normkit.conventions.gain import NO_GAIN
from normkit.identification.side_by_side import side_by_side
from normkit.identification.sites import NormSite
from normkit.identification.state import buffers_kept, in_mode, undisturbed
from normkit.measurement.hooks import Listener, observed
from normkit.measurement.running import (
    Batch,
    changed,
    evaluating,
    first_of,
    name_of_ids,
    part,
    runner,
    tensors,
    unit,
    vocabulary,
)
from normkit.measurement.samples import zero_ends
from normkit.measurement.structure import Structure
from normkit.reference import forward

Kind = Literal["batch", "time", "padding"]

# A prime is seldom the width of anything else.
_ROWS, _TOKENS = 2, 19
_SEED = 0
# Rows far smaller than the largest are held against this share of it.
_FLOOR = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Perturbation:
    """Two batches, and the rows that should be the same for both."""

    kind: Kind
    """The difference: another sample, later tokens, or the content of padding."""
    before: Batch
    after: Batch
    """Tensors of the same shapes."""
    kept: Tensor
    """(B, T), True at the tokens whose rows should not change."""


def perturbations(model: nn.Module, batch: Batch) -> tuple[Perturbation, ...] | None:
    """The perturbations for a model: other samples, later tokens, and padding for a model that takes a mask.

    The first two rows and the first 19 tokens of the batch are used; for a single row, a second one is made. Images
    and recordings have other samples alone.

    Returns:
        The perturbations, or None without token ids of shape (B, T) that could be changed, and without images or sound.
    """
    name = name_of_ids(batch)
    if name is None:
        return None if unit(batch) == "token" else (_other_sample(batch),)
    small = part(batch, batch[name], [row % len(batch[name]) for row in range(_ROWS)], _TOKENS)
    # Another id at each place, drawn from those that there are.
    ids, known, entries = small[name], torch.unique(small[name]), vocabulary(model)
    if len(known) > 1:
        steps = torch.randint(1, len(known), ids.shape, generator=torch.Generator().manual_seed(_SEED)).to(ids.device)
        other = known[(torch.searchsorted(known, ids.contiguous()) + steps) % len(known)]
    elif entries is not None and entries > 1:
        other = (ids + 1) % entries
    else:
        return None
    if batch[name].shape[0] == 1:
        ids = small[name] = torch.cat([ids[:1], other[1:]])
        other = torch.cat([other[:1], ids[:1]])
    rows, tokens = ids.shape
    row, token = torch.arange(rows)[:, None], torch.arange(tokens)[None, :]

    def perturbation(kind: Kind, changed: Tensor, given: Batch) -> Perturbation:
        changed, kept = changed.expand(rows, tokens), ~changed.expand(rows, tokens)
        if kind == "batch":
            kept = (row > 0).expand(rows, tokens)
        after = {**given, name: torch.where(changed.to(ids.device), other, ids)}
        return Perturbation(kind=kind, before=given, after=after, kept=kept)

    plan = [perturbation("batch", row == 0, small)]
    if tokens > 1:
        plan.append(perturbation("time", token >= tokens // 2, small))
    if tokens > 2 and "attention_mask" in signatures.signature(model.forward).parameters:
        padding = (row > 0) & (token >= tokens - tokens // 3)
        mask = (~padding).long().to(ids.device)
        plan.append(perturbation("padding", padding, {**small, "attention_mask": mask}))
    return tuple(plan)


def _other_sample(batch: Batch) -> Perturbation:
    """Two samples of images or of sound, of which the first changes."""
    whole = first_of(batch)

    def two(_name: str, value: Tensor) -> Tensor:
        has_rows = value.dim() > 0 and len(value) == len(whole)
        return value[[row % len(value) for row in range(_ROWS)]] if has_rows else value

    def first_changed(_name: str, value: Tensor) -> Tensor:
        has_rows = value.dim() > 1 and len(value) == _ROWS and value.is_floating_point()
        return torch.cat([-value[:1].roll(1, -1), value[1:]]) if has_rows else value

    before = changed(batch, two)
    kept = torch.tensor([[False], [True]])
    return Perturbation(kind="batch", before=before, after=changed(before, first_changed), kept=kept)


def change(before: Tensor, after: Tensor, kept: Tensor) -> float:
    """Largest difference of a row that should not move over its largest magnitude; 0 where there is no such row.

    Args:
        before: A tensor with rows for B samples and T tokens, in some layout; another has no such row.
        after: The same, of a second run.
        kept: (B, T), True at the rows to compare.
    """
    kept = kept.to(before.device)
    if before.shape != after.shape or (rows := _rows(before, kept)) is None:
        return 0.0
    others = _rows(after, kept)
    assert others is not None
    a, b = (part[0][part[1]].flatten(1).double() for part in (rows, others))
    if not a.numel():
        return 0.0
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    size = a.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).amax(1)
    largest = float(before.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
    return float((difference.amax(1) / size.clamp_min(max(_FLOOR * largest, 1e-300))).max())


def put_back(before: Tensor, after: Tensor, kept: Tensor) -> Tensor:
    """`after` with those rows of `before` that should not have moved."""
    kept = kept.to(before.device)
    patched = after.contiguous().clone(memory_format=torch.contiguous_format)
    old, new = _rows(before.contiguous(), kept), _rows(patched, kept)
    assert old is not None
    assert new is not None
    new[0][new[1]] = old[0][old[1]]
    return patched


def _rows(values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor] | None:
    """The tensor as (B, T, ...), or (B, 1, ...) where it has no tokens, and which of these rows are kept."""
    batch, tokens = kept.shape
    if values.dim() < 2:
        return None
    size = values.shape[0]
    if size == tokens and values.shape[1] == batch and size != batch:
        return values.transpose(0, 1), kept
    if size % batch == 0:
        inner = values.shape[1:]
        axis = next((axis for axis, length in enumerate(inner) if length == tokens), None)
        if axis is not None:
            # Heads may be folded into the samples.
            return values.reshape(batch, size // batch, *inner).movedim(axis + 2, 1), kept
        if size == batch * tokens:
            return values.reshape(batch, tokens, *inner), kept
        if size == batch:
            return values.unsqueeze(1), kept.all(1, keepdim=True)
    return None


Mode = Literal["evaluation", "training"]

# An input that stood still may differ in the last bit or two; an output that moved does so by more than rounding.
_STILL_UNITS, _MOVED_UNITS, _LEAST_MOVE = 4, 8, 1e-3


@dataclass(frozen=True, kw_only=True)
class Leak:
    """One way in which rows depend on other rows, or on the mode."""

    kind: Kind
    """The change: another sample of the batch, later tokens of a causal model, or the content of padding."""
    mode: Mode
    """Mode of the model."""
    path: str
    """A norm whose output changed while its input did not; "" if only the output of the model changed."""
    change: float
    """Largest change of an output row, divided by the largest magnitude in the row."""


def find_leaks(model: nn.Module, structure: Structure, batch: Batch) -> tuple[Leak, ...] | None:
    """Change another sample, later tokens or the content of padding, and find the norms that let the change in.

    Up to five forward passes of two rows of up to 19 tokens; as many again in training mode where a norm behaves
    differently there. Parameters, buffers, modes and random generators are left as they were. Later tokens count only
    where the model without these norms' leaks is causal.

    Returns:
        The leaks, norms in forward order; None if it could not be tried: no token ids, or the model refuses them.
    """
    plan, padded = perturbations(model, batch), _counted_zeros(model, structure, batch)
    if plan is None:
        return padded or None
    with undisturbed(), evaluating(model), buffers_kept(model):
        try:
            seen = _Comparison(model, structure, plan)
            leaks = seen.leaks("evaluation")
        # Any third-party forward runs here, on an input that it was not made for.
        except Exception:
            return padded or None
        passports = [*(norm.passport for norm in structure.sites), *(norm.passport for norm in structure.others)]
        trained = [passport.readings.get("training") for passport in passports]
        if any(each and (each.value is None or each.value["output"] != "as in eval") for each in trained):
            # Not every model can be called in training mode: then that shows nothing.
            if name_of_ids(batch) is None:
                # The coupling of images by batch norms in training is known.
                return (*leaks, *padded)
            with suppress(Exception), in_mode(model, training=True):
                leaks += seen.leaks("training")
    return (*leaks, *padded)


def _counted_zeros(model: nn.Module, structure: Structure, batch: Batch) -> tuple[Leak, ...]:
    """The norms over time in whose statistics the zeros count that the samples of a batch end with."""
    mask, listener = zero_ends(batch), _WithoutEnds()
    if mask is not None:
        listener.mask, callers = mask, {each.parent for each in structure.sites}
        with evaluating(model), observed(model, structure.sites, (), callers, listener):
            runner(model, batch)()
    return tuple(
        Leak(kind="padding", mode="evaluation", path=path, change=by)
        for path, by in listener.moved.items()
        if by > _LEAST_MOVE
    )


class _Comparison:
    """Runs of one model on pairs of batches."""

    def __init__(self, model: nn.Module, structure: Structure, plan: Sequence[Perturbation]) -> None:
        self._model, self._structure, self._plan = model, structure, plan
        # To be listened to, a norm that no spec describes needs its path and its module.
        others = (SimpleNamespace(path=each.path, module=model.get_submodule(each.path)) for each in structure.others)
        self._norms = [*structure.sites, *(cast(NormSite, other) for other in others)]

    def leaks(self, mode: Mode) -> list[Leak]:
        given: Batch | None = None
        runs: list[Callable[[], list[Tensor]]] = []
        compared = []
        for perturbation in self._plan:
            # Two changes of one batch are held against one run of it.
            if perturbation.before is not given:
                given, before, place = perturbation.before, _Recorder(), len(runs)
                runs.append(partial(self._run, given, before))
            after = _Comparer(before, perturbation.kept)
            compared.append((perturbation, after, place, len(runs)))
            runs.append(partial(self._run, perturbation.after, after))
        outputs = [output() for output in side_by_side(self._model, self._structure.block_modules, runs)]
        found = []
        for perturbation, after, one, other in compared:
            output, changed = outputs[one], outputs[other]
            rest = max((change(a, b, perturbation.kept) for a, b in zip(output, changed, strict=True)), default=0.0)
            moved = bool(output) and rest > _least_move(output[0].dtype)
            if perturbation.kind == "time" and (moved or after.moved_input):
                # The rest of the model looks ahead as well: it is not causal.
                continue
            found += [Leak(kind=perturbation.kind, mode=mode, path=path, change=by) for path, by in after.moved.items()]
            if moved and not after.moved:
                found.append(Leak(kind=perturbation.kind, mode=mode, path="", change=rest))
        return found

    def _run(self, batch: Batch, listener: _Recorder) -> list[Tensor]:
        """The floating-point tensors of rows that the model returns; every run draws the same random numbers."""
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(_SEED)
        callers = {site.parent for site in self._structure.sites if site.function is not None}
        with observed(self._model, self._norms, (), callers, listener):
            output = runner(self._model, batch)()
        return [value for _, value in tensors(output) if value.is_floating_point() and value.dim() > 1]


class _WithoutEnds(Listener):
    """Normalizes each sample with and without its end, and compares the rows in front of the end."""

    mask: Tensor

    def __init__(self) -> None:
        self.moved: dict[str, float] = {}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        rows, samples = site.spec.rows, len(self.mask)
        # Without a gain for each channel an instance norm is a norm of its last axis.
        is_over_time = rows.are_samples or isinstance(site.module, nn.InstanceNorm1d)
        if not is_over_time or x.dim() != 3 or len(x) != samples:
            return
        axis, bare = 3 - (rows.channel_axis or 1) % 3, site.spec.replace(**NO_GAIN.conventions())
        # The norm may have fewer places than the sound has samples.
        kept = (self.mask.sum(1) * x.shape[axis] / self.mask.shape[1]).long().clamp_min(1)
        for sample, length in zip(x.detach().double()[:, None], kept.tolist(), strict=True):
            own = forward(sample.narrow(axis, 0, length), bare)
            counted = forward(sample, bare).narrow(axis, 0, length)
            by = float((counted - own).abs().max() / own.abs().max())
            self.moved[site.path] = max(by, self.moved.get(site.path, 0.0))


class _Recorder(Listener):
    """Keeps what enters and leaves each norm, call by call."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        self.inputs.setdefault(site.path, []).append(x.clone())

    def after_site(self, site: NormSite, y: Tensor, _given: object) -> Tensor | None:
        self.outputs.setdefault(site.path, []).append(y.clone())
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

    def before_site(self, site: NormSite, x: Tensor) -> None:
        moved = self._change(self._first.inputs, site.path, x)
        self._still = moved is not None and moved <= _STILL_UNITS * torch.finfo(x.dtype).eps
        self.moved_input |= moved is not None and moved > _least_move(x.dtype)

    def after_site(self, site: NormSite, y: Tensor, _given: object) -> Tensor | None:
        moved, call = self._change(self._first.outputs, site.path, y), self._calls[site.path]
        self._calls[site.path] += 1
        if not self._still or moved is None or moved <= _least_move(y.dtype):
            return None
        self.moved[site.path] = max(moved, self.moved.get(site.path, 0.0))
        return put_back(self._first.outputs[site.path][call], y, self._kept)

    def _change(self, first: dict[str, list[Tensor]], path: str, now: Tensor) -> float | None:
        """None where the first run made no such call."""
        calls, call = first.get(path, []), self._calls[path]
        return change(calls[call], now, self._kept) if call < len(calls) else None


def _least_move(dtype: torch.dtype) -> float:
    return max(_LEAST_MOVE, _MOVED_UNITS * torch.finfo(dtype).eps)
