"""Group F, the steps: small inputs, weights before a norm, gradients that are not cleared, wrong or missing updates."""

from __future__ import annotations

import math
from statistics import median

from normkit.measurement.training import Quantity, Training
from normkit.rules.epsilon import wrong_eps
from normkit.rules.facts import Facts
from normkit.rules.rule import (
    CAUSES,
    NO_TRAINING,
    Case,
    Hit,
    NotChecked,
    Outcome,
    Rule,
    hit,
    measured,
    of_a_run,
)
from normkit.rules.scale import HALF
from normkit.text import counted, percent

_FEWEST = 8
_LEFT, _UPHILL = 0.5, 0.3
_STILL = 1e-6
_CUT = 0.01
_SHORT_ROWS = 0.01
_NOT_ORTHOGONAL = 0.01


def _finite(training: Training, quantity: Quantity) -> list[float]:
    """The finite values of a quantity."""
    return [value for _, value in measured(training, quantity) if math.isfinite(value)]


@Rule(
    id="F9",
    title="A norm's input is too small for its eps",
    severity="error",
    threshold=(
        f"more than {percent(_SHORT_ROWS)} of the rows keep less than 99 % of their length (note), more of them "
        f"than when the run began (warning), {percent(_SHORT_ROWS)} less than 90 % (error)"
    ),
    source="the eps family: meta-llama/llama#771, pytorch/torchtune#290",
    why=(
        "The stream or the branch shrinks towards eps. There the norm no longer gives all rows one length: short rows "
        "stay too short, and their gradient no longer grows as they shrink, so nothing brings them back."
    ),
    remedy=(
        "a smaller eps, below 1 % of the input's mean square",
        "look for what shrinks the input: weight decay on embeddings, a gain near 0 before it",
    ),
    confirm="the eps share at this norm falls back below 1 % in the next reports",
    follows=("A1", "B7"),
)
@of_a_run(NO_TRAINING)
def small_inputs(facts: Facts, training: Training) -> Outcome:
    """Rows that eps shortens by more than 1 %: more of them than when the run began."""
    shares = {series.path: series.values for series in training.of("eps share") if series.values}
    if not shares:
        return NotChecked("the inputs of the norms were not measured")
    # If eps itself is wrong or dominates, A1 reports it.
    outcome = wrong_eps.check(facts)
    known = outcome.sites if isinstance(outcome, Hit) else ()
    cases: list[Case] = []
    for site in facts.sites:
        share = shares.get(site.path, (0.0,))
        first, last, far = share[0], share[-1], site.attenuation.share_below_90
        if site.path in known or not last > _SHORT_ROWS:
            continue
        words = (
            f"its eps shortens {percent(last)} of the rows by more than 1 %, {percent(first)} when it "
            f"began; median input rms {site.input.rms_median:.3g}"
        )
        if not last > first + _SHORT_ROWS:
            # Small embeddings and branches start like this, and training lengthens them.
            cases.append(Case(site.path, "note", words))
        elif far > _SHORT_ROWS:
            cases.append(Case(site.path, "error", f"{words}, {percent(far)} of the rows by more than 10 %"))
        else:
            cases.append(Case(site.path, "warning", words))
    largest = max((shares[case.path][-1] for case in cases), default=0.0)
    return hit(cases, f"eps shortens up to {percent(largest)} of the rows at {counted(len(cases), 'norm')}")


@Rule(
    id="F10",
    title="A weight's length matters although a norm follows",
    severity="warning",
    threshold=f"cosine between a weight verified scale invariant and its gradient beyond {_NOT_ORTHOGONAL:g}",
    source="van Laarhoven 2017, arXiv:1706.05350",
    why=(
        "A norm forgets the length of the weight before it, so the gradient has no part along that weight. If it "
        "has one, the norm is bypassed, its eps has an effect by now, or its backward pass is wrong."
    ),
    remedy=(
        "compare the norm's gradient with autograd of nk.normalize in float64",
        "look at the eps share of the norm behind it: raise the weights or lower eps",
    ),
    confirm="double the weight: the model's output stays the same, and the cosine is 0",
    follows=("A1", "F9"),
    looks_at=("run",),
)
@of_a_run()
def not_orthogonal(_facts: Facts, training: Training) -> Outcome:
    """If f(c w) = f(w), the gradient at w has no part along w."""
    invariant = [each for each in training.parameters if each.is_scale_invariant and not math.isnan(each.cosine)]
    if not invariant:
        return NotChecked("no weight was verified to be scale invariant")
    wrong = [each for each in invariant if abs(each.cosine) > _NOT_ORTHOGONAL]
    if not wrong:
        return None
    wrong.sort(key=lambda each: -abs(each.cosine))
    cases = [
        Case(each.path, "warning", f"cosine {each.cosine:.2g}, rms {each.rms:.2g}", abs(each.cosine)) for each in wrong
    ]
    first = wrong[0]
    return hit(
        cases, f"cosine {first.cosine:.2g} between {first.path} and its gradient, 0 where a norm follows", "weight"
    )


