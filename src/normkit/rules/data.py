"""Group F, the data: inputs not finite, out of scale, constant or other than before, repeated batches, wrong labels.

Each flaw is judged from the batches and labels of a run alone, and has its first step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from normkit.measurement.history import LIMIT, WINDOW, jumps, robust_z
from normkit.measurement.training import Quantity, Training
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import NO_RUN, Hit, NotChecked, Outcome, Rule, measured, worst
from normkit.text import percent

# Limits of the rms of inputs that are no ids, and of the factor over the usual rms.
_LARGE, _SUDDEN = 1e3, 30.0
# Steps with the same batch; labels of which no two differ; share of labels that are the input at another place.
_STUCK, _LABELS_SEEN, _SAME_SHARE = 16, 256, 0.95
_LASTS = 4
_FEWEST_PAST, _VARIED = 4, 16
_FEWEST_LABELS = 64
# Fewer tokens may be alike by chance, as a token that begins each text.
_FEWEST_TOKENS = 8
# Batches that differ so much from their past, in a step in which the loss jumps; alone, either may be healthy.
_OTHER = 1.25
_LOOK = "print the first elements of the batch of that step, as the model is given it"


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """One thing that is wrong with the data."""

    kind: str
    step: int
    """The first step with it."""
    severity: Severity
    measured: str
    """The numbers, in words."""


def flaws(training: Training) -> tuple[Flaw, ...]:
    """All flaws of a run's data, the earliest first."""
    judges: tuple[Callable[[Training], Flaw | None], ...] = (
        *(_not_finite, _out_of_scale, _constant, _repeated, _copies, _shifted, _constant_labels),
        _other_data,
    )
    found = [flaw for judge in judges if (flaw := judge(training)) is not None]
    return tuple(sorted(found, key=lambda flaw: flaw.step))


def grave(training: Training) -> Iterator[Flaw]:
    """The flaws that are more than a note."""
    return (flaw for flaw in flaws(training) if flaw.severity != "note")


def described(training: Training) -> str:
    """The inputs of the run in a sentence; "" if no batch was seen."""
    digests = list(_values(training, "batch digest").values())
    if not digests:
        return ""
    parts = [f"{len(digests)} batches" if len(digests) > 1 else "One batch"]
    if len(digests) > 1:
        again = sum(one == other for one, other in itertools.pairwise(digests))
        parts.append("no two in a row alike" if not again else f"{again} sampled as the one before")
    if distinct := list(_values(training, "batch distinct").values()):
        parts.append(f"{min(distinct):.0f} to {max(distinct):.0f} different values in a sample of each")
    if shares := list(_values(training, "labels next").values()):
        parts.append(f"{100 * median(shares):.0f} % of the labels are the next input")
    return ", ".join(parts)


def _values(training: Training, quantity: Quantity) -> dict[int, float]:
    return dict(measured(training, quantity))


def _in_steps(steps: Sequence[int]) -> str:
    """In which steps, in words."""
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return f"in step {first}"
    if last - first + 1 == len(steps):
        return f"in steps {first} to {last}"
    return f"in {len(steps)} steps from step {first} on"


def _found(facts: Facts, *kinds: str, needs: Quantity = "batch digest") -> Outcome:
    """The flaws of these kinds as one outcome, the earliest first."""
    if facts.training is None:
        return NO_RUN
    if not facts.training.of(needs):
        return NotChecked("no batch was seen" if needs == "batch digest" else "no labels of a cross-entropy were seen")
    found = [flaw for flaw in flaws(facts.training) if flaw.kind in kinds]
    if not found:
        return None
    return Hit(
        severity=worst([flaw.severity for flaw in found]),
        sites=(),
        measured=found[0].measured,
        evidence=tuple(f"from step {flaw.step} on: {flaw.measured}" for flaw in found),
    )


