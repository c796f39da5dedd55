"""What a watch knows so far, on the host: series over the steps, the last reading, and whether something broke."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from normkit.inspection.gauges import headroom_bits
from normkit.inspection.history import height, stands_out
from normkit.inspection.training import Parameter, Quantity, Series
from normkit.watching.batches import batch_series
from normkit.watching.gauging import PULSE, Gauging
from normkit.watching.loop import LOOP
from normkit.watching.motions import Motions
from normkit.watching.parameters import PARAMETER_SUMS, WatchedParameter
from normkit.watching.readings import Reading
from normkit.watching.tallies import named

# Of one gradient a parameter each step, a model of many layers would make a page of megabytes.
_KEPT, _KEPT_OF_PARAMETERS = 1024, 128
# A loss scaler begins at 2^16 and halves that at each overflow: after so many in a row it is not at fault.
_SKIPPED = 17


class Chronicle:
    """Series and the alarm.

    Attributes:
        reading: The tables of the last report, or None before the first.
        reports: How many there were.
        reason: What broke, or "" while nothing did.
        reason_step: At which step that was noticed.
        place: Path of the first place with NaN or infinity, or "".
        parameters: As the last report has them.
        tokens: That were seen so far, by this process.
        motions: What moves from step to step.
        skipped: Steps whose gradients were not finite and that no optimizer took, the newest thousand.
        broken: Parameters with NaN or infinity when the alarm was raised for such values.
    """

    def __init__(self) -> None:
        self.reading: Reading | None = None
        self.reports = 0
        self.reason, self.reason_step, self.place = "", -1, ""
        self.parameters: tuple[Parameter, ...] = ()
        self.broken: tuple[str, ...] = ()
        self._series: dict[tuple[Quantity, str], deque[tuple[int, float]]] = {}
        self._firsts: dict[tuple[Quantity, str], tuple[int, float]] = {}
        self._losses: deque[float] = deque(maxlen=128)
        self._overflows = 0
        self.skipped: deque[int] = deque(maxlen=_KEPT)
        self.tokens, self.motions = 0, Motions()
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

    def add_pulse(self, step: int, values: Tensor, gauging: Gauging) -> None:
        """Take in what was sent of one step, and raise the alarm if it must be."""
        pulse = named(values, PULSE)
        place, parameter = round(pulse["bad place"]), round(pulse["bad parameter"])
        self._overflows = self._overflows + 1 if parameter >= 0 else 0
        self.tokens += round(pulse["tokens"])
        for quantity, value in batch_series(pulse):
            self._add(quantity, "", step, value)
        # Of several processes the loss and the gradient's norm are known at the next report.
        if gauging.is_alone and (not math.isnan(pulse["loss"]) or place >= 0 or parameter >= 0):
            self._add("loss", "", step, pulse["loss"])
        norm = math.sqrt(pulse["squares"]) if pulse["squares"] >= 0 else math.nan
        if place < 0 <= parameter and self._overflows < _SKIPPED:
            if gauging.is_scaled:
                self.skipped.append(step)
            else:
                self._undecided.append((step, parameter, norm))
            return
        if gauging.is_alone:
            self._add("gradient norm", "", step, norm)
        if place >= 0:
            self._add_bad_place(step, place, gauging)
        elif parameter >= 0:
            self._add_bad_gradient(step, parameter, gauging)
        elif gauging.is_alone:
            self._judge_loss(step, pulse["loss"])

    def settle(self, gauging: Gauging, *, is_over: bool = False) -> None:
        """Decide of steps with gradients that are not finite whether an optimizer took them, or left them out.

        Args:
            gauging: What measures the run.
            is_over: No optimizer will take what it has not taken.
        """
        left = []
        for step, parameter, norm in self._undecided:
            has_stepped = gauging.loop.has_stepped(step)
            if has_stepped is False:
                self.skipped.append(step)
            elif has_stepped or is_over or not gauging.loop.can_tell:
                if gauging.is_alone:
                    self._add("gradient norm", "", step, norm)
                self._add_bad_gradient(step, parameter, gauging)
            else:
                left.append((step, parameter, norm))
        self._undecided = left

    def _add_bad_gradient(self, step: int, parameter: int, gauging: Gauging) -> None:
        path = gauging.parameters[parameter].path
        self._add("parameter gradient", path, step, math.nan)
        self._raise("non-finite gradients", step, path)

    def _add_bad_place(self, step: int, place: int, gauging: Gauging) -> None:
        path = gauging.plan.sentinels[gauging.plan.forward_order[place]]
        self._add("non-finite", path, step, math.nan)
        if self.reason == "non-finite gradients" and step <= self.reason_step:
            # Another process saw where it came from.
            self.reason = ""
        if not self.reason:
            self.broken = gauging.broken()
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
        """The first alarm stays: what follows it follows from it."""
        if not self.reason:
            self.reason, self.reason_step, self.place = reason, step, place

    def add_report(self, reading: Reading, gauging: Gauging) -> None:
        """Take in the tables of one measured step."""
        self.reading, self.reports = reading, self.reports + 1
        for quantity, path, value in _measured(reading, gauging):
            self._add(quantity, path, reading.step, value)
        self.motions.add_report(reading.step, gauging, reading.tables["rows"], reading.tables["row peaks"])
        window = len(reading.tables["steps"])
        self.add_steps(reading.tables, max(0, reading.step - window + 1), reading.step, gauging)
        updates = reading.tables["updates"][reading.step % window, :, :2]
        lines = (table.tolist() for table in (reading.tables["parameters"], updates, reading.tables["spreads"]))
        # Where nothing moved, the optimizer has not yet, or a scaler had it leave the step out.
        has_moved = bool(updates[:, 0].any())
        self.parameters = tuple(
            self._parameter(gauging, watched, dict(zip(PARAMETER_SUMS, sums, strict=True)), update, spread, has_moved)
            for watched, sums, update, spread in zip(gauging.parameters, *lines, strict=True)
        )
        for parameter in self.parameters:
            if not math.isnan(parameter.update_ratio):
                self._add("update ratio", parameter.path, reading.step, parameter.update_ratio)

    def add_steps(self, tables: Mapping[str, Tensor], first: int, last: int, gauging: Gauging) -> None:
        """Take in the lines of some steps, those left out that were taken in before.

        Args:
            tables: By name, with one line per step.
            first: The first step.
            last: The last one.
            gauging: What measured them.
        """
        window = len(tables["steps"])
        for step in range(max(first, self._last + 1, last - window + 1), last + 1):
            line, self._last = tables["steps"][step % window].tolist(), step
            if not line[0]:
                continue
            updates, ran = tables["updates"][step % window], tables["ran"][step % window]
            loop = named(tables["loop"][step % window], LOOP)
            for path, ratio in self.motions.add(step, gauging, updates, ran, line[2:], has_stepped=loop["used"] > 0):
                self._add("update ratio", path, step, ratio)
            for quantity, value in _of_loop(loop):
                self._add(quantity, "", step, value)
            self._add("learning rate", "", step, gauging.loop.rate_of(step))
            # What overflowed only because it was scaled is scaled down and tried again.
            if step in self.skipped:
                continue
            if not gauging.is_alone:
                self._add_common(step, line, float(tables["bad places"][step % window]), gauging)
            for index, (parameter, value) in enumerate(zip(gauging.parameters, line[2:], strict=True)):
                if value or index in gauging.unreduced:
                    self._gradient_steps[parameter.path] = self._gradient_steps.get(parameter.path, 0) + 1
                if value:
                    self._add("parameter gradient", parameter.path, step, math.sqrt(value))

    def _add_common(self, step: int, line: Sequence[float], bad: float, gauging: Gauging) -> None:
        """Take in what all processes say of one step."""
        loss, squares = line[1] / line[0], sum(line[2:])
        if math.isfinite(bad):
            self._add_bad_place(step, round(-bad), gauging)
        if not math.isnan(loss) or math.isfinite(bad) or math.isnan(squares):
            self._add("loss", "", step, loss)
        self._add("gradient norm", "", step, math.sqrt(squares))
        self._judge_loss(step, loss)

    def _parameter(
        self,
        gauging: Gauging,
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
        size = sums["elements"] or math.nan
        inner = sums["inner"] / math.sqrt(sums["squares"] * sums["gradient squares"]) if sums["inner"] else math.nan
        return Parameter(
            path=watched.path,
            kind=watched.kind,
            site=watched.site,
            block=watched.block,
            size=watched.tensor.numel(),
            dtype=str(watched.tensor.dtype).removeprefix("torch."),
            trained=watched.tensor.requires_grad and watched.group is not None,
            gradient_steps=self._gradient_steps.get(watched.path, 0),
            first_spread=self._first_spreads.setdefault(watched.path, _spread(sums))
            if watched.kind == "gain"
            else math.nan,
            moved_steps=self.motions.moved_steps.get(watched.path, 0),
            learning_rate=watched.setting("lr"),
            weight_decay=watched.setting("weight_decay"),
            rms=math.sqrt(sums["squares"] / size),
            gradient_rms=math.sqrt(sums["gradient squares"] / size) if sums["gradients"] else math.nan,
            update_ratio=ratio,
            first_update_ratio=self._first_updates.get(watched.path, math.nan),
            optimizer_eps_share=sums["small"] / sums["moments"] if sums["moments"] else math.nan,
            rank_spread=spread[0],
            gradient_rank_spread=spread[1],
            is_scale_invariant=watched.path in gauging.invariant,
            cosine=inner,
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


def _spread(sums: Mapping[str, float]) -> float:
    size = sums["elements"] or math.nan
    return math.sqrt(max(sums["squares"] / size - (sums["sum"] / size) ** 2, 0.0))


def _of_loop(loop: Mapping[str, float]) -> Iterator[tuple[Quantity, float]]:
    """What a step's gradients became, as far as it is known."""
    if loop["complete"] > 0 and math.isfinite(loop["used"]):
        yield "gradient kept", math.sqrt(loop["used"] / loop["complete"])
    if 0 < loop["used"] < math.inf:
        yield "gradient left", loop["left"] / loop["used"]
        if 0 < loop["moved"] < math.inf:
            yield "update cosine", loop["along"] / math.sqrt(loop["used"] * loop["moved"])