@Rule(
    id="F23",
    title="Gradients are not cleared",
    severity="error",
    threshold=(
        f"more than {percent(_LEFT)} of the gradients that an optimizer used still exist when the next backward pass "
        "begins, in half of the steps or more (error)"
    ),
    source="a step follows its own batch's gradient: Bottou et al. 2018, arXiv:1606.04838; torch adds to .grad",
    why=(
        "Each step then follows the sum of all gradients so far, as with a momentum of 1: it grows from step to "
        "step, as it does with a learning rate that is too high."
    ),
    remedy=("call optimizer.zero_grad() once between two steps", "see that it clears the parameters of all groups"),
    confirm="parameter.grad is None, or zeros, before loss.backward()",
    looks_at=("run",),
)
@of_a_run()
def uncleared_gradients(_facts: Facts, training: Training) -> Outcome:
    """Gradients that an optimizer has used and that still exist at the next backward pass."""
    left = measured(training, "gradient left")
    if len(left) < 2:
        return NotChecked("too few optimizer steps were seen: give the optimizer to nk.watch")
    # No backward pass follows the last step.
    kept = [step for step, share in left[:-1] if share > _LEFT]
    if len(kept) < min(_FEWEST, len(left) - 1) or 2 * len(kept) < len(left) - 1:
        return None
    norms = dict(measured(training, "gradient norm"))
    ends = [norms[step] for step in (kept[0], kept[-1]) if math.isfinite(norms.get(step, math.nan))]
    grown = f"; the gradient norm went from {ends[0]:.3g} to {ends[1]:.3g}" if len(ends) == 2 else ""
    return Hit(
        severity="error",
        sites=(),
        measured=f"gradients were not cleared in {len(kept):,} of {counted(len(left) - 1, 'step')}: they add up",
        evidence=(
            f"from step {kept[0]} on, the gradients that the optimizer had used still existed when the next "
            f"backward pass began, which adds to them{grown}",
        ),
    )


@Rule(
    id="F24",
    title="Updates go up the gradient",
    severity="error",
    threshold=f"median cosine between updates and gradients above {_UPHILL:g} over {_FEWEST} steps or more (error)",
    source="a step of descent has an inner product below 0 with the gradient: Bottou et al. 2018, arXiv:1606.04838",
    why="The loss rises as fast as it should fall: the sign of the update is wrong.",
    remedy=("set maximize=False", "look for a loss or a learning rate with the wrong sign"),
    confirm="after one small step on the same batch the loss is lower",
    looks_at=("run",),
)
@of_a_run()
def uphill_updates(_facts: Facts, training: Training) -> Outcome:
    """The cosine between updates and gradients: descent has it below 0."""
    cosines = _finite(training, "update cosine")
    if len(cosines) < _FEWEST:
        return NotChecked(f"fewer than {_FEWEST} optimizer steps were seen")
    if (usual := median(cosines)) <= _UPHILL:
        return None
    losses = _finite(training, "loss")
    rise = f"; the loss went from {losses[0]:.3g} to {losses[-1]:.3g}" if losses else ""
    return Hit(
        severity="error",
        sites=(),
        measured=f"gradient ascent: the cosine between updates and gradients is {usual:.2g}, below 0 in a descent",
        evidence=(f"median of {len(cosines)} steps: {usual:.2g}, from {min(cosines):.2g} to {max(cosines):.2g}{rise}",),
    )


@Rule(
    id="F25",
    title="The model does not move",
    severity="error",
    threshold=f"no step of {_FEWEST} or more changes the median weight by {_STILL:g} of its length (error)",
    source="a healthy step changes a weight by a thousandth or so; gains that stay 1 in bfloat16: flame #47",
    why="There are gradients and no updates: nothing is learnt, however long the run is.",
    remedy=(
        "see what sets the learning rate in each step: a scheduler that is stepped once an epoch starts at 0",
        "compare the limit of clipping with the gradient norm",
        "keep the weights, or a copy of them for the optimizer, in float32",
    ),
    confirm="the update ratio of the next steps is near 0.001",
    looks_at=("run",),
    follows=CAUSES,
)
@of_a_run()
def no_updates(_facts: Facts, training: Training) -> Outcome:
    """No step moves the median weight by a millionth of its length, though there are gradients."""
    moves = [value for series in training.of("update ratio") if not series.path for value in series.values]
    if len(moves) < _FEWEST:
        return NotChecked(f"fewer than {_FEWEST} optimizer steps were measured")
    if max(moves) >= _STILL:
        return None
    kept = [value for _, value in measured(training, "gradient kept")]
    if max(_finite(training, "learning rate"), default=1.0) == 0:
        reason = "the learning rate is 0"
    elif kept and median(kept) < _CUT:
        reason = f"clipping leaves {median(kept):.2g} of the gradient"
    elif sum(each.dtype in HALF for each in training.parameters) > len(training.parameters) / 2:
        reason = "updates are lost in the rounding of 16-bit weights"
    else:
        reason = "the updates are too small beside the weights"
    how = f"moved by at most {max(moves):.2g} of its length in a step" if max(moves) > 0 else "did not move at all"
    names: tuple[Quantity, ...] = ("learning rate", "gradient norm", "gradient kept")
    circumstances = [(name, values) for name in names if (values := _finite(training, name))]
    return Hit(
        severity="error",
        sites=(),
        measured=f"in {counted(len(moves), 'step')} the median weight {how}: {reason}",
        evidence=tuple(f"{name}: {min(values):.3g} to {max(values):.3g}" for name, values in circumstances),
    )


RULES = (small_inputs, not_orthogonal, uncleared_gradients, uphill_updates, no_updates)
"""The rules of this file."""
