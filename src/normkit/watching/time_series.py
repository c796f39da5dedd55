"""The state of a watch on the host: series over the steps, the last report, and whether something broke."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from normkit.measurement.history import height, stands_out
from normkit.measurement.layout import headroom_bits
from normkit.measurement.row_counters import TableReader, named
from normkit.measurement.training import Parameter, Quantity, Series
from normkit.text import dtype_name
from normkit.watching.change_tracker import ChangeTracker
from normkit.watching.inputs import batch_series
from normkit.watching.loop import LOOP
from normkit.watching.parameters import PARAMETER_SUMS, WatchedParameter
from normkit.watching.step_recorder import STEP_RECORD, StepRecorder

# With one gradient of each parameter for each step, a model of many layers would make a page of megabytes.
_KEPT, _KEPT_OF_PARAMETERS = 1024, 128
# A loss scaler begins at 2^16 and halves that at each overflow: after so many in a row it is not at fault.
_SKIPPED = 17


class RunHistory:
    """All series of a run, and the alarm."""

    def __init__(self) -> None:
        self.last: TableReader | None = None
        """The tables of the last report, or None before the first."""
        self.reports = 0
        """Number of reports so far."""
        self.reason, self.reason_step = "", -1
        """The break, or "" while there is none, and the step in which it was noticed."""
        self.place = ""
        """Path of the first place with NaN or infinity, or ""."""
        self.parameters: tuple[Parameter, ...] = ()
        """As the last report has them."""
        self.broken: tuple[str, ...] = ()
        """Parameters that held NaN or infinity when the alarm was raised for such values."""
        self.skipped: deque[int] = deque(maxlen=_KEPT)
        """Steps whose gradients were not finite and that no optimizer took, the newest thousand."""
        self.tokens = 0
        """Tokens that this process has seen."""
        self.tracker = ChangeTracker()
        self._series: dict[tuple[Quantity, str], deque[tuple[int, float]]] = {}
        self._firsts: dict[tuple[Quantity, str], tuple[int, float]] = {}
        self._losses: deque[float] = deque(maxlen=128)
        self._overflows = 0
        self._undecided: list[tuple[int, int, float]] = []
        self._last = -1
        self._gradient_steps: dict[str, int] = {}
        self._first_updates: dict[str, float] = {}
        self._first_spreads: dict[str, float] = {}

    def series(self) -> tuple[Series, ...]:
        """All series: the first step of each and the last thousand."""
        found = []
        for (quantity, path), kept in self._series.items():
            first = self._firsts[quantity, path]
            points = kept if kept[0] == first else (first, *kept)
            steps, values = zip(*points, strict=True)
            found.append(Series(quantity=quantity, path=path, steps=steps, values=values))
        return tuple(found)

    def add_step_record(self, step: int, values: Tensor, recorder: StepRecorder) -> None:
        """Add the record of one step, and raise the alarm if needed."""
        record = named(values, STEP_RECORD)
        place, parameter = round(record["bad place"]), round(record["bad parameter"])
        self._overflows = self._overflows + 1 if parameter >= 0 else 0
        self.tokens += round(record["tokens"])
        for quantity, value in batch_series(record):
            self._add(quantity, "", step, value)
        # With several processes the loss and the gradient's norm are known at the next report.
        if recorder.is_alone and (not math.isnan(record["loss"]) or place >= 0 or parameter >= 0):
            self._add("loss", "", step, record["loss"])
        norm = math.sqrt(record["squares"]) if record["squares"] >= 0 else math.nan
        if place < 0 <= parameter and self._overflows < _SKIPPED:
            if recorder.is_scaled:
                self.skipped.append(step)
            else:
                self._undecided.append((step, parameter, norm))
            return
        if recorder.is_alone:
            self._add("gradient norm", "", step, norm)
        if place >= 0:
            self._add_bad("non-finite", step, recorder.layout.path_of(place), recorder)
        elif parameter >= 0:
            self._add_bad("parameter gradient", step, recorder.parameters[parameter].path, recorder)
        elif recorder.is_alone:
            self._judge_loss(step, record["loss"])

    def settle(self, recorder: StepRecorder, *, is_over: bool = False) -> None:
        """Decide whether an optimizer took the steps whose gradients are not finite, or skipped them.

        Steps that are still open are taken once the run is over.
        """
        left = []
        for step, parameter, norm in self._undecided:
            has_stepped = recorder.loop.has_stepped(step)
            if has_stepped is False:
                self.skipped.append(step)
            elif has_stepped or is_over or not recorder.loop.can_tell:
                if recorder.is_alone:
                    self._add("gradient norm", "", step, norm)
                self._add_bad("parameter gradient", step, recorder.parameters[parameter].path, recorder)
            else:
                left.append((step, parameter, norm))
        self._undecided = left

    def _add_bad(self, quantity: Quantity, step: int, path: str, recorder: StepRecorder) -> None:
        """Add a place in the forward pass, or a parameter's gradient, that was NaN or infinite."""
        self._add(quantity, path, step, math.nan)
        if quantity == "parameter gradient":
            self._raise("non-finite gradients", step, path)
            return
        if self.reason == "non-finite gradients" and step <= self.reason_step:
            # Another process saw where it came from.
            self.reason = ""
        if not self.reason:
            self.broken = recorder.broken()
        self._raise("non-finite values in the forward pass", step, path)

    def _judge_loss(self, step: int, loss: float) -> None:
        if math.isinf(loss):
            self._raise("an infinite loss", step, "")
        elif stands_out("loss", self._losses, loss):
            self._raise("a spike of the loss", step, "")
        if math.isfinite(loss):
            if not math.isnan(z := height("loss", self._losses, loss)):
                self._add("loss z", "", step, z)
            self._losses.append(loss)

    def _raise(self, reason: str, step: int, place: str) -> None:
        """Raise the alarm; the first one stays, as later ones follow from it."""
        if not self.reason:
            self.reason, self.reason_step, self.place = reason, step, place

    def add_report(self, reader: TableReader, recorder: StepRecorder) -> None:
        """Add the tables of one measured step."""
        self.last, self.reports = reader, self.reports + 1
        tables, step = reader.tables, reader.step
        for quantity, path, value in _measured(reader, recorder):
            self._add(quantity, path, step, value)
        self.tracker.add_report(step, recorder, tables["rows"], tables["row peaks"])
        window = len(tables["steps"])
        self.add_steps(tables, max(0, step - window + 1), step, recorder)
        updates = tables["updates"][step % window, :, :2]
        lines = (table.tolist() for table in (tables["parameters"], updates, tables["spreads"]))
        # If nothing moved, the optimizer has not run yet, or a scaler made it skip the step.
        has_moved = bool(updates[:, 0].any())
        self.parameters = tuple(
            self._parameter(recorder, watched, dict(zip(PARAMETER_SUMS, sums, strict=True)), update, spread, has_moved)
            for watched, sums, update, spread in zip(recorder.parameters, *lines, strict=True)
        )
        for parameter in self.parameters:
            if not math.isnan(parameter.update_ratio):
                self._add("update ratio", parameter.path, step, parameter.update_ratio)

    def add_steps(self, tables: Mapping[str, Tensor], first: int, last: int, recorder: StepRecorder) -> None:
        """Add the lines of the steps from the first to the last, but for those that were added before."""
        window = len(tables["steps"])
        for step in range(max(first, self._last + 1, last - window + 1), last + 1):
            line, self._last = tables["steps"][step % window].tolist(), step
            if not line[0]:
                continue
            updates, ran = tables["updates"][step % window], tables["ran"][step % window]
            loop = named(tables["loop"][step % window], LOOP)
            for path, ratio in self.tracker.add(step, recorder, updates, ran, line[2:], has_stepped=loop["used"] > 0):
                self._add("update ratio", path, step, ratio)
            if loop["complete"] > 0 and math.isfinite(loop["used"]):
                self._add("gradient kept", "", step, math.sqrt(loop["used"] / loop["complete"]))
            if 0 < loop["used"] < math.inf:
                self._add("gradient left", "", step, loop["left"] / loop["used"])
                if 0 < loop["moved"] < math.inf:
                    self._add("update cosine", "", step, loop["along"] / math.sqrt(loop["used"] * loop["moved"]))
            self._add("learning rate", "", step, recorder.loop.rate_of(step))
            # Gradients that overflowed only because they were scaled are scaled down and tried again.
            if step in self.skipped:
                continue
            if not recorder.is_alone:
                # The measurements of all processes together.
                loss, squares, bad = line[1] / line[0], sum(line[2:]), float(tables["bad places"][step % window])
                if math.isfinite(bad):
                    self._add_bad("non-finite", step, recorder.layout.path_of(round(-bad)), recorder)
                if not math.isnan(loss) or math.isfinite(bad) or math.isnan(squares):
                    self._add("loss", "", step, loss)
                self._add("gradient norm", "", step, math.sqrt(squares))
                self._judge_loss(step, loss)
            for index, (parameter, value) in enumerate(zip(recorder.parameters, line[2:], strict=True)):
                if value or index in recorder.unreduced:
                    self._gradient_steps[parameter.path] = self._gradient_steps.get(parameter.path, 0) + 1
                if value:
                    self._add("parameter gradient", parameter.path, step, math.sqrt(value))

    def _parameter(
        self,
        recorder: StepRecorder,
        watched: WatchedParameter,
        sums: Mapping[str, float],
        update: Sequence[float],
        spread: Sequence[float],
        has_moved: bool,
    ) -> Parameter:
        moved, before = update
        ratio = math.sqrt(moved / before) if before > 0 and has_moved else math.nan
        if not math.isnan(ratio):
            self._first_updates.setdefault(watched.path, ratio)
        size, first_spread = sums["elements"] or math.nan, math.nan
        if watched.kind == "gain":
            std = math.sqrt(max(sums["squares"] / size - (sums["sum"] / size) ** 2, 0.0))
            first_spread = self._first_spreads.setdefault(watched.path, std)
        return Parameter(
            path=watched.path,
            kind=watched.kind,
            site=watched.site,
            block=watched.block,
            size=watched.tensor.numel(),
            dtype=dtype_name(watched.tensor.dtype),
            trained=watched.tensor.requires_grad and watched.group is not None,
            gradient_steps=self._gradient_steps.get(watched.path, 0),
            first_spread=first_spread,
            moved_steps=self.tracker.moved_steps.get(watched.path, 0),
            learning_rate=watched.setting("lr"),
            weight_decay=watched.setting("weight_decay"),
            group=watched.group_index,
            rms=math.sqrt(sums["squares"] / size),
            gradient_rms=math.sqrt(sums["gradient squares"] / size) if sums["gradients"] else math.nan,
            update_ratio=ratio,
            first_update_ratio=self._first_updates.get(watched.path, math.nan),
            optimizer_eps_share=sums["small"] / sums["moments"] if sums["moments"] else math.nan,
            unmoved_share=sums["kept"] / sums["held"] if sums["held"] else math.nan,
            rank_spread=spread[0],
            gradient_rank_spread=spread[1],
            is_scale_invariant=watched.path in recorder.invariant,
            cosine=sums["inner"] / math.sqrt(sums["squares"] * sums["gradient squares"]) if sums["inner"] else math.nan,
        )

    def _add(self, quantity: Quantity, path: str, step: int, value: float) -> None:
        length = _KEPT_OF_PARAMETERS if quantity == "parameter gradient" else _KEPT
        kept = self._series.setdefault((quantity, path), deque(maxlen=length))
        if kept and kept[-1][0] == step:
            kept[-1] = (step, value)
            if self._firsts[quantity, path][0] == step:
                self._firsts[quantity, path] = (step, value)
        elif not kept or kept[-1][0] < step:
            kept.append((step, value))
            self._firsts.setdefault((quantity, path), (step, value))


