"""Group B, the parameters in training: their start, their decay, whether they move, how their gradient is summed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normkit.measurement.facts import BatchNorm, Site, Spectrum
from normkit.measurement.training import Parameter, Training
from normkit.rules.facts import Facts, is_constant
from normkit.rules.finding import Severity
from normkit.rules.gain import MOST_SITES, SCATTER_RMS, is_exchanged, scatters_around_zero
from normkit.rules.rule import (
    NO_OPTIMIZER,
    Case,
    NotChecked,
    Outcome,
    Rule,
    first_values,
    hit,
    of_a_run,
)
from normkit.text import counted, percent

_OFF, _NEAR_ZERO = 0.05, 0.3
# The first loss of fresh weights is the logarithm of the vocabulary, or more.
_FRESH_LOSS = 0.9
_CHOSEN_DECAY = 0.05
# A step takes lr * decay * gain, and Adam's own step gives lr at most: no gain above 1 / decay can be held.
_SUNK = 0.5
FIRST_STEPS = 3
"""Steps after which a gradient is missed."""
NO_GRADIENTS = "no parameter had a gradient at watch.step: call it between backward and optimizer.step"
"""The reason of B8 where no parameter of the model had a gradient."""
_GRADIENT_ERROR = 1e-2
_SMALL_GAIN, _SMALL_SHARE, _LARGE_RATIO = 0.01, 0.05, 50.0
# Of 446 gains of SmolLM2, Gemma 3, EmbeddingGemma, Qwen2.5-Coder and MPNet at most 5.9 % are 0, and the largest is at
# most 18.7 times the next (5.9 without EmbeddingGemma); the largest of a model is at most 2.7 times that of its other
# norms.
_ZERO_SHARE, _FAR_ALONE, _ALONE, _ALONE_IN_MODEL = 0.2, 60.0, 10.0, 5.0
_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_STUCK = 8
_NORM_KINDS = ("gain", "bias of a norm")


@Rule(
    id="B5",
    title="Gains do not start where they should",
    severity="error",
    threshold=(
        f"in step 0, or in a model most of whose gains are at their start: a mean gain off by more than {_OFF:g} "
        f"(warning), or within {_NEAR_ZERO:g} of 0 (error); gains around 0 with both signs and an output rms below "
        f"{SCATTER_RMS:g} at {percent(MOST_SITES)} of the norms (error); one constant, without a config, is a "
        "note"
    ),
    source="huggingface/transformers#143, NVIDIA/TransformerEngine#2528, llm-foundry#1745",
    why=(
        "An initialisation meant for matrices, N(0, 0.02), was applied to the gains too: every norm then shortens its "
        "rows fifty times and turns half of their signs. Training takes long to undo that, where it can."
    ),
    remedy=(
        "leave the norms out of the function that initialises the model: 1 for a gain, 0 for a bias",
        "after building on the meta device, call reset_parameters of each norm",
    ),
    confirm="print the mean of every gain before the first step",
)
def wrong_start(facts: Facts) -> Outcome:
    """Gains that do not start where their class starts them: seen in step 0, or in a model that is not trained yet."""
    if facts.training is not None:
        return _wrong_start_of_run(facts, facts.training)
    gained = [(site, site.gain) for site in facts.sites if site.gain is not None]
    scattered = [(site, gain) for site, gain in gained if scatters_around_zero(site, gain) and not is_exchanged(site)]
    if not facts.is_intent_known and scattered and len(scattered) >= MOST_SITES * len(gained):
        cases = [_drawn(site, gain, "error") for site, gain in scattered]
        return hit(cases, f"gains scatter around 0 at {len(cases)} of {counted(len(gained), 'norm')}")
    fresh = [site for site, gain in gained if facts.is_gain_initial(site)]
    if not gained:
        return NotChecked("no norm of single rows has a gain")
    if not fresh or 2 * len(fresh) < len(gained) or facts.has_trained_matrices:
        return NotChecked("the model is trained; only a training run shows how it began: nk.watch", needs_run=True)
    cases = []
    for site, gain in gained:
        initial = facts.initial_gain(site.path)
        if site in fresh or not abs(gain.mean - initial) > _OFF:
            continue
        if is_constant(gain):
            known = facts.intent is not None and site.path in facts.intent.initial_gains
            words = f"every gain is {gain.mean:.3g}, not {initial:.3g}"
            cases.append(Case(site.path, "warning" if known else "note", words, abs(gain.mean - 1)))
        else:
            cases.append(_drawn(site, gain, "error" if abs(gain.mean) < _NEAR_ZERO else "warning"))
    return hit(cases, f"{len(cases)} of {counted(len(gained), 'gain')} not at their start in an untrained model")


def _drawn(site: Site, gain: Spectrum, severity: Severity) -> Case:
    words = (
        f"the gain goes from {gain.quantiles[0]:.3g} to {gain.quantiles[-1]:.3g} and averages "
        f"{gain.mean:.3g}; the median output has rms {site.output.rms_median:.3g}"
    )
    return Case(site.path, severity, words, abs(gain.mean - 1))


def _wrong_start_of_run(facts: Facts, training: Training) -> Outcome:
    """The same by the mean gains of step 0, of a run that began with fresh weights."""
    first = first_values(training, "gain mean")
    sites = [site for site in facts.sites if site.path in first]
    if not sites:
        return NotChecked("no gain was measured in step 0")
    as_usual = [site for site in sites if first[site.path] == facts.initial_gain(site.path)]
    loss = next(iter(first_values(training, "loss").values()), math.nan)
    is_fresh = training.vocabulary > 1 and loss > _FRESH_LOSS * math.log(training.vocabulary)
    # A trained model that was cut, or is fed with other data, has the loss of an untrained one.
    if training.began_trained or (2 * len(as_usual) < len(sites) and not is_fresh):
        return NotChecked("the run began with trained weights")
    cases = []
    for site in sites:
        start, initial = first[site.path], facts.initial_gain(site.path)
        if abs(start - initial) <= _OFF:
            continue
        known = facts.intent is not None and site.path in facts.intent.initial_gains
        severity: Severity = "warning" if abs(start) >= _NEAR_ZERO else "error"
        severity = "note" if start == 0 and not known else severity
        cases.append(Case(site.path, severity, f"starts at a mean gain of {start:.3g}", abs(start - initial)))
    return hit(cases, f"{len(cases)} of {counted(len(sites), 'gain')} do not start near 1")


@Rule(
    id="B7",
    title="Weight decay on the parameters of norms",
    severity="error",
    threshold=(
        f"any decay where other gains or biases are spared, or of {_CHOSEN_DECAY:g} and more on a plain gain "
        "(warning); a smaller one, or one of a 1 + weight gain, everywhere alike (note); a gain whose mean sank to "
        f"under {percent(_SUNK)} of its start, by a decay that takes as much within the run and that a step of the "
        "learning rate, as Adam's, cannot hold there (error)"
    ),
    source=(
        "BigScience Megatron-DeepSpeed#262, microsoft/DeepSpeedExamples#755, "
        "huggingface/transformers#35927; 0.01 is the default of torch.optim.AdamW, 0.1 that of recipes for large "
        "models, which spare gains"
    ),
    why=(
        "Decay pulls a gain to 0, not to 1: the norm's output shrinks, and the weights behind it grow to make up "
        "for it. Lists of names miss norms with other names; here each parameter is known by its module."
    ),
    remedy=(
        "put the gains and biases of norms into a group with weight_decay=0",
        "build that group from the modules, not from names",
        "keep it if it is meant: a 1 + weight gain decays to 1",
    ),
    confirm="[group['weight_decay'] for group in optimizer.param_groups] beside the parameters of each group",
)
@of_a_run()
def weight_decay(facts: Facts, training: Training) -> Outcome:
    """The optimizer's groups, by the module that each parameter belongs to."""
    held = [each for each in training.parameters if each.trained]
    if not held:
        return NO_OPTIMIZER
    norms = [each for each in held if each.kind in _NORM_KINDS]
    decayed = [each for each in norms if each.weight_decay > 0]
    # Where other gains or biases are spared, these were missed; else nobody thought of them.
    spared = any(each.weight_decay == 0 for each in held if each.kind in (*_NORM_KINDS, "bias"))
    offsets = {site.path: site.spec.gain.offset for site in facts.sites}
    first = first_values(training, "gain mean")
    last = {series.path: series.last for series in training.of("gain mean")}
    cases = []
    for each in decayed:
        offset = offsets.get(each.site, 0.0) if each.kind == "gain" else 0.0
        is_chosen = each.weight_decay >= _CHOSEN_DECAY and offset == 0
        severity: Severity = "warning" if spared or is_chosen else "note"
        limit = "others have 0" if spared else f"{_CHOSEN_DECAY:g} and more is a warning"
        words = f"weight decay {each.weight_decay:g} ({limit}) pulls it to {offset:g}"
        if (rate := each.learning_rate * each.weight_decay) > 0:
            steps = float(f"{math.log(2) / rate:.2g}")
            words += f", half of the way in {steps:,.0f} steps if nothing holds it"
            start = first.get(each.site, 0.0) if each.kind == "gain" and offset == 0 else 0.0
            is_too_strong = each.weight_decay * _SUNK * start >= 1 and math.log(2) / rate <= training.steps
            if is_too_strong and abs(last[each.site]) < _SUNK * start:
                words += f"; its mean went from {start:.3g} to {last[each.site]:.3g}, and steps of Adam hold none "
                words += f"above 1 / {each.weight_decay:g}"
                severity = "error"
        cases.append(_of(each, severity, words, each.weight_decay + (severity == "error")))
    measured = f"{len(decayed)} of {counted(len(norms), 'parameter')} of norms decayed"
    if sunk := sum(case.severity == "error" for case in cases):
        measured += f", {counted(sunk, 'gain')} to under {percent(_SUNK)} of the start"
    return hit(cases, measured + (", others are spared" if spared else ""), "parameter")


