"""A watched training run in words: what happened, where it began, the four answers, what to change first."""

from __future__ import annotations

import math
from dataclasses import replace

from normkit.measurement.history import LIMIT
from normkit.measurement.training import (
    CUT,
    Answer,
    Origin,
    OriginKind,
    Parameter,
    Quantity,
    Training,
    finite_or_highest,
)
from normkit.report.parts import Onset, Reply, Run
from normkit.show.parts import Cell, Column, Fact, Table, Tone, Verdict
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
"""What was measured of a run, and how."""

_MOST_ROWS = 12
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
    Column(key="path", heading="parameter"),
    Column(key="kind", heading="kind", meaning="by the module it belongs to, not by its name"),
    Column(key="block", heading="block", numeric=True),
    Column(key="rms", heading="rms", numeric=True),
    Column(key="gradient", heading="gradient rms", numeric=True, meaning="at the last report"),
    Column(
        key="update", heading="update ratio", numeric=True, meaning="rms of the last measured update over its own rms"
    ),
    Column(key="first", heading="at first", numeric=True, meaning="the same of the first measured update"),
    Column(key="rate", heading="learning rate", numeric=True),
    Column(key="decay", heading="weight decay", numeric=True),
)


def describe_training(training: Training, *, found: bool = False) -> Run:
    """The run in words; strings are not yet made safe to print.

    Args:
        training: The run.
        found: A rule found more than a note, so that a run in which nothing moved is not called good.
    """
    parameters = _parameter_table(training)
    return Run(
        verdict=_verdict(training, found=found),
        onset=_onset(training.origin) if training.origin else None,
        replies=tuple(_reply(answer, moved=training.origin is not None) for answer in training.answers),
        first_change=training.first_change,
        confirm=training.confirm,
        glance=_glance(training),
        parameters=parameters,
        worst=replace(parameters, title="Parameters that stand out", rows=parameters.rows[:_MOST_ROWS]),
        facts=_facts(training),
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
    detail = _seen(training)
    is_broken = training.worst == "error" or (origin is not None and "non-finite" in origin.kind)
    if origin is not None and training.was_noticed and origin.step < training.reason_step:
        detail += f" It began {counted(training.reason_step - origin.step, 'step')} earlier."
    if is_broken:
        return Verdict(tone="error", headline=headline, detail=detail)
    if origin is not None:
        return Verdict(tone="warning", headline=headline, detail=detail)
    if found or training.was_noticed:
        return Verdict(tone="neutral", headline=headline, detail=detail)
    return Verdict(tone="good", headline=headline, detail=f"{detail} Nothing left its usual range.")


def _seen(training: Training) -> str:
    """How much of the run was measured."""
    parts = ["Forward and backward" if training.steps == 1 else f"{training.steps:,} steps seen"]
    if training.reports > 1:
        times = "twice" if training.reports == 2 else f"{training.reports:,} times"
        often = f", every {training.every:,} steps" if training.every > 1 else ""
        parts.append(f"the norms measured {times}{often}")
    elif training.reports:
        parts.append("the norms measured once")
    if training.ranks > 1:
        parts.append(f"{training.ranks} processes pooled")
    return f"{', '.join(parts)}."


def _onset(origin: Origin) -> Onset:
    return Onset(what=f"step {origin.step:,}, {_FIRST[origin.kind]}", path=origin.path, detail=origin.detail)


def _reply(answer: Answer, *, moved: bool) -> Reply:
    # If something moved, "no" only excludes a cause and gets no tick.
    tones: dict[str, Tone] = {"yes": "warning", "no": "neutral" if moved else "good", "unknown": "note"}
    return Reply(
        tone=tones[answer.verdict],
        verdict=answer.verdict,
        question=answer.question,
        detail=answer.detail,
        places=answer.places,
    )


def _glance(training: Training) -> tuple[Fact, ...]:
    """One line per quantity; what was not measured is left out."""
    facts = []
    names: tuple[tuple[str, Quantity], ...] = (("loss", "loss"), ("gradient norm", "gradient norm"))
    for label, quantity in names:
        steps, values = training.largest(quantity)
        if not steps:
            continue
        text = f"{significant(values[0])} at step {steps[0]:,}"
        if len(steps) > 1:
            text += f", {significant(values[-1])} at step {steps[-1]:,}"
        if quantity == "loss" and training.vocabulary > 1:
            text += f"; {significant(math.log(training.vocabulary))} is chance among {training.vocabulary:,} entries"
        facts.append(Fact(label=label, value=text))
        if quantity == "loss":
            facts += _loss_z(training)
    facts += _rates(training)
    updated = [each for each in sorted(training.parameters, key=_badness) if not math.isnan(each.update_ratio)]
    if updated and training.optimizers:
        ratios = [f"{significant(each.update_ratio)} at {each.path}" for each in updated[:2]]
        facts.append(Fact(label="update ratio", value=", then ".join(ratios)))
    steps, values = training.largest("logit bound")
    if steps:
        facts.append(Fact(label="logit bound", value=f"{significant(values[-1])} at step {steps[-1]:,}"))
    room = [each for each in training.of("headroom") if not math.isnan(each.last)]
    if room:
        least = min(room, key=lambda each: each.last)
        text = f"{significant(least.last)} bits at step {least.steps[-1]:,}, the least of a norm: {least.path}"
        facts.append(Fact(label="headroom", value=text))
    return tuple(facts)


def _rates(training: Training) -> tuple[Fact, ...]:
    """The learning rate and the clipping as an optimizer met them."""
    facts = []
    steps, values = training.largest("learning rate")
    known = [pair for pair in zip(values, steps, strict=True) if math.isfinite(pair[0])]
    if known:
        (highest, step), (last, end) = max(known), known[-1]
        text = f"{significant(last)} at step {end:,}"
        if highest > last:
            text = f"at most {significant(highest)} at step {step:,}, {text}"
        facts.append(Fact(label="learning rate", value=text))
    steps, values = training.largest("gradient kept")
    cut = [pair for pair in zip(values, steps, strict=True) if pair[0] < CUT]
    if cut:
        least, step = min(cut)
        most = f"most in step {step:,}, to {rounded_percent(least)} of the gradient"
        text = f"in {len(cut):,} of {counted(len(steps), 'step')}, {most}"
        facts.append(Fact(label="clipped", value=text))
    return tuple(facts)


def _loss_z(training: Training) -> tuple[Fact, ...]:
    """How far losses were above earlier ones."""
    found = [pair for each in training.of("loss z") for pair in zip(each.values, each.steps, strict=True)]
    if not found:
        return ()
    (highest, step), (last, end) = max(found), found[-1]
    text = f"{significant(last)} at step {end:,}"
    if step != end:
        text = f"at most {significant(highest)} at step {step:,}, {text}"
    return (Fact(label="loss, z-score", value=f"{text}; above {LIMIT:g} is a jump"),)


def _facts(training: Training) -> tuple[Fact, ...]:
    facts = [Fact(label="optimizer", value=line) for line in training.optimizers]
    if training.ranks > 1:
        facts.append(Fact(label="processes", value=f"{training.ranks}, their numbers pooled"))
    if training.observer:
        facts.append(Fact(label="watch", value=training.observer))
    return (*facts, *(Fact(label="not watched", value=line) for line in training.remarks))


def _badness(parameter: Parameter) -> tuple[bool, bool, bool, float, float]:
    """Sort key, worst first: NaN, then the largest update, then the gradient; biases, which start at 0, come last."""
    broken = not math.isfinite(parameter.rms) or _is_broken_gradient(parameter)
    ratio = parameter.update_ratio
    return (
        not broken,
        not parameter.trained,
        parameter.is_bias,
        0.0 if math.isnan(ratio) else -finite_or_highest(ratio),
        -parameter.gradient_rms / parameter.rms if parameter.gradient_rms > 0 and parameter.rms > 0 else 0.0,
    )


def _is_broken_gradient(parameter: Parameter) -> bool:
    return parameter.gradient_steps > 0 and not math.isfinite(parameter.gradient_rms)


def _parameter_table(training: Training) -> Table:
    ordered = sorted(training.parameters, key=_badness)
    # Without an optimizer nothing is trained; there is no need to repeat that for each parameter.
    empty = set() if training.optimizers else {"update", "first", "rate", "decay"}
    if all(math.isnan(parameter.update_ratio) for parameter in ordered):
        empty |= {"update", "first"}
    columns = tuple(column for column in _COLUMNS if column.key not in empty)
    rows = tuple(
        tuple(_cells(parameter, judged=bool(training.optimizers))[column.key] for column in columns)
        for parameter in ordered
    )
    return Table(
        title="Parameters, the worst first", columns=columns, rows=rows, empty="No parameter of the run was seen."
    )


def _cells(parameter: Parameter, *, judged: bool) -> dict[str, Cell]:
    had_gradient = parameter.gradient_steps > 0
    gradient = significant(parameter.gradient_rms) if had_gradient else _NONE
    return {
        "path": Cell(text=parameter.path),
        "kind": Cell(text=parameter.kind + (", not trained" if judged and not parameter.trained else "")),
        "block": Cell(text=_NONE if parameter.block is None else str(parameter.block), value=_place(parameter.block)),
        "rms": Cell(text=significant(parameter.rms), value=parameter.rms),
        "gradient": Cell(text=gradient, value=parameter.gradient_rms),
        "update": _measured(parameter.update_ratio),
        "first": _measured(parameter.first_update_ratio),
        "rate": _measured(parameter.learning_rate),
        "decay": _measured(parameter.weight_decay),
    }


def _measured(value: float) -> Cell:
    """The number, or NaN if there is none."""
    return Cell(text=_NONE if math.isnan(value) else significant(value), value=value)


def _place(block: int | None) -> float:
    return math.nan if block is None else block
