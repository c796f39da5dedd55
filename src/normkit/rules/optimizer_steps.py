"""Group F, the run: spikes, gradients at its end, updates beside the weights, the optimizer's eps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from normkit.measurement.history import (
    FAR_IN_FIRST_STEPS,
    FAR_TOO_LARGE,
    FIRST_STEPS,
    GAIN_LIMIT,
    LIMIT,
    MANY_STEPS,
    MEDIAN_LIMIT,
    STAYS,
    WEIGHT_LIMIT,
    Jump,
    judged_ratios,
    jumps,
    movers,
    too_large,
    update_sizes,
)
from normkit.measurement.training import Quantity, Training
from normkit.rules.facts import Facts
from normkit.rules.rule import (
    CAUSES,
    NO_TRAINING,
    Case,
    Hit,
    NotChecked,
    Outcome,
    Rule,
    evidence_lines,
    hit,
    measured,
    of_a_run,
)
from normkit.text import counted, percent

_OFTEN = 5
_LONG_RUN, _RISES, _FALLS = 128, 1.5, 0.5
_NEARLY_ALL, _OF_GROUP = 0.9, "nearly all that is past a limit is its own, so its learning rate is the one to lower"
_EPS_SHARE, _EPS_TENSORS, _SETTLED = 0.2, 0.25, 16


@Rule(
    id="F5",
    title="The loss or the gradient spikes",
    severity="error",
    threshold=(
        f"a value above its last 128 by z > {LIMIT:g} (median and MAD; of a loss also its last 32 by z > 8) and by "
        "at least 1.2 times (loss) or 3 times (gradient norm) (warning); a loss that stays there for "
        f"{STAYS} steps, or is not finite (error)"
    ),
    source=(
        "6 deviations over 128 steps: OLMo-core; updates that double before the loss: marin#1368; "
        "healthy runs of the demo models reach z = 5.1 and 4.7"
    ),
    why=(
        "One batch undoes part of the training, and with Adam its trace stays in the moments for many steps. The "
        "quantity that moved first tells a bad batch (loss and all gradients in one step) from a step that was too "
        "large (an update, a weight or an attention some steps earlier)."
    ),
    remedy=(
        "look at what moved first, and at the batch of that step",
        "clip the gradient at about twice its usual norm; where the loop clips already, lower its limit to that",
        "lower the learning rate, or lengthen its warm-up",
    ),
    confirm="run again from a checkpoint before it: the same batch, with the change, and no spike",
    follows=("B5", "C7", "E3", "F1", "F11", "F12", *CAUSES),
    looks_at=("run",),
)
@of_a_run(NO_TRAINING)
def spikes(_facts: Facts, training: Training) -> Outcome:
    """NaN first; then jumps of the loss and of the gradient norm, with what moved before them."""
    names: tuple[Quantity, ...] = ("loss", "gradient norm")
    lines = []
    for name in names:
        if steps := [step for step, value in measured(training, name) if not math.isfinite(value)]:
            lines.append(f"the {name} is NaN or infinite in {counted(len(steps), 'step')}, first in step {steps[0]}")
    if lines:
        return Hit(
            severity="note" if training.has_skipped else "error",
            sites=(),
            measured=lines[0] + (", and these steps were skipped" if training.has_skipped else ""),
            evidence=tuple(lines),
        )
    found = [jump for name in names for series in training.of(name) for jump in jumps(series)]
    if not found:
        if not (skipped := training.skipped):
            return None
        line = f"{counted(len(skipped), 'step')} with NaN or infinite gradients, first step {skipped[0]}, taken by no "
        return Hit(severity="note", sites=(), measured=f"{line}optimizer", evidence=(f"{line}optimizer",))
    found.sort(key=lambda jump: (jump.step, jump.series.quantity != "loss"))
    earliest = movers(training, found[0].step)
    # A quantity that passes its limit in the step of the spike moved with everything else.
    first = earliest[0] if earliest and earliest[0].step < found[0].step else found[0]
    lines = [_jump_line(jump) for jump in found]
    if first.series.path:
        lines.insert(0, f"first to move: {_jump_line(first)}")
    stays = any(jump.series.quantity == "loss" and jump.length >= STAYS for jump in found)
    largest = max(found, key=lambda jump: jump.z)
    return Hit(
        severity="error" if stays else "warning",
        sites=(first.series.path,) if first.series.path else (),
        measured=f"{counted(len(found), 'spike')}, the largest: {_jump_line(largest)}",
        evidence=evidence_lines(lines, "spike"),
    )


def _jump_line(jump: Jump) -> str:
    where = f" of {jump.series.path}" if jump.series.path else ""
    return (
        f"{jump.series.quantity}{where} {jump.value:.3g} in step {jump.peak}, {jump.factor:.3g} times its usual "
        f"{jump.usual:.3g} (z = {jump.z:.1f})"
    )


@Rule(
    id="F6",
    title="The gradient norm rises as the learning rate falls",
    severity="note",
    threshold=f"last eighth of a run {_RISES:g} times above the lowest, updates halved, loss no higher (note)",
    source="Defazio 2025, arXiv:2506.02285 (AdamC)",
    why=(
        "Expected, and no fault: before a norm the gradient grows as weights shrink, and with weight decay their "
        "length settles where |g| / |w| follows 1 / sqrt(learning rate)."
    ),
    remedy=("nothing, or scale the weight decay with the learning rate (AdamC)",),
    confirm="the product of gradient norm and sqrt(learning rate) stays level",
    looks_at=("run",),
)
@of_a_run()
def rising_gradient(_facts: Facts, training: Training) -> Outcome:
    """Late in a schedule: smaller steps, larger gradients, no worse loss."""

    def eighths(name: Quantity) -> list[float]:
        # Medians of the eight parts of a long series of the whole model; NaN or infinity leaves none.
        for series in training.of(name):
            part = len(series.values) // 8
            if not series.path and len(series.values) >= _LONG_RUN and all(map(math.isfinite, series.values)):
                return [median(series.values[index * part : (index + 1) * part]) for index in range(8)]
        return []

    norms, losses = eighths("gradient norm"), eighths("loss")
    sizes = [update.median_weight for update in update_sizes(training) if not math.isnan(update.median_weight)]
    if not norms or not losses or len(sizes) < 8:
        return NotChecked(f"a run of fewer than {_LONG_RUN} steps, or updates measured too seldom")
    rise = norms[-1] / min(norms[4:])
    if rise < _RISES or not 0 < sizes[-1] <= _FALLS * max(sizes) or losses[-1] > 1.02 * min(losses):
        return None
    return Hit(
        severity="note",
        sites=(),
        measured=f"the gradient norm rose {rise:.3g} times, the updates shrank {max(sizes) / sizes[-1]:.3g} times",
        evidence=(
            f"median gradient norm of the last eighth of the run: {norms[-1]:.3g}, lowest before: {min(norms[4:]):.3g}",
            f"median loss of the last eighth: {losses[-1]:.3g}, lowest of any eighth: {min(losses):.3g}",
        ),
    )


@Rule(
    id="F8",
    title="The optimizer's eps outweighs gradients",
    severity="warning",
    threshold=(
        f"in more than {percent(_EPS_TENSORS)} of the weights, Adam's sqrt(v) below ten times eps for more than "
        f"{percent(_EPS_SHARE)} of the elements"
    ),
    source="Wortsman et al. 2023, arXiv:2309.14322",
    why=(
        "Adam's step is m / (sqrt(v) + eps), made to be as large for small gradients as for large ones. Where eps "
        "is no longer small beside sqrt(v), these elements hardly move, whatever the learning rate."
    ),
    remedy=("lower the optimizer's eps, to 1e-15 in float32", "look for what makes the gradients so small"),
    confirm="with the lower eps the update ratio of these weights rises to that of the others",
    follows=("B5", "F4", "F11", "F12", *CAUSES),
    looks_at=("run",),
)
@of_a_run()
def dominant_optimizer_eps(_facts: Facts, training: Training) -> Outcome:
    """Adam divides by sqrt(v) + eps: where eps is not small beside sqrt(v), the step is no longer scaled."""
    weights = [
        each
        for each in training.parameters
        # Rare tokens, and biases that softmax cancels, rightly have a gradient of 0.
        if each.kind == "weight" and not math.isnan(each.optimizer_eps_share) and each.gradient_steps >= _SETTLED
    ]
    if not weights:
        return NotChecked(f"no weight was trained for {_SETTLED} steps by an optimizer with an eps")
    cases = [
        Case(
            each.path,
            "warning",
            f"for {percent(each.optimizer_eps_share)} of its elements the gradient's rms is below ten times the eps; "
            f"last gradient rms {each.gradient_rms:.2g}",
            each.optimizer_eps_share,
        )
        for each in sorted(weights, key=lambda each: -each.optimizer_eps_share)
        if each.optimizer_eps_share > _EPS_SHARE
    ]
    if len(cases) <= _EPS_TENSORS * len(weights):
        return None
    return hit(cases, f"the optimizer's eps counts in {len(cases)} of {counted(len(weights), 'weight')}", "weight")


@Rule(
    id="F11",
    title="Updates are too large beside the weights",
    severity="error",
    threshold=(
        f"rms of one step's change over the parameter's own above {percent(MEDIAN_LIMIT)} for the median weight, "
        f"{percent(WEIGHT_LIMIT)} for one weight or {percent(GAIN_LIMIT)} for one gain, in {MANY_STEPS} "
        f"steps (of Adam, where the loss falls, after the first {FIRST_STEPS}) or by {FAR_TOO_LARGE:g} times "
        f"(warning); by {FAR_TOO_LARGE:g} times after the first {FIRST_STEPS} steps or in {MANY_STEPS} of them, by "
        f"{FAR_IN_FIRST_STEPS:g} times, or most of the measured steps (error)"
    ),
    source=(
        "measured on the demo models: at most 2.5 %, 5.9 % and 0.3 % with their recipe, 5 to 10 %, 21 % and 19 to "
        "28 % at 30 times its rate, where attention logits reach 1e4 (Wortsman et al. 2023, arXiv:2309.14322)"
    ),
    why=(
        "A step that replaces a noticeable part of a weight is no longer small: the gradient that it follows does "
        "not hold at the new weights. The loss may look calm for a while, as weights, streams and logits grow until "
        "the ratio is small again; but they stay as large as they have become."
    ),
    remedy=(
        "lower the learning rate by the factor that is too large",
        "lengthen the warm-up, if it is the first steps alone",
    ),
    confirm="the update ratio at the same steps of a new run is below the threshold",
    follows=("B5", "B7", "B8", "B9", "F10", "F12", *CAUSES),
    looks_at=("run",),
)
@of_a_run()
def large_updates(_facts: Facts, training: Training) -> Outcome:
    """The largest step, and where."""
    seen = update_sizes(training)
    if not seen:
        return NotChecked("no optimizer step was measured")
    large = too_large(training)
    if not large:
        return None
    worst = max(large, key=lambda update: update.excess)
    far = [update for update in large if update.excess > FAR_TOO_LARGE]
    is_far = len(far) >= MANY_STEPS or any(
        update.step >= FIRST_STEPS or update.excess > FAR_IN_FIRST_STEPS for update in far
    )
    # The quantity that is furthest past its limit, and that limit.
    place, ratio, limit = max(worst.ratios, key=lambda each: each[1] / each[2])
    past = f"{place} by {percent(ratio)}, {ratio / limit:.2g} times the limit of {percent(limit)}"
    group = _group(training, [update.step for update in large])
    return Hit(
        severity="error" if is_far or _OFTEN <= len(large) > len(seen) / 2 else "warning",
        sites=tuple(dict.fromkeys(update.place for update in sorted(large, key=lambda update: -update.excess)))[:6],
        measured=f"step {worst.step} changed {past}" + (f"; {group}" if group else ""),
        evidence=(
            f"step {worst.step} changed {worst}",
            f"{len(large):,} of {counted(len(seen), 'measured step')} past a limit, "
            f"the first of them step {large[0].step}",
            *([f"{group}: {_OF_GROUP}"] if group else []),
        ),
    )


def _group(training: Training, steps: Sequence[int]) -> str:
    """The group of parameters in which nearly all of these steps' excess lies, in words; "" where there is but one."""
    excess: dict[int, float] = defaultdict(float)
    for parameter, step, ratio in judged_ratios(training):
        limit = GAIN_LIMIT if parameter.kind == "gain" else MEDIAN_LIMIT
        if step in steps and ratio > limit:
            excess[parameter.group] += ratio / limit - 1
    groups = {each.group for each in training.parameters if each.group >= 0}
    index, most = max(excess.items(), key=lambda pair: pair[1], default=(-1, 0.0))
    if index < 0 or len(groups) < 2 or most < _NEARLY_ALL * sum(excess.values()):
        return ""
    held = [each for each in training.parameters if each.group == index]
    rate = f"lr {held[0].learning_rate:.3g}, " if math.isfinite(held[0].learning_rate) else ""
    return f"group {index + 1} of {max(groups) + 1}, {rate}{counted(len(held), 'parameter')}"


RULES = (spikes, rising_gradient, dominant_optimizer_eps, large_updates)
"""The rules of this file."""