def _of(parameter: Parameter, severity: Severity, words: str, effect: float = 0.0) -> Case:
    """A case of a parameter, at its norm."""
    return Case(parameter.site or parameter.path, severity, words, effect, name=parameter.path)


@Rule(
    id="B8",
    title="Norms that do not train",
    severity="warning",
    threshold=(
        "some parameters of norms frozen, or held by no optimizer, while at least half of the weights train; or no "
        f"gradient in {FIRST_STEPS} steps or more, or gradients in {_STUCK} and no update (warning); all of them "
        "frozen and without a gradient (note)"
    ),
    source="huggingface/diffusers#11832, unslothai/unsloth#328, huggingface/peft#2080",
    why=(
        "Norms are a small part of the parameters and affect all others. A norm that does not train is often an "
        "oversight: a name that a filter missed, a parameter made after the optimizer, a branch that the loss does "
        "not reach."
    ),
    remedy=(
        "set requires_grad and give the parameter to the optimizer",
        "if no gradient comes, look for a detach or a branch that is not used",
    ),
    confirm="parameter.requires_grad, parameter.grad after backward, and the optimizer's groups",
    follows=("B9",),
)
@of_a_run()
def untrained_norms(_facts: Facts, training: Training) -> Outcome:
    """Frozen, held by no optimizer, or without a gradient or an update, while the weights around them train."""
    if not any(each.trained for each in training.parameters):
        return NO_OPTIMIZER
    weights = [each for each in training.parameters if each.kind == "weight"]
    if 2 * sum(each.trained for each in weights) < len(weights):
        return NotChecked("most weights are frozen too, as where an adapter is trained")
    if training.steps >= FIRST_STEPS and not any(each.gradient_steps for each in training.parameters):
        return NotChecked(NO_GRADIENTS)
    norms = [each for each in training.parameters if each.kind in _NORM_KINDS]
    frozen = [each for each in norms if not each.trained]
    # A parameter that is frozen on purpose gets no gradient.
    forgotten = [each for each in frozen if each.gradient_steps >= FIRST_STEPS]
    is_on_purpose = len(frozen) == len(norms) and not forgotten
    cases = []
    for each in norms:
        if each in frozen:
            words = "gets gradients, and no optimizer holds it"
            words = words if each in forgotten else "is frozen, or no optimizer holds it"
            cases.append(_of(each, "note" if is_on_purpose else "warning", words))
        elif each.gradient_steps == 0 and training.steps >= FIRST_STEPS:
            cases.append(_of(each, "warning", f"had no gradient in {training.steps} steps"))
        # In 16 bits that is rounding: B15 says so.
        elif each.moved_steps == 0 < _STUCK <= each.gradient_steps and (
            math.isnan(each.unmoved_share) or each.learning_rate == 0
        ):
            words = (
                f"had gradients in {each.gradient_steps} steps and never moved; learning rate {each.learning_rate:.3g}"
            )
            cases.append(_of(each, "note" if each.learning_rate == 0 else "warning", words))
    return hit(cases, f"{len(cases)} of {counted(len(norms), 'parameter')} of norms do not move", "parameter")