@Rule(
    id="F16",
    title="The input is out of range",
    severity="error",
    threshold=(
        f"NaN or infinity in the model's input (error); of input that is no ids: rms {_SUDDEN:g} times its usual at "
        f"once (error), or above {_LARGE:g} in most steps (warning; error in a run that broke)"
    ),
    source="prs-eth/Marigold#111 (NaN), BVLC/caffe#409 (a data set of one's own)",
    why=(
        "All activations follow the scale of the input until the first norm, and so do the gradients of the first "
        "weights: the consequences look like a learning rate that is too high."
    ),
    remedy=(
        "standardize the input, with the statistics of the training data",
        "look for units, and for broken files",
    ),
    confirm=_LOOK,
    looks_at=("run",),
)
def input_out_of_range(facts: Facts) -> Outcome:
    """Inputs that are NaN or infinite, or far larger than usual."""
    return _found(facts, "not finite", "out of scale")


def _not_finite(training: Training) -> Flaw | None:
    bad = [step for step, value in measured(training, "batch largest") if not math.isfinite(value)]
    if not bad:
        return None
    words = f"the input holds NaN or infinity {_in_steps(bad)}"
    return Flaw(kind="not finite", step=bad[0], severity="error", measured=words)


def _out_of_scale(training: Training) -> Flaw | None:
    """Far above the numbers that networks are made for, or far above its own past."""
    past: list[float] = []
    sudden, large = [], []
    sizes = measured(training, "batch rms")
    for step, size in sizes:
        if math.isfinite(size):
            usual = median(past[-128:]) if len(past) >= _FEWEST_PAST else math.nan
            if size > _SUDDEN * usual > 0:
                sudden.append((step, size, usual))
            elif size > _LARGE:
                large.append((step, size))
            if not size > _SUDDEN * usual:
                past.append(size)
    if sudden:
        step, size, usual = sudden[0]
        words = f"the input's rms is {size:.3g} in step {step}, {size / usual:.3g} times its usual {usual:.3g}; "
        words += _in_steps([at for at, *_ in sudden])
        return Flaw(kind="out of scale", step=step, severity="error", measured=words)
    if len(large) <= len(sizes) / 2:
        return None
    step, size = large[0]
    severity: Severity = "error" if training.origin is not None else "warning"
    words = f"the input's rms is {size:.3g} in step {step}, and networks are made for numbers near 1"
    return Flaw(kind="out of scale", step=step, severity=severity, measured=words)


@Rule(
    id="F17",
    title="The input is constant",
    severity="error",
    threshold=(
        "one value in a whole sample of a batch, or two where there were 16 (warning; error from 4 steps on); of "
        f"an inspection: {_FEWEST_TOKENS} tokens or more that are all the same (warning)"
    ),
    source="batches that make a run break: Chowdhery et al. 2022, arXiv:2204.02311",
    why="A batch without content has nothing to learn from: the loss may even fall, and the model forgets.",
    remedy=(
        "look at the output of the loader from that step on: padding, a file that ended, a dead worker",
        "of an inspection: give a text, and look at the tokens that the tokenizer made of it",
    ),
    confirm=_LOOK,
    looks_at=("run",),
)
def constant_input(facts: Facts) -> Outcome:
    """Batches of one value; or an inspection on a text of one token, again and again."""
    if facts.training is None and facts.model.distinct == 1 and facts.model.tokens >= _FEWEST_TOKENS:
        return Hit(
            severity="warning",
            sites=(),
            measured=f"all {facts.model.tokens} tokens of the text are the same token",
            evidence=(
                "all rows are nearly alike: the results on activations, logits, headroom and idle blocks hold for this "
                "one token, and for no other text",
            ),
        )
    return _found(facts, "constant")


def _constant(training: Training) -> Flaw | None:
    counts = _values(training, "batch distinct")
    past: list[float] = []
    alike = []
    for step, count in counts.items():
        is_low = count == 1 or (count <= 2 and len(past) >= _FEWEST_PAST and median(past[-128:]) >= _VARIED)
        alike += [step] if is_low else []
        past += [] if is_low else [count]
    # NaN has one value, and a finding of its own.
    largest = _values(training, "batch largest")
    alike = [step for step in alike if math.isfinite(largest.get(step, 0.0))]
    if not alike:
        return None
    what = "one value" if all(counts[step] == 1 for step in alike) else "at most two values"
    severity: Severity = "error" if len(alike) >= _LASTS else "warning"
    words = f"the model's input has {what} {_in_steps(alike)}"
    return Flaw(kind="constant", step=alike[0], severity=severity, measured=words)


