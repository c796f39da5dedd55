"""Changes between steps: updates, changes that no optimizer made, norms, blocks and gradients that stop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from torch import Tensor

from normkit.measurement.history import FROM_NOTHING, GAIN_LIMIT, MEDIAN_LIMIT, WEIGHT_LIMIT
from normkit.measurement.row_counters import ROW_PEAKS, ROW_SUMS
from normkit.measurement.training import Change, Setting, Stop
from normkit.watching.parameters import MOVES
from normkit.watching.step_recorder import StepRecorder

# A step of an optimizer at thirty times a healthy learning rate changes a gain by 0.28 of its length.
_CHANGED = 0.5
# Smaller changes count where they add up: in at least so many steps, to at least so many times its length.
_SLIGHT, _OFTEN, _ADDED = 0.05, 4, 2.0
_MOST_CHANGES, _MOST_A_STEP = 256, 4
# Layers that are dropped at random miss some steps, but not so many in a row.
_STEPS, _MOSTLY = 8, 0.9
# The same rows counted twice differ by less.
_SAME_ROWS = 1e-9


@dataclass
class _Presence:
    """How often a norm, block or gradient was there, and since when it is not."""

    kind: Literal["norm", "block", "gradient"]
    path: str
    before: int = 0
    """Times it was there."""
    missed: int = 0
    """Times it was not, but came back."""
    since: int = 0
    """Times it was missing since it was last there."""
    step: int = -1
    """The step in which it was first missing since then."""

    def add(self, step: int, *, is_there: bool) -> None:
        if is_there:
            self.before, self.missed, self.since = self.before + 1, self.missed + self.since, 0
        else:
            self.step = step if not self.since else self.step
            self.since += 1

    @property
    def has_stopped(self) -> bool:
        return min(self.before, self.since) >= _STEPS and self.before >= _MOSTLY * (self.before + self.missed)


class ChangeTracker:
    """The changes of a run between steps."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        """Parameters that something other than an optimizer changed."""
        self.moved_steps: dict[str, int] = {}
        """Steps in which each parameter moved, by path."""
        self.settings: list[Setting] = []
        """Settings of norms that changed."""
        self._known: dict[tuple[str, str], float] = {}
        self._slight: dict[int, tuple[int, int, float]] = {}
        self._from_nothing: set[int] | None = None
        self._presences: list[_Presence] = []
        self._gradients: dict[int, _Presence] = {}
        self._reported: dict[str, _Presence] = {}

    @property
    def stopped(self) -> tuple[Stop, ...]:
        """Norms and blocks that stopped, and weights without a gradient; parts of a block that stopped are left out."""
        gone = [each for each in (*self._presences, *self._gradients.values()) if each.has_stopped]
        named = {each.path for each in gone}
        gone += [each for each in self._reported.values() if each.before and each.since and each.path not in named]
        blocks = [each.path for each in gone if each.kind == "block"]
        return tuple(
            Stop(kind=each.kind, path=each.path, step=each.step, before=each.before, since=each.since)
            for each in gone
            if not any(each.path.startswith(f"{block}.") for block in blocks)
        )

    def add(
        self,
        step: int,
        recorder: StepRecorder,
        updates: Tensor,
        ran: Tensor,
        squares: Sequence[float],
        *,
        has_stepped: bool,
    ) -> Iterator[tuple[str, float]]:
        """Add one step.

        `updates` are the `MOVES` of each parameter, `ran` says how often each place of the sentinel ran, `squares` are
        sums of squares of gradients; `has_stepped` says that an optimizer got gradients.

        Yields:
            Paths and update ratios: "" for the median weight's, then those above their limit.
        """
        moves = dict(zip(MOVES, updates.T, strict=True))
        self._add_presence(step, recorder, ran.tolist(), squares)
        self._add_changes(step, recorder, moves["outside"], moves["left"], moves["before"])
        ratios = (moves["moved"] / moves["before"]).sqrt().tolist()
        if not any(ratio > 0 for ratio in ratios):
            if has_stepped:
                yield "", 0.0
            return
        for ratio, parameter in zip(ratios, recorder.parameters, strict=True):
            if ratio > 0:
                self.moved_steps[parameter.path] = self.moved_steps.get(parameter.path, 0) + 1
        if self._from_nothing is None:
            self._from_nothing = {index for index, ratio in enumerate(ratios) if not ratio < FROM_NOTHING}
        moved = [
            (ratio, parameter.path, parameter.kind)
            for index, (ratio, parameter) in enumerate(zip(ratios, recorder.parameters, strict=True))
            if index not in self._from_nothing and 0 < ratio < math.inf
        ]
        weights = sorted(((ratio, path) for ratio, path, kind in moved if kind in ("weight", "output")), reverse=True)
        gains = sorted(((ratio, path) for ratio, path, kind in moved if kind == "gain"), reverse=True)
        typical = median(ratio for ratio, _ in weights) if weights else 0.0
        if weights:
            yield "", typical
        # A median has no place, so the fastest weight is named with it.
        for found, limit in ((weights, WEIGHT_LIMIT if typical <= MEDIAN_LIMIT else 0.0), (gains, GAIN_LIMIT)):
            yield from ((path, ratio) for ratio, path in found[:_MOST_A_STEP] if ratio > limit)

    def add_report(self, step: int, recorder: StepRecorder, rows: Tensor, peaks: Tensor) -> None:
        """Add what entered and left each norm and block in a measured step, from the tables of that name."""
        layout = recorder.layout
        for site in layout.sites:
            for name, value in vars(site.module).items() if site.module is not None else ():
                if type(value) not in (int, float) or name.startswith("_"):
                    continue
                before = self._known.setdefault((site.path, name), value)
                if value != before:
                    self.settings.append(Setting(path=site.path, name=name, before=before, after=value, step=step))
                    self._known[site.path, name] = value
        found = [("norm", site.path, 2 * index, 2 * index + 1) for index, site in enumerate(layout.sites)]
        found += [("block", block.path, *layout.places(block.index)) for block in layout.blocks]
        names = [ROW_PEAKS.index(name) for name in ("absmax", "rms", "-rms")]
        for kind, path, entering, leaving in found:
            one, other = peaks[entering, names], peaks[leaving, names]
            # A norm that is no module has run if it was counted.
            if not rows[leaving, ROW_SUMS.index("calls")] or not one[0] > 0:
                continue
            is_same = bool(((one - other).abs() <= _SAME_ROWS * one.abs()).all())
            presence = self._reported.setdefault(path, _Presence(kind, path))  # type: ignore[arg-type]
            presence.add(step, is_there=not is_same)

    def _add_presence(self, step: int, recorder: StepRecorder, ran: Sequence[float], squares: Sequence[float]) -> None:
        layout = recorder.layout
        if not self._presences:
            self._presences = [_Presence("norm", site.path) for site in layout.sites]
            self._presences += [_Presence("block", block.path) for block in layout.blocks]
        for presence, times in zip(self._presences, ran, strict=True):
            presence.add(step, is_there=times != 0)
        for index, (parameter, square) in enumerate(zip(recorder.parameters, squares, strict=True)):
            if parameter.kind == "weight" and parameter.tensor.requires_grad:
                presence = self._gradients.setdefault(index, _Presence("gradient", parameter.path))
                presence.add(step, is_there=square != 0 or index in recorder.unreduced)

    def _add_changes(self, step: int, recorder: StepRecorder, outside: Tensor, left: Tensor, now: Tensor) -> None:
        # Any change of zeros is infinitely large, and so is loading a parameter that had not been set.
        ratios = (outside / left).sqrt()
        for index in (ratios >= _SLIGHT).nonzero().flatten().tolist():
            ratio, factor = float(ratios[index]), float((now[index] / left[index]).sqrt())
            began = step
            if ratio < _CHANGED:
                began, times, before = self._slight.pop(index, (step, 0, 1.0))
                factor *= before
                self._slight[index] = began, times + 1, factor
                if times + 1 < _OFTEN or factor < _ADDED:
                    continue
                # Later changes of this kind are added up from here.
                ratio = factor - 1
                del self._slight[index]
            if math.isfinite(ratio) and len(self.changes) < _MOST_CHANGES:
                path = recorder.parameters[index].path
                self.changes.append(Change(step=began, path=path, ratio=ratio, factor=factor))
