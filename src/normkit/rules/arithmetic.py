"""Group A, the arithmetic: a wrong divisor, power or gradient, a variance that cancels, rows of one number."""

from __future__ import annotations

import math

from normkit.conventions.eps import eps_in
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.meant import fields_of, is_open, undecided
from normkit.rules.rule import Case, Outcome, Rule, hit, worst
from normkit.rules.scale import HARMFUL, ROUNDING, STEP, severity_of
from normkit.text import counted, percent, spread

_WRONG = 1e-2
# Limits of mean^2 / variance: the digits that a row has left after the rounding of its dtype.
_LARGE_MEAN = {"float32": 1e6, "float16": 1e2, "bfloat16": 1e2}
_DEGREE = 0.05
_GRADIENT = 0.1


@Rule(
    id="A4",
    title="The variance is divided by the wrong number",
    severity="error",
    threshold=(
        "n - 1 where the config's class or the intent file divides by n, or where there is neither, and the "
        "reverse (warning); "
        f"the output's length changes by more than {percent(HARMFUL)} (error)"
    ),
    source=f"harvardnlp/annotated-transformer#119, FluxML/Flux.jl#529; {STEP}",
    why=(
        "A norm describes the row it has and estimates nothing, so it divides by n. Tensor.var and Tensor.std "
        "divide by n - 1 unless told otherwise, which shortens every output by sqrt((n - 1) / n): 0.8 % for n = 64."
    ),
    remedy=(
        "compute the variance with correction=0, or call torch.nn.functional.layer_norm",
        "if the weights were trained this way, keep it and say so: nk.NormSpec(correction=1)",
    ),
    confirm="nk.identify(module, shape).spec.correction",
    follows=("A11", "A12"),
)
def wrong_divisor(facts: Facts) -> Outcome:
    """Another divisor than is meant, or than n where nothing is known."""
    cases = []
    for site in facts.sites:
        intended, n = facts.intended(site), site.input.features
        own, meant = site.spec.divisor, 0 if intended is None else intended.divisor.correction
        if own.correction == meant or own.is_sum or n < 2 or is_open(site, facts, fields_of("A4")):
            continue
        effect = math.sqrt(n / (n - 1)) - 1.0
        words = f"the sum of squares is {own.words}; for n = {n} the output's length is {percent(effect)} off"
        cases.append(Case(site.path, worst((severity_of(effect), "warning")), words, effect))
    found = hit(cases, f"another divisor of the variance at {counted(len(cases), 'norm')}")
    return found or undecided(facts, fields_of("A4"))


@Rule(
    id="A5",
    title="The output's length depends on the input's: a wrong power",
    severity="error",
    threshold=f"slope of log |f(s x)| over log s at large s other than 0 by more than {_DEGREE:g}",
    source="TPlinker#37, viewset-diffusion#1",
    why=(
        "** 2 for ** 0.5, rsqrt for sqrt, or no root at all: rows keep their direction, so the model trains, but "
        "the output of long rows is too short or too long. The norm fixes no scale, and gradients through it explode "
        "or vanish."
    ),
    remedy=(
        "divide by the root of the variance or mean square: x * rsqrt(v + eps)",
        "weights trained with the wrong power do not fit the right one: train again, or rescale the gains",
    ),
    confirm="nk.identify(module, shape).readings['degree']; the output for x and for 2 * x",
    looks_at=("norms", "other norms"),
)
def wrong_power(facts: Facts) -> Outcome:
    """Rows keep their direction, as in a norm, and their length follows the input's."""
    powers = {
        other.path: found.value
        for other in facts.others
        if (found := other.passport.readings.get("degree")) is not None and abs(found.value) > _DEGREE
    }
    cases = [
        Case(
            path,
            "error",
            f"rows twice as long give outputs {2.0**power:.3g} times as long (power {power:g}): the divisor is the "
            f"mean square or variance to the power {(1 - power) / 2:g} instead of 0.5",
            abs(power),
        )
        for path, power in powers.items()
    ]
    factors = spread(2.0**power for power in powers.values())
    return hit(cases, f"rows twice as long give outputs {factors} times as long at {counted(len(cases), 'norm')}")