@Rule(
    id="F18",
    title="The same batch or sample comes again and again",
    severity="error",
    threshold=(
        f"the last {_STUCK} steps or more on one batch, four times as many as any batch before had (error); in "
        f"{_LASTS} steps or more, the last among them, all samples of a batch equal (warning); all steps on one batch "
        "(note)"
    ),
    source="Trusted-AI/adversarial-robustness-toolbox#728; repeated text is memorized: arXiv:2107.06499",
    why=(
        "The model learns that batch by heart, and its loss says nothing any more. All steps on one batch are "
        "also how one tries whether a model can learn at all: then it is meant. A batch of one sample many times has "
        "the gradient of that sample, and the statistics of batch norms are those of one."
    ),
    remedy=(
        "see that the loop takes the next batch in each step, and that no seed is set within the loop",
        "of samples: look at the sampler, and at what puts samples together to a batch",
    ),
    confirm="the digest of the batch is another in each step",
    looks_at=("run",),
)
def repeated_batch(facts: Facts) -> Outcome:
    """One batch, or batches of one sample, to the end of the run."""
    return _found(facts, "repeated", "copies")


def _copies(training: Training) -> Flaw | None:
    """Batches of equal samples to the end of the run."""
    shares = _values(training, "batch copies")
    steps = [step for step in _values(training, "batch digest") if shares.get(step, 0.0) == 1]
    digests = measured(training, "batch digest")
    if len(steps) < _LASTS or steps[-1] != digests[-1][0] or _constant(training) is not None:
        return None
    words = f"all samples of a batch are equal, {_in_steps(steps)}"
    return Flaw(kind="copies", step=steps[0], severity="warning", measured=words)


def _repeated(training: Training) -> Flaw | None:
    """The same batch to the end: a stretch that is still going on, and far longer than any before it."""
    stretches = [
        [step for step, _ in stretch]
        for _, stretch in itertools.groupby(measured(training, "batch digest"), key=lambda pair: pair[1])
    ]
    if not stretches or len(stretches[-1]) < _STUCK or _constant(training) is not None:
        return None
    last, before = stretches[-1], stretches[:-1]
    if not before:
        # One batch for good is how one tries whether a model can learn at all, and how small data are used whole.
        words = f"all {len(last)} steps are on the same batch"
        return Flaw(kind="repeated", step=last[0], severity="note", measured=words)
    # Several passes over a batch before the next one comes are a method, of reinforcement learning for one.
    if len(last) < 4 * max(map(len, before)):
        return None
    words = f"the last {len(last)} steps, from step {last[0]} on, are on the same batch; {len(before)} came before"
    return Flaw(kind="repeated", step=last[0], severity="error", measured=words)


@Rule(
    id="F19",
    title="The labels are wrong",
    severity="error",
    threshold=(
        f"in 4 steps or more {percent(_SAME_SHARE)} of the labels are the input at their own place, the one before "
        f"or the next but one (error); {_LABELS_SEEN} labels or more, to the end of the run, all the same (warning)"
    ),
    source="huggingface/transformers#32944 (shifted twice) and #27517 (not shifted)",
    why=(
        "A label that is in the input already asks the model to copy it, and a constant one asks for nothing: "
        "the loss falls far below what language allows. Labels that are shifted twice leave out a token."
    ),
    remedy=(
        "the label of place t is the input of place t + 1: shift once, in the loop or in the model",
        "look at how the labels are made",
    ),
    confirm="print one row of inputs above its labels, as the loss is given them",
    looks_at=("run",),
)
def wrong_labels(facts: Facts) -> Outcome:
    """Labels that copy the input, that are shifted twice, or that are all the same."""
    return _found(facts, "shifted labels", "constant labels", needs="labels")