def _measured(reader: TableReader, recorder: StepRecorder) -> Iterator[tuple[Quantity, str, float]]:
    """The values that a report adds to the series of each norm, block and attention."""
    layout = recorder.layout
    medians, kurtoses, shares, largest = reader.summary()
    for index, site in enumerate(layout.sites):
        yield "input rms", site.path, medians[2 * index]
        yield "kurtosis", site.path, kurtoses[2 * index]
        yield "eps share", site.path, shares[2 * index]
        bits = headroom_bits(layout.dtypes[site.path][0], max(largest[2 * index], largest[2 * index + 1]))
        # Zeros alone have no headroom to speak of.
        if bits != math.inf:
            yield "headroom", site.path, bits
    first = 2 * len(layout.sites)
    for block in layout.blocks:
        yield "stream rms", block.path, medians[first + block.index]
    counted: Sequence[str] = [block.path for block in layout.blocks] or [site.path for site in layout.sites]
    for index, path in enumerate(counted):
        yield "activation gradient", path, reader.gradient(index)
    offsets = {site.path: site.spec.gain.offset for site in layout.sites}
    for parameter, line in zip(recorder.parameters, reader.tables["parameters"].tolist(), strict=True):
        sums = dict(zip(PARAMETER_SUMS, line, strict=True))
        if parameter.kind == "gain" and sums["elements"]:
            yield "gain mean", parameter.site, sums["sum"] / sums["elements"] + offsets.get(parameter.site, 0.0)
        if parameter.kind == "bias of a norm" and sums["elements"]:
            yield "bias rms", parameter.site, math.sqrt(sums["squares"] / sums["elements"])
    for index, attention in enumerate(layout.attentions):
        yield "logit bound", attention.parent, float(reader.tables["head peaks"][index, :, 0].max())
