"""Group B, 16-bit parameters of norms whose updates are lost in rounding."""

from __future__ import annotations

import math

from normkit.measurement.training import Parameter, Training
from normkit.rules.facts import Facts
from normkit.rules.rule import NO_OPTIMIZER, Case, NotChecked, Outcome, Rule, hit, of_a_run
from normkit.rules.scale import HALF, ROUNDING
from normkit.text import counted, percent

_SHARE, _STEPS = 0.5, 8


@Rule(
    id="B15",
    title="Updates of 16-bit gains are lost in rounding",
    severity="warning",
    threshold=(
        f"at least {percent(_SHARE)} of the elements that have a gradient bit for bit as they began, after {_STEPS} "
        "steps or more with gradients, while weights move and the learning rate does not rise any more"
    ),
    source=(
        "gains that stay 1, and norms that bfloat16 hurts: fla-org/flame#47, axolotl-ai-cloud/axolotl#3670, "
        f"vllm-project/speculators#668; bfloat16 loses any change below {percent(ROUNDING['bfloat16'] / 2)}"
    ),
    why=(
        "A gain is near 1, where the next number of bfloat16 is 0.4 to 0.8 % away. An update below half of that is "
        "rounded away, in every step alike: it never adds up. Adam's updates are about the learning rate, so that at "
        "1e-3 and below most gains stay what they were. Matrices are far smaller than 1, and move."
    ),
    remedy=(
        "keep the parameters of norms in float32, as they are few: for norm in norms: norm.float()",
        "or train with master weights in float32, under autocast or with an optimizer that keeps them",
        "or use an optimizer that rounds stochastically",
    ),
    confirm="before = norm.weight.clone(); after some steps, (norm.weight == before).float().mean()",
)
@of_a_run()
def lost_updates(_facts: Facts, training: Training) -> Outcome:
    """Parameters of norms in 16 bits that have gradients, and of which most elements have never moved."""
    if not any(each.trained for each in training.parameters):
        return NO_OPTIMIZER
    narrow = [each for each in training.parameters if each.site and each.trained and each.dtype in HALF]
    if not narrow:
        return None
    if not any(each.moved_steps > 0 for each in training.parameters if each.kind in ("weight", "embedding", "output")):
        return NotChecked("no weight moved either")
    rates = [value for series in training.of("learning rate") for value in series.values if math.isfinite(value)]
    if rates and rates[-1] == max(rates) > rates[0]:
        return NotChecked("the learning rate still rises: larger updates may not be lost")
    cases = [
        _case(each)
        for each in narrow
        if each.unmoved_share >= _SHARE and each.gradient_steps >= _STEPS and each.learning_rate != 0
    ]
    measured = f"{len(cases)} of {counted(len(narrow), '16-bit parameter')} of norms keep most of their elements"
    return hit(cases, measured, "parameter")


def _case(parameter: Parameter) -> Case:
    words = (
        f"{percent(parameter.unmoved_share)} of its elements have gradients and have not moved in "
        f"{counted(parameter.gradient_steps, 'step')}"
    )
    if math.isfinite(parameter.learning_rate):
        words += f" at a learning rate of {parameter.learning_rate:.2g}"
    words += f"; {parameter.dtype} loses any change below {percent(ROUNDING[parameter.dtype] / 2)} of an element"
    return Case(parameter.site, "warning", words, parameter.unmoved_share, name=parameter.path)


RULES = (lost_updates,)
"""The rules of this file."""
