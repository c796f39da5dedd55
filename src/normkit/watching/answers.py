"""The five questions of a broken run, answered with numbers; then what to change first, and how to confirm it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from normkit.identification.sites import OtherNorm
from normkit.measurement.facts import Attention, Block, Site
from normkit.measurement.history import FEWEST, MANY_STEPS, WINDOW, jumps, too_large, update_sizes
from normkit.measurement.training import CUT, Answer, Origin, Series, Training, Verdict
from normkit.rules.data import described
from normkit.rules.depth import NOT_A_MEAN, start_of
from normkit.rules.facts import stacks
from normkit.rules.finding import Finding
from normkit.text import counted, percent, shortened
from normkit.watching.onset import EXPLODED_LOGITS

DATA = "Is the input data wrong?"
NORM = "Is a norm wrong?"
RATE = "Is the learning rate too high, and where?"
CLIPPING = "Would clipping have held it, and at which norm?"
START = "Is the initialisation off?"

# Findings about what a norm computes, its parameters, its place and its type; F9 is about its eps.
_OF_NORMS = "ABCDE"
# Of these, what notes say against "formula, place and number type hold".
_OF_FORMULAS = "ADE"
_OF_DATA = ("F16", "F17", "F18", "F19", "F27")
_OF_PROCESSES = ("E8", "E7")
_DONE_TO_IT = ("F23", "F24", "F25", "F20", "F21", "F22", "F26")
# Steps that do not descend: their size says nothing about the learning rate.
_NO_DESCENT = {"F23", "F24"}
_OF_STARTS = ("F12", "B5")
# Consequences of steps that are too large, and of a bad initialisation.
_FOLLOW = ("F1", "F2", "F4", "F5", "F11", *_OF_STARTS)
_DONE = ("input data", "parameter", "norm", "block")
# Where to clip, in multiples of the usual gradient norm: 99 % of 1632 healthy steps of the demo models are below 2.03.
_CLIP = 2.0


Reply = tuple[Verdict, str, tuple[str, ...]]
"""Verdict, detail and places of an answer."""


def answer(
    training: Training,
    findings: Sequence[Finding],
    sites: Sequence[Site],
    blocks: Sequence[Block],
    attentions: Sequence[Attention],
    num_batch_norms: int = 0,
    others: Sequence[OtherNorm] = (),
) -> Training:
    """Fill in the five answers, what to change first and how to confirm it.

    Findings come worst first, and notes among them answer nothing; norms, blocks and attention calls are those at the
    last report; the run knows where it began.
    """
    grave = [finding for finding in findings if finding.severity != "note"]
    began = training.origin
    replies = {
        DATA: _data(findings, training),
        NORM: _norm(findings, sites, training, num_batch_norms, others),
        RATE: _rate(attentions, began, training),
        CLIPPING: _clipping(began, training),
        START: _start(grave, blocks, training),
    }
    answers = tuple(
        Answer(question=question, verdict=verdict, detail=detail, places=places)
        for question, (verdict, detail, places) in replies.items()
    )
    changes = _changes(grave, sites, began, answers, training)
    confirm = "Nothing is to be changed."
    if changes:
        first = next((each for each in grave if changes[0].endswith(each.remedy[0])), None)
        check = f" To see it at once: {first.confirm}." if first is not None else ""
        alone = "Make the first change alone, keep seed and batches, and run past step"
        confirm = f"{alone} {training.reason_step}: what was found there is gone.{check}"
    return replace(training, answers=answers, first_change=changes, confirm=confirm)


def _data(findings: Sequence[Finding], training: Training) -> Reply:
    wrong = [each for each in findings if each.rule in _OF_DATA]
    fed = described(training)
    if grave := [each for each in wrong if each.severity != "note"]:
        return "yes", f"{_told(grave)}.", ()
    if not fed:
        return "unknown", "No batch was seen: the model's call is compiled, or takes no tensor.", ()
    labels = "" if training.of("labels") else "; labels were not seen"
    if wrong:
        return "unknown", f"{_told(wrong)}: right only where that is meant{labels}.", ()
    return "no", f"{fed}{labels}.", ()


def _told(findings: Sequence[Finding]) -> str:
    """Titles and numbers of the first two."""
    told = "; ".join(f"{each.title[0].lower()}{each.title[1:]}: {each.measured}" for each in findings[:2])
    return told + (f"; and {len(findings) - 2} more" if len(findings) > 2 else "")


def _norm(
    findings: Sequence[Finding],
    sites: Sequence[Site],
    training: Training,
    num_batch_norms: int,
    others: Sequence[OtherNorm],
) -> Reply:
    grave = [finding for finding in findings if finding.severity != "note"]
    if wrong := [each for each in grave if _is_of_norms(each, sites, training)]:
        return "yes", f"{_told(wrong)}.", tuple(dict.fromkeys(path for each in wrong for path in each.sites))
    # A kind of norm that is known has its own rules.
    unread = [other for other in others if other.passport.verdict not in ("batch", "gated", "adaptive")]
    if not sites and num_batch_norms and not unread and not any(each.rule == "E3" for each in grave):
        return "no", f"{counted(num_batch_norms, 'batch norm')}: no fault in statistics, gains and biases.", ()
    if not sites and not others:
        return "unknown", "The model has no norm.", ()
    if unread or not sites:
        undescribed = unread or others
        among = f" of {len(sites) + len(undescribed)}" if sites else ""
        first = f"{undescribed[0].path}: {undescribed[0].reason}"
        told = f"No spec describes {counted(len(undescribed), 'norm')}{among}, so what they compute was not judged"
        return "unknown", f"{told}. {first}.", tuple(other.path for other in undescribed)
    if any(each.rule == "E3" for each in grave):
        return "no", "NaN or infinity came to the norms with their input; they did not make them.", ()
    short = max((site.attenuation.share_below_99 for site in sites), default=math.nan)
    measured = f"{counted(len(sites), 'norm')}, measured in {counted(training.reports, 'step')}"
    eps = "" if math.isnan(short) else f"; eps shortens at most {percent(short)} of a norm's rows by more than 1 %"
    noted = [each for each in findings if each.rule[0] in _OF_FORMULAS and _is_of_norms(each, sites, training)]
    holds = "no fault but what is noted" if noted else "formula, gain, place and number type hold"
    notes = f" Noted: {_told(noted)}." if noted else ""
    return "no", f"{measured}: {holds}{eps}.{notes}", ()


def _is_of_norms(finding: Finding, sites: Sequence[Site], training: Training) -> bool:
    if finding.rule == "E3" and training.origin is not None and training.broken:
        # A bad number in a norm's own gain or bias came with no input.
        at = training.origin.path
        if any(site.path == at for site in sites) and any(name.rpartition(".")[0] == at for name in training.broken):
            return True
    if finding.rule == "E3" and finding.sites:
        # NaN in the input of the first norm was made elsewhere.
        first = next((site for site in sites if site.path == finding.sites[0]), None)
        return first is not None and not first.input.nonfinite
    if finding.rule == "F20":
        return not {site.path for site in sites}.isdisjoint(finding.sites)
    return finding.rule in ("F9", "F21", "F26") or (finding.rule[0] in _OF_NORMS and finding.rule not in _OF_PROCESSES)


def _rate(attentions: Sequence[Attention], began: Origin | None, training: Training) -> Reply:
    seen, large = update_sizes(training), too_large(training)
    if began is not None and began.kind == "learning rate":
        return "yes", f"In step {began.step} {began.detail}.", ()
    if not seen:
        return "unknown", "No optimizer step was measured: give the optimizer to watch.", ()
    worst = max(seen, key=lambda update: update.excess)
    largest = max((each.bound for each in attentions if math.isfinite(each.bound)), default=math.nan)
    logits = f" Attention logits may reach {largest:.3g}." if largest > EXPLODED_LOGITS else ""
    steps = counted(len(seen), "measured step")
    if not large:
        allowed = f", and fewer than {MANY_STEPS} such steps, or Adam's first ones, do no harm"
        limit = f"{percent(worst.excess)} of the limit{allowed if worst.excess > 1 else ''}"
        return "no", f"The largest of {steps} changed {worst}: {limit}.{logits}", ()
    passed = f"{worst.excess:.2g} times the limit, which {len(large)} of {steps} passed"
    places = tuple(dict.fromkeys(update.place for update in sorted(large, key=lambda update: -update.excess)))
    return "yes", f"Step {worst.step} changed {worst}: {passed}.{logits}", places


def _clipping(began: Origin | None, training: Training) -> Reply:
    """The healthy part of the run says where to clip; the spike, what that would have done."""
    norms = next((series for series in training.of("gradient norm") if not series.path), None)
    if norms is None or not norms.values:
        return "unknown", "No gradient norm was measured.", ()
    if began is not None and began.kind in ("non-finite in the forward pass", "non-finite loss"):
        came = f"In step {began.step} NaN or infinity came up in the forward pass"
        return "no", f"{came}, before there was a gradient to clip.", ()
    if began is not None and began.kind == "non-finite in the backward pass":
        was = f"In step {began.step} the gradient itself was NaN or infinite"
        return "no", f"{was}, and stays so when it is clipped.", ()
    rise = _rise(norms, training)
    if rise is None:
        finite = [value for value in norms.values if math.isfinite(value)]
        if len(finite) < FEWEST:
            few = f"{len(finite)} steps are too few to know the usual gradient norm"
            return "unknown", f"{few}; {FEWEST} are needed.", ()
        recent = finite[-WINDOW:]
        norm = f"the gradient norm had a median of {median(recent):.3g} and was at most {max(recent):.3g}"
        return "no", f"There was no spike to hold: over the last {len(recent)} steps {norm}.", ()
    step, value, usual = rise
    factor, limit = value / usual, _CLIP * usual
    # The share of the gradient's norm that an optimizer got, at each step.
    kept = {when: share for series in training.of("gradient kept") for when, share in series.pairs()}
    if cut := {when: share for when, share in kept.items() if share < CUT}:
        clips = f"The loop clips already: it cut the gradient in {len(cut):,} of {counted(len(kept), 'step')}"
        was = f"in step {step} it was {value:.3g}, {factor:.2g} times its usual {usual:.3g}"
        end = f"cut to {cut[step] * value:.3g}" if step in cut else "not cut"
        return "no", f"{clips}; {was}, and was {end}.", ()
    grown = f"{factor:.2g} times its usual {usual:.3g}"
    if factor <= _CLIP:
        return "no", f"The gradient norm had not grown: {value:.3g} in step {step}, {grown}.", ()
    if began is not None and began.kind in ("update", "attention logits", "stream") and began.step < step:
        would = f"It would have cut the gradient of step {step} ({value:.3g}, {grown})"
        return "no", f"{would}, but this began before, in step {began.step}, with the {began.kind}.", ()
    usually = f"At {limit:.2g}, twice the usual gradient norm of {usual:.3g}"
    cut_by = f"in step {step} it was {value:.3g}, and would have been cut {value / limit:.2g} times"
    return "yes", f"{usually}: {cut_by}.", ()


def _rise(norms: Series, training: Training) -> tuple[int, float, float] | None:
    """Step, size and usual size of the gradient where it or the loss jumped; None where nothing did."""
    found = jumps(norms)
    if found:
        largest = max(found, key=lambda jump: jump.factor)
        return largest.peak, largest.value, largest.usual
    spikes = [jump for series in training.of("loss") for jump in jumps(series)]
    for spike in spikes[:1]:
        past = [value for step, value in norms.pairs() if step < spike.began and math.isfinite(value)][-WINDOW:]
        around = [pair for pair in norms.pairs() if spike.began <= pair[0] <= spike.peak and math.isfinite(pair[1])]
        if past and around:
            step, value = max(around, key=lambda pair: pair[1])
            return step, value, median(past)
    return None


def _start(findings: Sequence[Finding], blocks: Sequence[Block], training: Training) -> Reply:
    if off := [each for each in findings if each.rule in _OF_STARTS]:
        told = "; ".join(line for each in off for line in each.evidence[:2])
        places = tuple(dict.fromkeys(path for each in off for path in each.sites))
        # A path keeps its letters.
        return "yes", f"{told if told.startswith(places or '.') else told[0].upper() + told[1:]}.", places
    loss = start_of(training, "loss")
    if math.isnan(loss):
        return "unknown", "The first step was not seen, so its loss cannot be judged.", ()
    if not training.vocabulary:
        return "unknown", "The number of entries of the output is not known, so its loss cannot be judged.", ()
    uniform = math.log(training.vocabulary)
    if loss > NOT_A_MEAN * uniform:
        return "unknown", f"The first loss is {loss:.3g}: it is a sum over tokens and no mean, and is not judged.", ()
    detail = f"The first loss is {loss:.3g}, {loss / uniform:.3g} times log({training.vocabulary}) = {uniform:.3g}."
    streams = {each.path: each.values[0] for each in training.of("stream rms") if each.steps[:1] == (0,)}
    for depth in stacks(streams) if len(blocks) > 1 else ():
        if len(depth) > 1:
            first, last = (f"{streams[path]:.3g}" for path in (depth[0], depth[-1]))
            detail += f" The stream's rms goes from {first} behind {depth[0]} to {last} behind {depth[-1]}."
    return "no", detail, ()


def _changes(
    findings: Sequence[Finding],
    sites: Sequence[Site],
    began: Origin | None,
    answers: Sequence[Answer],
    training: Training,
) -> tuple[str, ...]:
    """Root causes first: where NaN begins, data, processes, changes, norms, the start, the rate; then clipping."""
    data, norm, rate, clipping, start = answers
    kind = "" if began is None else began.kind
    changes = []
    if began is not None and kind.startswith("non-finite"):
        where = f" at {began.path}" if began.path else ""
        changes.append(
            f"go back to the weights before step {began.step}: {training.broken[0]} is broken; see what wrote to it"
            if training.broken
            else f"see what is computed in step {began.step}{where}: the batch, masks, divisions, logarithms"
        )
    roots = [each for rules in (_OF_DATA, _OF_PROCESSES, _DONE_TO_IT) for each in findings if each.rule in rules]
    roots += [each for each in findings if _is_of_norms(each, sites, training)]
    roots += [each for each in findings if each.rule in _OF_STARTS]
    changes += [_remedy(each) for each in roots]
    if began is not None and kind == "learning rate":
        changes.append(f"see what sets the learning rate in step {began.step}: {began.detail}")
    elif rate.verdict == "yes" and kind not in _DONE and _NO_DESCENT.isdisjoint(each.rule for each in findings):
        large = too_large(training)
        worst = max(large, key=lambda update: update.excess)
        if [update.step for update in large] == [0] and training.steps > 1:
            changes.append(f"warm the learning rate up: step 0 alone was {worst.excess:.2g} times past the limit")
        else:
            # The factor that brings every measured step below its limit, rounded up to one digit.
            digit = 10.0 ** math.floor(math.log10(worst.excess))
            factor = max(2.0, math.ceil(worst.excess / digit) * digit)
            rates = [each.learning_rate for each in training.parameters if each.learning_rate > 0]
            to = f", from {max(rates):.2g} to {max(rates) / factor:.1g}" if rates else ""
            changes.append(f"lower the learning rate about {factor:.0f} times{to}")
    has_cause = "yes" in (data.verdict, rate.verdict, start.verdict) or bool(changes)
    changes += [
        _remedy(each)
        for each in findings
        if each not in roots and not (has_cause and each.rule in (*_FOLLOW, "E3")) and each.rule != "F5"
    ]
    if clipping.verdict == "yes":
        changes.append(f"clip the gradient norm {clipping.detail.partition(',')[0].lower()}")
    verdicts = (data.verdict, norm.verdict, start.verdict)
    if began is not None and kind in ("loss", "gradient") and "yes" not in verdicts:
        changes.append(f"look at the batch of step {began.step}, and leave it out if it is not what the others are")
    return tuple(dict.fromkeys(changes))


def _remedy(finding: Finding) -> str:
    if not finding.sites:
        return finding.remedy[0]
    return f"at {shortened(finding.sites, 1)}: {finding.remedy[0]}"