def _measured(reading: Reading, gauging: Gauging) -> Iterator[tuple[Quantity, str, float]]:
    """What a report says of each norm, block and attention, for its series."""
    plan = gauging.plan
    medians, kurtoses, shares, largest = reading.summary()
    for index, site in enumerate(plan.sites):
        yield "input rms", site.path, medians[2 * index]
        yield "kurtosis", site.path, kurtoses[2 * index]
        yield "eps share", site.path, shares[2 * index]
        bits = headroom_bits(gauging.dtypes[index], max(largest[2 * index], largest[2 * index + 1]))
        # Where nothing but zeros passed there is none to speak of.
        if bits != math.inf:
            yield "headroom", site.path, bits
    first = 2 * len(plan.sites)
    for block in plan.blocks:
        yield "stream rms", block.path, medians[first + block.index]
    tapped: Sequence[str] = [block.path for block in plan.blocks] or [site.path for site in plan.sites]
    for index, path in enumerate(tapped):
        yield "activation gradient", path, reading.gradient(index)
    offsets = {site.path: site.spec.weight_offset for site in plan.sites}
    for parameter, line in zip(gauging.parameters, reading.tables["parameters"].tolist(), strict=True):
        sums = dict(zip(PARAMETER_SUMS, line, strict=True))
        if parameter.kind == "gain" and sums["elements"]:
            yield "gain mean", parameter.site, sums["sum"] / sums["elements"] + offsets[parameter.site]
        if parameter.kind == "bias of a norm" and sums["elements"]:
            yield "bias rms", parameter.site, math.sqrt(sums["squares"] / sums["elements"])
    for index, attention in enumerate(plan.attentions):
        yield "logit bound", attention.parent, float(reading.tables["head peaks"][index, :, 0].max())