@Rule(
    id="A9",
    title="The variance cancels",
    severity="error",
    threshold=(
        "E[x^2] - E[x]^2, seen from rows with means of 128 to 8192 deviations (warning), and a variance off by "
        f"more than {percent(_WRONG)} for the model's rows (error); any norm that subtracts a mean with mean^2 / "
        f"variance above {_LARGE_MEAN['float32']:g} in float32 or {_LARGE_MEAN['bfloat16']:g} in 16 bits (warning)"
    ),
    source="patrick-kidger/equinox#314, keras-core#866, tracel-ai/burn#5607, pytorch/pytorch#197089",
    why=(
        "If the mean is far larger than the deviations, E[x^2] and E[x]^2 agree in nearly all digits, and their "
        "difference is rounding error: the output has the wrong length, or is NaN if the difference is negative. "
        "Clamping it at 0 hides that."
    ),
    remedy=(
        "subtract the mean first, then square: two passes, or Welford's update",
        "if the row itself has a huge mean, find what adds it: a bias that drifted, an embedding",
    ),
    confirm="nk.identify(module, shape).readings['conditioning']; compare norm(x + 1000) with norm(x)",
)
def cancelling_variance(facts: Facts) -> Outcome:
    """The variance is a difference of two large numbers; or a mean so large that the row has few digits left."""
    cases = []
    for site in facts.sites:
        if not (site.spec.centring.numerator and site.spec.centring.statistics):
            continue
        # n mean^2 / |x|^2 of the average row over its complement; 0 if no row has a direction.
        energy = 0.0 if math.isnan(site.input.mean_energy) else site.input.mean_energy
        ratio = energy / (1.0 - energy) if energy < 1.0 else math.inf
        found = facts.reading(site.path, "conditioning")
        if found is not None and found.value["cancels"]:
            rounding = ROUNDING[site.dtype if site.spec.casts.has_narrow_statistics else "float32"]
            error = min(ratio * rounding, 1.0)
            words = (
                f"E[x^2] - E[x]^2; with means {found.value['mean_over_std']:g} times the deviations its outputs are "
                f"off by {percent(found.value['error'])}; at its input's mean^2 / variance of {ratio:.3g} the variance "
                f"is off by about {percent(error)}"
            )
            cases.append(Case(site.path, "error" if error > _WRONG else "warning", words, ratio))
        elif ratio > _LARGE_MEAN.get(site.dtype, math.inf):
            all_bits = -math.log2(ROUNDING[site.dtype])
            bits = max(all_bits - 0.5 * math.log2(ratio), 0.0) if math.isfinite(ratio) else 0.0
            words = (
                f"mean^2 / variance of its input is {ratio:.3g}: after the mean is subtracted, {site.dtype} has "
                f"{bits:.0f} of {all_bits:.0f} bits left"
            )
            cases.append(Case(site.path, "warning", words, ratio))
    return hit(cases, f"a large mean leaves the variance few digits at {counted(len(cases), 'norm')}")


@Rule(
    id="A10",
    title="Rows without variance come out NaN",
    severity="error",
    threshold=(
        "a row of one number gives NaN or infinity, or a row of zeros does where an eps is meant (warning); "
        "rows of zeros do enter (error); where nothing says that an eps is meant, a note"
    ),
    source="microsoft/onnxruntime#21935, TIM-VX#589",
    why=(
        "Padding, a masked token or a dead feature gives rows of zeros or of one number. Divided by a root of 0, "
        "or of a variance that rounding made negative, they are NaN, and so is all that attends to them."
    ),
    remedy=(
        "add an eps that the statistics' dtype can hold",
        "subtract the mean before squaring, so that the variance of a constant row is 0 and never negative",
        "mask padding rows after the norm as well",
    ),
    confirm="the module's output for torch.zeros and torch.full of a row",
    follows=("A3", "A7", "A9"),
)
def degenerate_rows(facts: Facts) -> Outcome:
    """Rows of zeros, or of one number, come out NaN or infinite."""
    cases = []
    for site in facts.sites:
        passport, intended = facts.passports.get(site.path), facts.intended(site)
        if (found := facts.reading(site.path, "degenerate rows")) is not None:
            rows = found.value
        else:
            is_bare = eps_in(site.dtype, site.spec.eps) == 0 and (passport is None or "eps" not in passport.undecidable)
            rows = {"zeros": "NaN" if is_bare else "finite", "constant": "finite"}
        zeros, constant = rows["zeros"] != "finite", rows["constant"] != "finite"
        if not zeros and not constant:
            continue
        is_eps_meant = intended is not None and eps_in(site.dtype, intended.eps) != 0
        severity: Severity = "warning" if constant or is_eps_meant else "note"
        kinds = [what for what, bad in (("zeros", zeros), ("one number", constant)) if bad]
        words = f"a row of {' or of '.join(kinds)} gives {rows['constant' if constant else 'zeros']}"
        if zeros and site.input.zero_rows:
            severity = "error"
            words += f"; {site.input.zero_rows:,} of {counted(site.input.rows, 'row')} that entered are zeros"
        cases.append(Case(site.path, severity, words, float(site.input.zero_rows)))
    return hit(cases, f"rows without variance are divided by zero at {counted(len(cases), 'norm')}")


@Rule(
    id="A13",
    title="The gradient of a norm's input is not the formula's",
    severity="error",
    threshold=(
        f"relative error above {percent(_GRADIENT)} on random rows, against the formula's derivative in float64 (error "
        "in training, else a warning); plain code leaves less than 1 %, also in 16 bits"
    ),
    source="Xu et al. 2019, arXiv:1911.07013 (DetachNorm); normkit study gradients",
    why=(
        "Statistics that are detached, or a backward pass that was written for another formula, give the right output "
        "and the wrong gradient. That of a norm has no part along the row, as the row's length does not matter to the "
        "output: with detached statistics it has one, and what writes the row is pushed to lengthen or shorten it."
    ),
    remedy=(
        "let the gradient go through mean and variance: no detach(), no torch.no_grad() around them",
        "of a fused kernel or an autograd.Function: compare its backward with that of plain code, in float64",
    ),
    confirm="nk.testing.assert_conforms(module, spec): input gradient",
    follows=("A5",),
)
def wrong_input_gradient(facts: Facts) -> Outcome:
    """The gradient that goes through a norm, on random rows; the model's output does not show it."""
    severity: Severity = "warning" if facts.training is None else "error"
    cases = [
        Case(
            site.path,
            severity,
            f"the gradient of its input is off by {percent(site.input_gradient_error)} on random rows, though its "
            f"output is {site.spec}",
            site.input_gradient_error,
        )
        for site in facts.sites
        if site.input_gradient_error > _GRADIENT
    ]
    largest = max((case.effect for case in cases), default=0.0)
    return hit(cases, f"off by up to {percent(largest)} at {counted(len(cases), 'norm')}")


RULES = (wrong_divisor, wrong_power, cancelling_variance, degenerate_rows, wrong_input_gradient)
"""The rules of this file."""
