"""The beginning of a break: an action on the run, else the first quantity that left its past range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from normkit.measurement.history import FAR_TOO_LARGE, STAYS, Jump, UpdateSize, jumps, movers, too_large, update_sizes
from normkit.measurement.training import Origin, OriginKind, Quantity, Training
from normkit.rules.data import grave
from normkit.rules.interventions import in_words

EXPLODED_LOGITS = 1e3
"""Logits of this size have exploded in the sense of rule F1: ten times what Megatron-LM and Kimi K2 clip at."""

# A learning rate that rises so many times from one step to the next, and breaks the run within so many steps.
_RATE_RISE, _AFTER_RISE = 4.0, 32
# A spike counts if it explains at least half as much as the one that explains most.
_AS_MUCH = 0.5
# A rise within so many steps before a value that is not finite counts as its cause.
_BEFORE = 32

_KINDS: dict[Quantity, OriginKind] = {
    "logit bound": "attention logits",
    "stream rms": "stream",
    "loss": "loss",
    "activation gradient": "gradient",
    "gradient norm": "gradient",
    "parameter gradient": "gradient",
    "update ratio": "update",
}


def origin(training: Training) -> Origin | None:
    """The step and the place where a run began to break, or None where nothing moved.

    What was done to the run counts first, if it came before the break: wrong data, a parameter that was changed by no
    optimizer, a norm or block that stopped, a learning rate that rose at once. Then, in this order: a value that is not
    finite, or a rise in the 32 steps before it; an update that was too large or an attention that exploded; a jump of
    the loss or the gradient norm, or a rise before that. A blip that was over long before, and explains less than a
    later jump, began nothing.
    """
    moved, until = _moved(training)
    done = [each for each in _done(training) if each.step <= until]
    if moved is not None and (rise := rate_rise(training, moved.step)) is not None:
        done.append(rise)
    return min(done, key=lambda each: each.step, default=moved)


def _moved(training: Training) -> tuple[Origin | None, float]:
    """The first quantity that left its past range, and the last step in which its cause may have come."""
    # In one step the forward pass comes before the loss, and that before the backward pass.
    broken = min(_not_finite(training), key=lambda each: each.step, default=None)
    # An update that was too large or an attention that exploded, measured by a limit and not by the past.
    excess = [
        Origin(kind="update", step=update.step, path=update.place, detail=f"one step changed {update}")
        for update in _worst_stretch(training)[:1]
    ]
    for series in training.of("logit bound"):
        first = next((pair for pair in series.pairs() if EXPLODED_LOGITS < pair[1] < math.inf), None)
        if first is not None:
            detail = f"attention logits may reach {first[1]:.4g}, beyond {EXPLODED_LOGITS:g}"
            excess.append(Origin(kind="attention logits", step=first[0], path=series.path, detail=detail))
    slow = min(excess, key=lambda each: each.step, default=None)
    if broken is not None:
        causes = [_of_jump(jump) for jump in movers(training, broken.step, _BEFORE) if jump.step < broken.step]
        if slow is not None and slow.step < broken.step:
            causes.append(slow)
        cause = min(causes, key=lambda each: each.step, default=None)
        if cause is None:
            return broken, broken.step
        where = f" at {broken.path}" if broken.path else ""
        detail = f"{cause.detail}; the first value that is not finite came in step {broken.step}{where}"
        return replace(cause, detail=detail), broken.step
    spikes = [jump for series in (*training.of("loss"), *training.of("gradient norm")) for jump in jumps(series)]
    most = max((jump.weight for jump in spikes), default=0.0)
    spike = min((jump for jump in spikes if jump.weight >= _AS_MUCH * most), key=lambda jump: jump.step, default=None)
    far = max(_worst_stretch(training), key=lambda update: update.excess, default=None)
    is_far = far is not None and far.excess > FAR_TOO_LARGE
    # Steps that are far too large count for more than a loss that comes back by itself.
    if spike is None or (is_far and not any(jump.length >= STAYS for jump in spikes if jump.series.quantity == "loss")):
        return slow, far.step if far is not None and is_far else math.inf
    mover = next(iter(movers(training, spike.step)), spike)
    if slow is not None and slow.step <= mover.began:
        return slow, spike.last
    # A bad batch moves everything at once: then the jump of the loss is named. Among many series one always rises a
    # little earlier by chance.
    return _of_jump(spike if mover.step == spike.step else mover), spike.last


def _done(training: Training) -> Iterator[Origin]:
    """The actions on the run, whether or not a break followed."""
    for flaw in grave(training):
        yield Origin(kind="input data", step=flaw.step, path="", detail=flaw.measured)
    sites = {parameter.path: parameter.site for parameter in training.parameters}
    largest = sorted(training.changes, key=lambda change: (change.step, not sites.get(change.path), -change.ratio))
    for change in largest[:1] if training.optimizers else ():
        path = sites.get(change.path) or change.path
        yield Origin(kind="parameter", step=change.step, path=path, detail=f"{in_words(change)}, by no optimizer")
    for stop in sorted(training.stopped, key=lambda stop: stop.step):
        if stop.kind != "gradient":
            detail = f"it ran in {stop.before} measured steps, and in none of the {stop.since} from here on"
            yield Origin(kind=stop.kind, step=stop.step, path=stop.path, detail=detail)


def rate_rise(training: Training, step: int) -> Origin | None:
    """The largest rise of the learning rate from one step to the next, in the steps before one; None without any."""
    found = []
    for series in training.of("learning rate"):
        for (_, before), (when, after) in itertools.pairwise(series.pairs()):
            if before > 0 and after >= _RATE_RISE * before and step - _AFTER_RISE <= when <= step + 1:
                found.append((after / before, when, before, after))
    if not found:
        return None
    factor, when, before, after = max(found)
    detail = f"the learning rate rose from {before:.3g} to {after:.3g} at once, {factor:.3g} times"
    return Origin(kind="learning rate", step=when, path="", detail=detail)


def _of_jump(jump: Jump) -> Origin:
    return Origin(
        kind=_KINDS[jump.series.quantity],
        step=jump.began,
        path=jump.series.path,
        detail=(
            f"the {jump.series.quantity} rose from a usual {jump.usual:.3g} to {jump.value:.3g} in step {jump.peak}, "
            f"{jump.factor:.3g} times as much and {jump.z:.1f} robust standard deviations above its past"
        ),
    )


def _worst_stretch(training: Training) -> list[UpdateSize]:
    """Among the stretches of consecutive steps that were too large, the one with the largest step."""
    stretches: list[list[UpdateSize]] = [[]]
    large = set(too_large(training))
    for update in update_sizes(training):
        if update in large:
            stretches[-1].append(update)
        elif stretches[-1]:
            stretches.append([])
    return max(stretches, key=lambda stretch: max((update.excess for update in stretch), default=0.0))


def _not_finite(training: Training) -> Iterator[Origin]:
    """The first place in forward order, the first loss, and the first gradient that was NaN or infinite."""
    places = [
        (step, order, series.path, value)
        for order, series in enumerate(training.of("non-finite"))
        for step, value in series.pairs()
        if value != 0
    ]
    if places:
        step, _, path, value = min(places, key=lambda place: place[:2])
        counted = "NaN or infinity" if math.isnan(value) else f"{value:.0f} elements that are NaN or infinite"
        detail = f"{counted} in step {step}, here first in forward order"
        if training.broken:
            more = f" and {len(training.broken) - 1} parameters more" if len(training.broken) > 1 else ""
            detail += f"; {training.broken[0]}{more} held some already"
        yield Origin(kind="non-finite in the forward pass", step=step, path=path, detail=detail)
    losses = [pair for series in training.of("loss") for pair in series.pairs() if not math.isfinite(pair[1])]
    for step, value in losses[:1]:
        detail = f"the loss was {value}, and no norm had seen NaN or infinity"
        yield Origin(kind="non-finite loss", step=step, path="", detail=detail)
    lost = [
        (step, series.path)
        for series in (*training.of("parameter gradient"), *training.of("gradient norm"))
        for step, value in series.pairs()
        if not math.isfinite(value)
    ]
    if lost:
        step = min(step for step, _ in lost)
        # The last block in forward order, as the way back begins there; a gradient that no step has shown is one of a
        # frozen part.
        blocks = [
            series.path
            for series in training.of("activation gradient")
            if any(math.isfinite(value) for value in series.values)
            and any(when == step and not math.isfinite(value) for when, value in series.pairs())
        ]
        parameters = [path for when, path in lost if when == step and path]
        path = blocks[-1] if blocks else parameters[-1] if parameters else ""
        detail = f"the gradient was NaN or infinite in step {step}" + (", here first on the way back" if path else "")
        yield Origin(kind="non-finite in the backward pass", step=step, path=path, detail=detail)
