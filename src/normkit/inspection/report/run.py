"""A watched training run in words: what happened, where it began, the answers, what to change first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from normkit.measurement.history import LIMIT
from normkit.measurement.training import (
    CUT,
    OriginKind,
    Parameter,
    Quantity,
    Training,
    finite_or_highest,
)
from normkit.show.parts import Column, Fact, Section, Table, Tone, Verdict
from normkit.text import counted, rounded_percent, significant

RUN_METHOD = (
    "Loss, batch, gradients, clipping, learning rate, updates and non-finite numbers were watched at every step of the "
    "run; the norms, the stream and the gradients by depth at its reports only.",
    "An update ratio is the rms of a parameter's change in one optimizer step over the parameter's own rms, on a fixed "
    "sample of its elements.",
    "Labels were read off the gradient of the logits, a sample of each batch; batches were compared by a digest.",
    "What began it is what was done to the run (its data, its parameters, its learning rate, a norm or block that "
    "stopped), else the number that left its own past first, or was not finite first.",
)
"""The measurements of a run and their method."""

_MOST_ROWS = 12
_TONES: dict[str, Tone] = {"yes": "warning", "no": "neutral", "unknown": "note"}
_NONE = "none"
# Headlines of runs that no finding ended.
_QUIET = {
    "asked": "Watched to step {}",
    "a look on the way": "On the way, at step {}",
    "end of the run": "Ran to its end, step {}",
}
_FIRST: dict[OriginKind, str] = {
    "non-finite in the forward pass": "NaN or infinity in the forward pass",
    "non-finite in the backward pass": "NaN or infinity in the backward pass",
    "non-finite loss": "a loss that is no number",
    "attention logits": "the attention logits",
    "update": "the update of a parameter",
    "gradient": "the gradient norm",
    "stream": "the residual stream",
    "loss": "the loss",
    "input data": "the input data",
    "parameter": "a parameter that no optimizer changed",
    "norm": "a norm that stopped running",
    "block": "a block that stopped running",
    "learning rate": "the learning rate",
}

_COLUMNS = (
    Column("path", "parameter"),
    Column("kind", "kind", meaning="by the module it belongs to, not by its name"),
    Column("block", "block", numeric=True),
    Column("rms", "rms", numeric=True),
    Column("gradient", "gradient rms", meaning="at the last report", numeric=True),
    Column("update", "update ratio", meaning="rms of the last measured update over its own rms", numeric=True),
    Column("first", "at first", meaning="the same of the first measured update", numeric=True),
    Column("rate", "learning rate", numeric=True),
    Column("decay", "weight decay", numeric=True),
)


def describe_run(training: Training, *, found: bool = False) -> Section:
    """The events of a run; strings are not yet made safe to print.

    With `found`, a rule found more than a note, and a run in which nothing moved is not called good.
    """
    origin = training.origin
    began = []
    if origin is not None:
        began.append(Fact("began at", f"step {origin.step:,}, {_FIRST[origin.kind]}"))
        began += [Fact("where", origin.path)] if origin.path else []
        began.append(Fact("measured", origin.detail))
    parts = []
    if training.answers:
        # If something moved, "no" only excludes a cause and gets no tick.
        tones = _TONES if origin is not None else {**_TONES, "no": "good"}
        answers = tuple(
            Section(
                title=answer.question,
                verdict=Verdict(tone=tones[answer.verdict], headline=answer.verdict, detail=answer.detail),
                notes=answer.places,
            )
            for answer in training.answers
        )
        parts.append(Section(id="answers", sections=answers))
    if training.first_change:
        parts.append(Section(id="changes", title="What to change first", notes=training.first_change))
    if training.confirm:
        parts.append(Section(id="confirm", title="How to confirm it", notes=(training.confirm,)))
    return Section(
        id="run",
        title="What happened",
        verdict=_verdict(training, found=found),
        facts=tuple(began),
        sections=tuple(parts),
    )


def describe_steps(training: Training) -> Section:
    """The numbers over the steps, every parameter, and how the run was watched."""
    facts = [Fact("optimizer", line) for line in training.optimizers]
    if training.ranks > 1:
        facts.append(Fact("processes", f"{training.ranks}, their numbers pooled"))
    if training.observer:
        facts.append(Fact("watch", training.observer))
    facts += [Fact("not watched", line) for line in training.remarks]
    return Section(
        id="steps",
        title="Over the steps",
        facts=_glance(training),
        tables=(_parameter_table(training),),
        sections=(Section(title="How it was watched", facts=tuple(facts)),) if facts else (),
    )


def _verdict(training: Training, *, found: bool) -> Verdict:
    origin, reason, step = training.origin, training.reason, f"{training.reason_step:,}"
    if not training.steps:
        return Verdict(tone="neutral", headline="No step was seen", detail="The watch ended before the first one did.")
    if origin is None and not training.reports and not training.series:
        detail = f"{counted(training.steps, 'step')} passed; why nothing was measured is told under “not watched”."
        return Verdict(tone="neutral", headline="The run was not measured", detail=detail)
    if training.was_noticed:
        headline = f"{reason[:1].upper()}{reason[1:]} at step {step}"
    else:
        headline = "One step watched" if training.steps == 1 else _QUIET[reason].format(step)
    # How much of the run was measured.
    parts = ["Forward and backward" if training.steps == 1 else f"{training.steps:,} steps seen"]
    if training.reports > 1:
        times = "twice" if training.reports == 2 else f"{training.reports:,} times"
        often = f", every {training.every:,} steps" if training.every > 1 else ""
        parts.append(f"the norms measured {times}{often}")
    elif training.reports:
        parts.append("the norms measured once")
    if training.ranks > 1:
        parts.append(f"{training.ranks} processes pooled")
    detail = f"{', '.join(parts)}."
    is_broken = training.worst == "error" or (origin is not None and "non-finite" in origin.kind)
    if origin is not None and training.was_noticed and origin.step < training.reason_step:
        detail += f" It began {counted(training.reason_step - origin.step, 'step')} earlier."
    if is_broken or origin is not None:
        return Verdict(tone="error" if is_broken else "warning", headline=headline, detail=detail)
    if found or training.was_noticed:
        return Verdict(tone="neutral", headline=headline, detail=detail)
    return Verdict(tone="good", headline=headline, detail=f"{detail} Nothing left its usual range.")


def _glance(training: Training) -> tuple[Fact, ...]:
    """One line per quantity; what was not measured is left out."""
    facts = []
    quantities: tuple[Quantity, ...] = ("loss", "gradient norm")
    for quantity in quantities:
        steps, values = training.largest(quantity)
        if not steps:
            continue
        text = _at(values[0], steps[0])
        if len(steps) > 1:
            text += f", {_at(values[-1], steps[-1])}"
        if quantity == "loss" and training.vocabulary > 1:
            text += f"; {significant(math.log(training.vocabulary))} is chance among {training.vocabulary:,} entries"
        facts.append(Fact(quantity, text))
        scores = [pair for each in training.of("loss z") for pair in zip(each.values, each.steps, strict=True)]
        if quantity == "loss" and scores:
            facts.append(Fact("loss, z-score", f"{_highest_and_last(scores)}; above {LIMIT:g} is a jump"))
    steps, values = training.largest("learning rate")
    if known := [pair for pair in zip(values, steps, strict=True) if math.isfinite(pair[0])]:
        facts.append(Fact("learning rate", _highest_and_last(known)))
    steps, values = training.largest("gradient kept")
    if cut := [pair for pair in zip(values, steps, strict=True) if pair[0] < CUT]:
        least, step = min(cut)
        most = f"most in step {step:,}, to {rounded_percent(least)} of the gradient"
        facts.append(Fact("clipped", f"in {len(cut):,} of {counted(len(steps), 'step')}, {most}"))
    updated = [each for each in sorted(training.parameters, key=_badness) if not math.isnan(each.update_ratio)]
    if updated and training.optimizers:
        ratios = [f"{significant(each.update_ratio)} at {each.path}" for each in updated[:2]]
        facts.append(Fact("update ratio", ", then ".join(ratios)))
    steps, values = training.largest("logit bound")
    if steps:
        facts.append(Fact("logit bound", _at(values[-1], steps[-1])))
    if room := [each for each in training.of("headroom") if not math.isnan(each.last)]:
        tightest = min(room, key=lambda each: each.last)
        bits = f"{significant(tightest.last)} bits at step {tightest.steps[-1]:,}"
        facts.append(Fact("headroom", f"{bits}, the least of a norm: {tightest.path}"))
    return tuple(facts)


def _at(value: float, step: int) -> str:
    return f"{significant(value)} at step {step:,}"


def _highest_and_last(pairs: Sequence[tuple[float, int]]) -> str:
    """The last of some (value, step), after the highest if that is another."""
    highest, last = max(pairs), pairs[-1]
    return _at(*last) if highest[0] <= last[0] else f"at most {_at(*highest)}, {_at(*last)}"


def _badness(parameter: Parameter) -> tuple[bool, bool, bool, float, float]:
    """Sort key, worst first: NaN, then the largest update, then the gradient; biases, which start at 0, come last."""
    broken = not math.isfinite(parameter.rms) or (
        parameter.gradient_steps > 0 and not math.isfinite(parameter.gradient_rms)
    )
    ratio = parameter.update_ratio
    return (
        not broken,
        not parameter.trained,
        parameter.is_bias,
        0.0 if math.isnan(ratio) else -finite_or_highest(ratio),
        -parameter.gradient_rms / parameter.rms if parameter.gradient_rms > 0 and parameter.rms > 0 else 0.0,
    )


def _parameter_table(training: Training) -> Table:
    """The parameters, the worst first; of many, the first few stand for all."""
    ordered = sorted(training.parameters, key=_badness)
    rows = []
    for each in ordered:
        # Without an optimizer nothing is trained; there is no need to repeat that for each parameter.
        is_frozen = bool(training.optimizers) and not each.trained
        measured = each.update_ratio, each.first_update_ratio, each.learning_rate, each.weight_decay
        rows.append(
            [
                each.path,
                each.kind + (", not trained" if is_frozen else ""),
                _NONE if each.block is None else str(each.block),
                significant(each.rms),
                significant(each.gradient_rms) if each.gradient_steps > 0 else _NONE,
                *(_NONE if math.isnan(value) else significant(value) for value in measured),
            ]
        )
    table = Table.of("Parameters, the worst first", _COLUMNS, rows, "No parameter of the run was seen.")
    empty = set() if training.optimizers else {"update", "first", "rate", "decay"}
    if all(math.isnan(each.update_ratio) for each in ordered):
        empty |= {"update", "first"}
    table = table.only(*(column.key for column in _COLUMNS if column.key not in empty))
    return replace(table, groups=table.rows[:_MOST_ROWS] if len(table.rows) > _MOST_ROWS else ())