def _shifted(training: Training) -> Flaw | None:
    """Labels that can be read off the input at their own place or the one before, or that were shifted twice."""
    seen, following = _values(training, "labels"), _values(training, "labels next")
    wheres: tuple[tuple[Quantity, str], ...] = (
        ("labels copied", "the input at their own place"),
        ("labels back", "the input one place before theirs"),
        ("labels then", "the next input but one: shifted twice"),
    )
    for quantity, where in wheres:
        steps = [
            step
            for step, share in measured(training, quantity)
            if share >= _SAME_SHARE and following.get(step, 0.0) < _SAME_SHARE
        ]
        count = sum(seen.get(step, 0.0) for step in steps)
        if count >= _FEWEST_LABELS and len(steps) >= _LASTS:
            words = f"at least {100 * _SAME_SHARE:.0f} % of {count:.0f} sampled labels are {where}, {_in_steps(steps)}"
            return Flaw(kind="shifted labels", step=steps[0], severity="error", measured=words)
    return None


def _constant_labels(training: Training) -> Flaw | None:
    seen = _values(training, "labels")
    last: list[int] = []
    for step, spread in measured(training, "label spread"):
        last = [*last, step] if spread == 0 else []
    count = sum(seen[step] for step in last)
    if count < _LABELS_SEEN or len(last) < _LASTS or _constant(training) or _copies(training):
        return None
    words = f"{count:.0f} sampled labels: those of one step are all the same, {_in_steps(last)}"
    return Flaw(kind="constant labels", step=last[0], severity="warning", measured=words)


@Rule(
    id="F27",
    title="The data changed where the loss rose",
    severity="warning",
    threshold=(
        f"in a step in which the loss jumps, a number of different values, an rms of ids or of other input that is "
        f"{_OTHER:g} times its usual or under the {_OTHER:g}th part, and {LIMIT:g} robust standard deviations from it"
    ),
    source="batches that make a run break: Chowdhery et al. 2022, arXiv:2204.02311",
    why=(
        "Another file, a shard that is no text, another tokenizer or a transform that fell away give other numbers "
        "than before: the model meets what it was not trained on, and its loss rises at once."
    ),
    remedy=(
        "look at what the loader gives in that step: which file or shard, and which transforms",
        "if the data are meant to change there, as in a curriculum, lower the learning rate for the change",
    ),
    confirm=_LOOK,
    looks_at=("run",),
)
def other_data(facts: Facts) -> Outcome:
    """Batches unlike those before them, from the step on in which the loss jumps."""
    return _found(facts, "other")


def _other_data(training: Training) -> Flaw | None:
    told = (_not_finite(training), _out_of_scale(training), _constant(training))
    spikes = [jump for series in training.of("loss") for jump in jumps(series)]
    kinds: tuple[tuple[Quantity, str], ...] = (
        ("batch distinct", "number of different values in a sample"),
        ("id rms", "ids' rms"),
        ("batch rms", "input's rms"),
    )
    for spike, (quantity, what) in itertools.product(spikes if not any(told) else (), kinds):
        values = measured(training, quantity)
        past = [value for step, value in values if step < spike.began][-WINDOW:]
        since = [pair for pair in values if pair[0] >= spike.began]
        # Most spikes have the usual data, so that the steps after them need not be read.
        if any(step <= spike.peak and _is_other(past, value) for step, value in since):
            other = [(step, value) for step, value in since if _is_other(past, value)]
            (step, value), usual = other[0], median(past)
            words = f"the {what} is {value:.3g} in step {step}, usually {usual:.3g}, and the loss rose from "
            words += f"{spike.usual:.3g} to {spike.value:.3g} there"
            more = f"; such batches came {_in_steps([at for at, _ in other])}" if len(other) > 1 else ""
            return Flaw(kind="other", step=step, severity="warning", measured=words + more)
    return None


def _is_other(past: Sequence[float], value: float) -> bool:
    """Far from its past, either way."""
    if past and 1 / _OTHER < value / median(past) < _OTHER:
        return False
    return abs(robust_z(past, value, in_logarithms=True)) > LIMIT


RULES = (input_out_of_range, constant_input, repeated_batch, wrong_labels, other_data)
"""The rules of this file."""
