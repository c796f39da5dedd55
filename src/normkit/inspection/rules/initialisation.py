"""Group F, the start: what the first step says of the initialisation."""

from __future__ import annotations

import math

from normkit.inspection.rules.depth import profile_ratios
from normkit.inspection.rules.rule import NO_TRAINING, Facts, Hit, NotChecked, Outcome, Rule
from normkit.inspection.training import Quantity, Training

# Healthy starts of the demo models: 0.98 to 1.05.
_POOR_START, _BAD_START = 1.25, 2.0
_NOT_A_MEAN = 50.0
_UNTRAINED = 0.8
_STEEP_START, _LARGE_LOGITS = 10.0, 100.0


def _poor_start(facts: Facts) -> Outcome:
    """The first step of a model that knows nothing: its loss, its logits, its gradients."""
    training = facts.training
    if training is None:
        return NO_TRAINING
    loss = start_of(training, "loss")
    if not training.vocabulary or math.isnan(loss):
        return NotChecked("the first step, or how many entries the output has, is not known")
    if training.began_trained:
        return NotChecked("the run began with trained weights")
    uniform = math.log(training.vocabulary)
    if loss > _NOT_A_MEAN * uniform:
        return NotChecked(f"a first loss of {loss:.3g} is no mean over tokens")
    if loss < _UNTRAINED * uniform:
        return None
    lines = []
    # Where the model is called several times in a step, its loss may be the sum of as many.
    loss_of_a_call = loss / _calls_a_step(facts)
    if loss_of_a_call > _POOR_START * uniform:
        lines.append(
            f"the first loss is {loss:.3g}; one that guesses all {training.vocabulary} entries alike has {uniform:.3g}"
        )
    logits, place = max(_starts(training, "logit bound"), default=(math.nan, ""))
    if logits > _LARGE_LOGITS:
        lines.append(f"{place}: attention logits up to {logits:.3g} in the first step")
    ratio = next((ratio for step, ratio in profile_ratios(training) if step == 0), 1.0)
    if not 1 / _STEEP_START <= ratio <= _STEEP_START:
        lines.append(f"the first gradient is {ratio:.3g} times as large behind the last block as behind the first")
    if not lines:
        return None
    return Hit(
        severity="error" if loss_of_a_call > _BAD_START * uniform else "warning",
        sites=(place,) if logits > _LARGE_LOGITS else (),
        measured=f"first loss {loss:.3g}, {loss / uniform:.3g} times log({training.vocabulary})",
        evidence=tuple(lines),
    )


def _calls_a_step(facts: Facts) -> int:
    """How many times the model was called in the step that was measured last."""
    return max(1, min((site.calls // max(site.forward_calls, 1) for site in facts.sites), default=1))


def start_of(training: Training, name: Quantity) -> float:
    """The value of a series of the whole model in step 0; NaN if that was not seen or is not finite."""
    return next((value for value, path in _starts(training, name) if not path), math.nan)


def _starts(training: Training, name: Quantity) -> list[tuple[float, str]]:
    """Value and path of each series of a quantity in step 0, where that is finite."""
    return [
        (series.values[0], series.path)
        for series in training.of(name)
        if series.steps[:1] == (0,) and math.isfinite(series.values[0])
    ]


RULES = (
    Rule(
        id="F12",
        title="The initialisation is off",
        severity="error",
        threshold=(
            f"a first loss above {_POOR_START:g} times log(vocabulary) (warning) or {_BAD_START:g} times (error); in "
            f"an untrained model, attention logits above {_LARGE_LOGITS:g} or gradients {_STEEP_START:g} times apart "
            "over the depth in the first step (warning)"
        ),
        source=(
            "an even guess has a loss of log(vocabulary); healthy starts of the demo models: 0.98 to 1.05 times that, "
            "logits to 5; with weights ten times as large 3.3 to 3.7 times, and 440 (Wortsman et al. 2023, "
            "arXiv:2309.14322)"
        ),
        why=(
            "A model that knows nothing should guess evenly. A larger first loss means that it is sure of what it "
            "cannot know: logits or streams start too large, and the first hundreds of steps go into unlearning that."
        ),
        remedy=(
            "draw weights with a deviation near 1 / sqrt(width), the family's own, and embeddings likewise",
            "scale the weights that write to the stream by 1 / sqrt(2 * blocks)",
            "check that nothing was initialised twice, or left as it was allocated",
        ),
        confirm="the loss of the first step is log(vocabulary), to some per cent",
        check=_poor_start,
        follows=("B5", "F16", "F17", "F19"),
        looks_at=("run",),
    ),
)
"""The rules of this group, in order."""
