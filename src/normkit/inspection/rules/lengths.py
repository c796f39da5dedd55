"""Group F, lengths: norms whose input shrinks towards their eps, and weights whose length should not matter."""

from __future__ import annotations

import math

from normkit.inspection.rules import formula
from normkit.inspection.rules.case import Case, hit
from normkit.inspection.rules.rule import NO_RUN, NO_TRAINING, Facts, Hit, NotChecked, Outcome, Rule
from normkit.text import counted, percent

_SHORT_ROWS = 0.01
_NOT_ORTHOGONAL = 0.01


def _input_too_small(facts: Facts) -> Outcome:
    """Rows that eps shortens by more than 1 %: more of them than when the run began."""
    if facts.training is None:
        return NO_TRAINING
    shares = {series.path: series.values for series in facts.training.of("eps share") if series.values}
    if not shares:
        return NotChecked("what enters the norms was not measured")
    # Where eps itself is wrong or dominates, that is the finding.
    outcome = next(rule for rule in formula.RULES if rule.id == "A1").check(facts)
    known = outcome.sites if isinstance(outcome, Hit) else ()
    cases: list[Case] = []
    for site in facts.sites:
        first, last = shares.get(site.path, (0.0,))[0], shares.get(site.path, (0.0,))[-1]
        if site.path in known or not last > _SHORT_ROWS:
            continue
        line = (
            f"{site.path}: its eps shortens {percent(last)} of the rows by more than 1 %, {percent(first)} when it "
            f"began; median input rms {site.input.rms_median:.3g}"
        )
        far = site.attenuation.share_below_90
        if not last > first + _SHORT_ROWS:
            # Small embeddings and branches start so, and training lengthens them.
            cases.append(Case(site.path, "note", 0.0, line))
        elif far > _SHORT_ROWS:
            cases.append(Case(site.path, "error", 0.0, f"{line}, {percent(far)} of the rows by more than 10 %"))
        else:
            cases.append(Case(site.path, "warning", 0.0, line))
    largest = max((shares[case.path][-1] for case in cases), default=0.0)
    return hit(cases, f"eps shortens up to {percent(largest)} of the rows at {counted(len(cases), 'norm')}")


def _not_orthogonal(facts: Facts) -> Outcome:
    """If f(c w) = f(w), the gradient at w has no part along w."""
    if facts.training is None:
        return NO_RUN
    invariant = [each for each in facts.training.parameters if each.is_scale_invariant and not math.isnan(each.cosine)]
    if not invariant:
        return NotChecked("no weight was verified to be scale invariant")
    wrong = [each for each in invariant if abs(each.cosine) > _NOT_ORTHOGONAL]
    if not wrong:
        return None
    wrong.sort(key=lambda each: -abs(each.cosine))
    cases = [
        Case(each.path, "warning", abs(each.cosine), f"{each.path}: cosine {each.cosine:.2g}, rms {each.rms:.2g}")
        for each in wrong
    ]
    measured = f"cosine {wrong[0].cosine:.2g} between {wrong[0].path} and its gradient, 0 where a norm follows"
    return hit(cases, measured, "weight")


RULES = (
    Rule(
        id="F9",
        title="A norm's input is too small for its eps",
        severity="error",
        threshold=(
            f"more than {percent(_SHORT_ROWS)} of the rows keep less than 99 % of their length (note), more of them "
            f"than when the run began (warning), {percent(_SHORT_ROWS)} less than 90 % (error)"
        ),
        source="the eps family: meta-llama/llama#771, pytorch/torchtune#290",
        why=(
            "The stream or the branch shrinks towards eps. There the norm no longer makes rows alike: short rows leave "
            "too short, and their gradient no longer grows as they shrink, so nothing brings them back."
        ),
        remedy=(
            "a smaller eps, below 1 % of the mean square that enters",
            "look for what shrinks the input: weight decay on embeddings, a gain near 0 before it",
        ),
        confirm="the eps share at this norm falls back below 1 % in the next reports",
        check=_input_too_small,
        follows=("A1",),
    ),
    Rule(
        id="F10",
        title="A weight's length matters although a norm follows",
        severity="warning",
        threshold=f"cosine between a weight verified scale invariant and its gradient beyond {_NOT_ORTHOGONAL:g}",
        source="van Laarhoven 2017, arXiv:1706.05350",
        why=(
            "A norm forgets the length of the weight before it, so the gradient has no part along that weight. If it "
            "has one, the norm is bypassed, its eps counts by now, or its backward pass is wrong."
        ),
        remedy=(
            "compare the norm's gradient with autograd of nk.normalize in float64",
            "look at the eps share of the norm behind it: raise the weights or lower eps",
        ),
        confirm="double the weight: the model's output stays the same, and the cosine is 0",
        check=_not_orthogonal,
        follows=("A1", "F9"),
        looks_at=("run",),
    ),
)
"""The rules of this group, in order."""
