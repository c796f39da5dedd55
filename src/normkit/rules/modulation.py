"""Group B, norms whose gain and bias a condition gives, as in a DiT: the 1 of 1 + scale, and whether it still acts."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.measurement.facts import place_of
from normkit.measurement.modulation import Modulation
from normkit.measurement.training import Training
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import Case, NotChecked, Outcome, Rule, hit
from normkit.rules.scale import VISIBLE
from normkit.text import counted, percent, shortened

# As far from 0 as rule B5 has it for gains: factors 1 + scale that are nearer to 0 or 2 than to 1 in the mean.
_NEAR = 0.3

# Fifty times what 16 bits show of a difference. In healthy runs the difference is a sixth of the shift from step 20 on.
_MOVED = 0.2

NO_CONDITION = NotChecked("no sample of the batch differs from another in a condition, such as a timestep or a class")
"""The answer of a rule that needs the modulations."""


@Rule(
    id="B16",
    title="The 1 of 1 + scale is lost, or there twice",
    severity="error",
    threshold=(
        f"factors of the normalized rows, over samples and channels, with a mean within {_NEAR:g} of 0 or of 2 while "
        "they vary from sample to sample (warning; an error where other norms of the model have factors around 1)"
    ),
    source="Peebles & Xie 2023, arXiv:2212.09748 (DiT: modulate is x * (1 + scale) + shift); diffusers' AdaLayerNorm",
    why=(
        "A condition gives scale and shift, and x * (1 + scale) + shift starts as x itself. Without the 1 the "
        "normalized row is multiplied by numbers around 0: most of it is gone, and half of its signs turn. With a "
        "second 1 it is twice as long. Shapes fit, and so do the weights of a checkpoint."
    ),
    remedy=(
        "x * (1 + scale) + shift, where the checkpoint's own code has the 1",
        "where scale itself is meant to be around 1, start the bias of the layer that makes it at 1",
    ),
    confirm="the mean of what the norm's output is multiplied by, over samples and channels",
    looks_at=("adaptive norms",),
)
def lost_one(facts: Facts) -> Outcome:
    """Factors that vary with the condition and are not around 1."""
    if facts.modulations is None:
        return _unknown(facts)
    scaled = [each for each in facts.modulations if each.varied > VISIBLE]
    usual = [each for each in scaled if abs(each.centre - 1) <= _NEAR]
    cases = []
    for each in scaled:
        centre = next((centre for centre in (0.0, 2.0) if abs(each.centre - centre) <= _NEAR), None)
        if centre is None:
            continue
        words = (
            f"what {each.reader} reads is the normalized row times {each.factors[0]:.3g} to {each.factors[2]:.3g}, "
            f"{each.centre:.3g} in the mean: {'the 1 is missing' if centre == 0 else 'one 1 is too many'}"
        )
        cases.append(Case(each.path, "error" if usual else "warning", words, abs(each.centre - 1)))
    return hit(cases, f"{counted(len(cases), 'adaptive norm')} with factors that are not around 1", "adaptive norm")


@Rule(
    id="B17",
    title="Adaptive norms that no condition changes",
    severity="error",
    threshold=(
        f"factor and shift differ by less than {percent(VISIBLE)} between samples of different conditions, while at "
        "norms of the same name, or before training everywhere, they differ (warning); everywhere (warning in a model "
        "with trained weights, else a note). In a run: by less than that where they have moved by more than "
        f"{percent(_MOVED)} or others differ by as much (warning), or where weights that are 0 get gradients and no "
        "optimizer holds them, as it holds others (error)"
    ),
    source="adaLN-Zero starts so: Peebles & Xie 2023, arXiv:2212.09748, section 3.2",
    why=(
        "An adaptive norm is how a DiT hears of its timestep and its class. Where scale and shift are the same for "
        "all of them, that block computes the same at every noise level: its layer of scale and shift is dead, was "
        "never loaded, or gets a constant."
    ),
    remedy=(
        "look at the weight of the layer that makes scale and shift: adaLN-Zero starts it at 0, training moves it",
        "check that the condition's embedding differs between timesteps, and that the checkpoint's keys are all loaded",
    ),
    confirm="the output of the layer that makes scale and shift, for two timesteps",
    looks_at=("adaptive norms",),
)
def collapsed(facts: Facts) -> Outcome:
    """Norms whose factor and shift are the same for all conditions."""
    if facts.modulations is None:
        return _unknown(facts)
    if facts.training is not None:
        return _collapsed_in_a_run(facts.modulations, facts.training)
    still = [each for each in facts.modulations if not _varies(each)]
    alive = [each for each in facts.modulations if _varies(each)]
    places = {place_of(each.path) for each in alive}
    severity: Severity = "warning"
    if alive:
        # Another norm of the model may have no condition by design.
        still = [each for each in still if place_of(each.path) in places]
    elif not facts.has_trained_matrices:
        severity = "note"
    cases = [
        Case(each.path, severity, f"the same factor and shift for all {counted(each.samples, 'sample')}")
        for each in still
    ]
    whole = len(alive) + len(cases)
    return hit(cases, f"{len(cases)} of {counted(whole, 'adaptive norm')} the same for all conditions", "adaptive norm")


def _collapsed_in_a_run(modulations: Sequence[Modulation], training: Training) -> Outcome:
    """The same of the newest measured step; all start the same where adaLN-Zero does, and leave that within a run."""
    still = [each for each in modulations if not _varies(each)]
    places = {place_of(each.path) for each in modulations if max(each.varied, each.shift_varied) > _MOVED}
    held = [
        each.path
        for each in training.parameters
        if each.kind == "weight" and each.rms == 0 and each.gradient_steps > 0 and not each.trained
    ]
    has_optimizer = any(each.trained for each in training.parameters)
    cases = []
    for each in still:
        words = f"the same factor and shift for all {counted(each.samples, 'sample')}"
        if len(still) == len(modulations) and held and has_optimizer:
            words += f"; {shortened(held, 2)} {'are' if len(held) > 1 else 'is'} 0, with gradients, in no optimizer"
            cases.append(Case(each.path, "error", words))
        elif max(abs(each.centre - 1), each.shift) > _MOVED or place_of(each.path) in places:
            cases.append(Case(each.path, "warning", words))
    measured = f"{len(cases)} of {counted(len(modulations), 'adaptive norm')} the same for all conditions"
    return hit(cases, measured, "adaptive norm")


def _varies(each: Modulation) -> bool:
    return max(each.varied, each.shift_varied) > VISIBLE


def _unknown(facts: Facts) -> NotChecked | None:
    """An adaptive norm has no gain of its own, or a condition would have told more."""
    return NO_CONDITION if any(site.gain is None for site in facts.sites) else None


RULES = (lost_one, collapsed)
"""The rules of this file."""
