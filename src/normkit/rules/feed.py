"""Flaws of the data that a run was fed, judged from its batches and labels alone, each with its first step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from normkit.measurement.training import Quantity, Training
from normkit.rules.finding import Severity

LARGE, SUDDEN = 1e3, 30.0
"""rms of what is no ids past which it is out of scale, and by how many times its usual rms at once."""

STUCK, LABELS_SEEN, SAME_SHARE = 16, 256, 0.95
"""Steps with the same batch; labels without two that differ; share of labels that are the input at another place."""

_LASTS = 4
_FEWEST_PAST, _VARIED = 4, 16
_FEWEST_LABELS = 64


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
    found = [flaw for judge in _JUDGES for flaw in (judge(training),) if flaw is not None]
    return tuple(sorted(found, key=lambda flaw: flaw.step))


def _not_finite(training: Training) -> Flaw | None:
    bad = [step for step, value in _values(training, "batch largest").items() if not math.isfinite(value)]
    if not bad:
        return None
    return Flaw(
        kind="not finite", step=bad[0], severity="error",
        measured=f"the input holds NaN or infinity {_in_steps(bad)}",
    )  # fmt: skip


def _out_of_scale(training: Training) -> Flaw | None:
    """Far above what a network takes, or far above its own past."""
    past: list[float] = []
    sudden, large = [], []
    sizes = _values(training, "batch rms")
    for step, size in sizes.items():
        if math.isfinite(size):
            usual = median(past[-128:]) if len(past) >= _FEWEST_PAST else math.nan
            if size > SUDDEN * usual > 0:
                sudden.append((step, size, usual))
            elif size > LARGE:
                large.append((step, size))
            if not size > SUDDEN * usual:
                past.append(size)
    if sudden:
        step, size, usual = sudden[0]
        times = f"{size / usual:.3g} times its usual {usual:.3g}"
        return Flaw(
            kind="out of scale", step=step, severity="error",
            measured=f"the input's rms is {size:.3g} in step {step}, {times}; {_in_steps([at for at, *_ in sudden])}",
        )  # fmt: skip
    if len(large) <= len(sizes) / 2:
        return None
    step, size = large[0]
    return Flaw(
        kind="out of scale", step=step, severity="error" if training.origin is not None else "warning",
        measured=f"the input's rms is {size:.3g} in step {step}, where networks are made for numbers near 1",
    )  # fmt: skip


def _constant(training: Training) -> Flaw | None:
    counts = _values(training, "batch distinct")
    past: list[float] = []
    alike = []
    for step, count in counts.items():
        is_low = count == 1 or (count <= 2 and len(past) >= _FEWEST_PAST and median(past[-128:]) >= _VARIED)
        alike += [step] if is_low else []
        past += [] if is_low else [count]
    # NaN has one value, and a name of its own.
    alike = [step for step in alike if math.isfinite(_values(training, "batch largest").get(step, 0.0))]
    if not alike:
        return None
    what = "one value" if all(counts[step] == 1 for step in alike) else "at most two values"
    return Flaw(
        kind="constant", step=alike[0], severity="error" if len(alike) >= _LASTS else "warning",
        measured=f"all that the model is fed has {what} {_in_steps(alike)}",
    )  # fmt: skip


def _repeated(training: Training) -> Flaw | None:
    """The same batch to the end: a stretch that is still going on, and far longer than any before it."""
    digests = list(_values(training, "batch digest").items())
    stretches: list[list[int]] = []
    for place, (step, digest) in enumerate(digests):
        if place and digest == digests[place - 1][1]:
            stretches[-1].append(step)
        else:
            stretches.append([step])
    if not stretches or len(stretches[-1]) < STUCK or _constant(training) is not None:
        return None
    last, before = stretches[-1], stretches[:-1]
    if not before:
        # One batch for good is how one tries whether a model can learn at all, and how small data are used whole.
        measured = f"all {len(last)} steps are on the same batch"
        return Flaw(kind="repeated", step=last[0], severity="note", measured=measured)
    # Several passes over a batch before the next one comes are a method, of reinforcement learning for one.
    if len(last) < 4 * max(map(len, before)):
        return None
    measured = f"the last {len(last)} steps, from step {last[0]} on, are on the same batch; {len(before)} came before"
    return Flaw(kind="repeated", step=last[0], severity="error", measured=measured)


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
            for step, share in _values(training, quantity).items()
            if share >= SAME_SHARE and following.get(step, 0.0) < SAME_SHARE
        ]
        count = sum(seen.get(step, 0.0) for step in steps)
        if count >= _FEWEST_LABELS and len(steps) >= _LASTS:
            measured = (
                f"of {count:.0f} labels looked at, at least {100 * SAME_SHARE:.0f} % are {where}, {_in_steps(steps)}"
            )
            return Flaw(kind="shifted labels", step=steps[0], severity="error", measured=measured)
    return None


def _constant_labels(training: Training) -> Flaw | None:
    spreads, seen = _values(training, "label spread"), _values(training, "labels")
    last: list[int] = []
    for step, spread in spreads.items():
        last = [*last, step] if spread == 0 else []
    count = sum(seen[step] for step in last)
    if count < LABELS_SEEN or len(last) < _LASTS or _constant(training) is not None:
        return None
    return Flaw(
        kind="constant labels", step=last[0], severity="warning",
        measured=f"{count:.0f} labels looked at are all the same, {_in_steps(last)}",
    )  # fmt: skip


_JUDGES: Sequence[Callable[[Training], Flaw | None]] = (
    *(_not_finite, _out_of_scale, _constant, _repeated, _shifted, _constant_labels),
)


def described(training: Training) -> str:
    """The inputs of the run in a sentence; "" if no batch was seen."""
    digests = list(_values(training, "batch digest").values())
    if not digests:
        return ""
    parts = [f"{len(digests)} batches" if len(digests) > 1 else "One batch"]
    if len(digests) > 1:
        again = sum(one == other for one, other in itertools.pairwise(digests))
        parts.append("no two in a row alike" if not again else f"{again} the same as the one before")
    if distinct := list(_values(training, "batch distinct").values()):
        parts.append(f"{min(distinct):.0f} to {max(distinct):.0f} different values in a sample of each")
    if shares := list(_values(training, "labels next").values()):
        parts.append(f"{100 * median(shares):.0f} % of the labels are the next input")
    return ", ".join(parts)


def _values(training: Training, quantity: Quantity) -> Mapping[int, float]:
    return {
        step: value for series in training.of(quantity) for step, value in zip(series.steps, series.values, strict=True)
    }


def _in_steps(steps: Sequence[int]) -> str:
    """In which steps, in words."""
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return f"in step {first}"
    if last - first + 1 == len(steps):
        return f"in steps {first} to {last}"
    return f"in {len(steps)} steps from step {first} on"


def grave(training: Training) -> Iterator[Flaw]:
    """The flaws that are more than a note."""
    return (flaw for flaw in flaws(training) if flaw.severity != "note")