@Rule(
    id="B9",
    title="The gain's gradient is summed in 16 bits",
    severity="warning",
    threshold=(
        f"relative error above {percent(_GRADIENT_ERROR)} over some thousand random rows, against float64 (warning "
        "in training, else a note); a sum in float32 that is rounded once leaves 0.2 %"
    ),
    source="linkedin/Liger-Kernel#950; torch's LayerNorm in bfloat16 on the CPU is off by 45 % over 4096 rows",
    why=(
        "The gradient of a gain is a sum over all tokens. In bfloat16 the sum no longer grows once it is 256 times as "
        "large as each term, so the gain follows the first tokens of a batch and not the others."
    ),
    remedy=(
        "sum in float32 and round once, as normkit's layers do: nk.convert(model)",
        "keep the norms' parameters in float32",
    ),
    confirm="weight.grad in the model's dtype against the same backward in float64",
    follows=("E2",),
)
def gradient_in_16_bits(facts: Facts) -> Outcome:
    """The gain's gradient on random rows against float64; it matters where the model trains."""
    cases = [
        Case(
            site.path,
            "note" if facts.training is None else "warning",
            f"{site.class_name} in {site.dtype}: the gradient of its gain is off by "
            f"{percent(site.gain_gradient_error)}",
            site.gain_gradient_error,
        )
        for site in facts.sites
        if site.gain_gradient_error > _GRADIENT_ERROR
    ]
    largest = max((case.effect for case in cases), default=0.0)
    return hit(cases, f"gain gradients off by up to {percent(largest)} at {counted(len(cases), 'norm')}")


@Rule(
    id="B10",
    title="Gains or biases collapsed or blown up",
    severity="error",
    threshold=(
        f"{percent(_ZERO_SHARE)} of a trained gain exactly 0, or one entry over {_FAR_ALONE:g} times the next largest, "
        f"or over {_ALONE / 3:.2g} times that and {_ALONE_IN_MODEL:g} times the largest of all other norms, or an "
        f"entry of a bias over {_ALONE:g} times and {_ALONE_IN_MODEL:g} times these (error); at least "
        f"{percent(_SMALL_SHARE)} of the entries within ±{_SMALL_GAIN:g}, or one over {_LARGE_RATIO:g} times the "
        "median (note)"
    ),
    source="arXiv:1911.07013 (gains and over-fitting); 446 gains of six trained models stay below 60 % of each limit",
    why=(
        "A gain near 0 hides its feature from all that reads the norm; one far above the others lets a single "
        "feature decide. Training gives both to some norms (note): in Gemma 3 270M as published one gain is 172 times "
        "the median of its norm. A gain of zeros silences all that reads it, and one huge entry makes all others "
        "negligible: none of the trained models that were measured has either (error)."
    ),
    remedy=(
        "compare with the original (normkit compare MODEL ORIGINAL): where it has the same values, training gave them "
        "and nothing is wrong; where it has others, these were damaged, or never loaded",
        "compare with an earlier checkpoint; look at weight decay on the gain, and at its learning rate",
    ),
    confirm="the gain's spectrum in the report, and its outliers",
    follows=("B5", "B7", "F11"),
)
def extreme_values(facts: Facts) -> Outcome:
    """Gains of exactly 0 and an entry far above all others, which no training gives; then values that it does give."""
    norms: list[Site | BatchNorm] = [*facts.sites, *(norm for norm in facts.batch_norms if norm.is_gathered)]
    gains = {norm.path: norm.gain for norm in norms if norm.gain is not None and not norm.gain.nonfinite}
    # Batch norms lose whole channels in training: C12 tells of these.
    in_batches = {norm.path for norm in facts.batch_norms}
    # Gains that start at 0 by design are beside others that are constant too.
    fresh = all(is_constant(gain) for gain in gains.values())
    tops = {path: max(map(abs, gain.quantiles)) for path, gain in gains.items()}
    cases = []
    for path, gain in gains.items():
        zero, small = _share_below(gain.quantiles, 0.0), _share_below(gain.quantiles, _SMALL_GAIN)
        median, top = abs(gain.quantiles[3]), tops[path]
        elsewhere = max((value for other, value in tops.items() if other != path), default=top)
        ratio, alone = top / median if median else 0.0, top / _second(gain) if top else 0.0
        is_alone = alone > _FAR_ALONE or (alone > _ALONE / 3 and top > _ALONE_IN_MODEL * elsewhere)
        if path in in_batches and not is_alone:
            continue
        if zero >= _ZERO_SHARE and path not in in_batches and not fresh and facts.initial_gain(path) != 0:
            share = "all of" if zero >= 1 else f"at least {percent(zero)} of"
            words = f"{share} {counted(gain.size, 'gain')} are exactly 0, which training never gives"
            cases.append(Case(path, "error", words, 1.0 + zero))
        elif is_alone:
            feature, value = max(gain.outliers, key=lambda outlier: abs(outlier[1]))
            words = f"one gain of {value:.4g} (feature {feature}) is {alone:.3g} times the next largest"
            cases.append(Case(path, "error", f"{words}, the median is {median:.3g}", 1.0 + alone))
        elif small >= _SMALL_SHARE:
            words = f"at least {percent(small)} of {counted(gain.size, 'gain')} are within ±{_SMALL_GAIN:g}"
            cases.append(Case(path, "note", words, small))
        elif ratio > _LARGE_RATIO:
            words = f"the largest gain is {ratio:.3g} times the median one of {median:.3g}"
            cases.append(Case(path, "note", words, 1.0))
    biases = {norm.path: norm.bias for norm in norms if norm.bias is not None and not norm.bias.nonfinite}
    tops = {path: max(map(abs, bias.quantiles)) for path, bias in biases.items()}
    for path, bias in biases.items():
        elsewhere = max((top for other, top in tops.items() if other != path), default=0.0)
        if bias.outliers and tops[path] > max(_ALONE * _second(bias), _ALONE_IN_MODEL * elsewhere):
            feature, value = max(bias.outliers, key=lambda outlier: abs(outlier[1]))
            words = f"one bias of {value:.4g} (feature {feature}) is over {_ALONE:g} times the next largest, the "
            cases.append(Case(path, "error", f"{words}largest of the other norms is {elsewhere:.3g}", abs(value)))
    # Values that trained models have too are not listed beside values that they never have.
    faults = [case for case in cases if case.severity == "error"]
    if faults:
        return hit(faults, f"gains of 0, or a gain or bias far above all others, at {counted(len(faults), 'norm')}")
    return hit(cases, f"gains near 0, or far above the others, at {counted(len(cases), 'norm')}")


def _second(part: Spectrum) -> float:
    """The second largest magnitude; where only one entry stands out, the bound that the others keep."""
    large = sorted((abs(value) for _, value in part.outliers if abs(value) > abs(part.quantiles[3])), reverse=True)
    if not large:
        return max(map(abs, part.quantiles))
    if len(large) > 1:
        return large[1]
    # No other is an outlier; three quarters of a normal row's entries span 1.35 standard deviations.
    return abs(part.quantiles[3]) + 6.0 * (part.quantiles[4] - part.quantiles[2]) / 1.349


def _share_below(quantiles: Sequence[float], limit: float) -> float:
    """The share of entries that is sure to be within ±limit: those between two quantiles that are."""
    inside = [abs(value) <= limit for value in quantiles]
    pairs = zip(_SHARES, _SHARES[1:], inside, inside[1:], strict=False)
    return sum(high - low for low, high, first, last in pairs if first and last)


RULES = (wrong_start, weight_decay, untrained_norms, gradient_in_16_bits, extreme_values)
"""The rules of this file."""
