"""Group F, interventions in a run: parameters changed by no optimizer, norms and blocks that stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from normkit.measurement.training import Change, Stop, Training
from normkit.rules.finding import Severity
from normkit.rules.rule import NO_RUN, Case, Facts, NotChecked, Outcome, Rule, hit
from normkit.text import counted

_LARGE = 3.0
_KINDS = {"gain": "the norm's gain", "bias of a norm": "the norm's bias"}


def _changed(facts: Facts) -> Outcome:
    """Gains first: one of them changes all that passes its norm."""
    training = facts.training
    if training is None:
        return NO_RUN
    if not training.optimizers:
        return NotChecked("nothing is known of an optimizer: give it to nk.watch")
    kinds = {parameter.path: parameter for parameter in training.parameters}
    cases = []
    for change in training.changes:
        parameter = kinds.get(change.path)
        line = f"step {change.step}: {in_words(change)}"
        if parameter is not None and parameter.site:
            line += f"; it is {_KINDS[parameter.kind]}"
            cases.append(Case(parameter.site, "error", change.ratio + 1e6, line))
        else:
            severity: Severity = "error" if change.ratio >= _LARGE or change.factor == 0 else "warning"
            cases.append(Case(change.path, severity, change.ratio, line))
    if not cases:
        return None
    first = max(cases, key=lambda case: case.effect)
    measured = f"{first.line.partition(';')[0]}, by no optimizer"
    found = hit(sorted(cases, key=lambda case: -case.effect), measured, "parameter")
    return None if found is None else replace(found, evidence=(*found.evidence, *_exploded(training)))


def _exploded(training: Training) -> Iterator[str]:
    """The later logits of attentions whose weights were changed."""
    for series in training.of("logit bound"):
        steps = [change.step for change in training.changes if change.path.startswith(f"{series.path}.")]
        pairs = list(zip(series.steps, series.values, strict=True))
        before = [value for step, value in pairs if step < min(steps, default=0)]
        after = [value for step, value in pairs if step >= min(steps, default=0)]
        if before and after and max(after) > _LARGE * before[-1]:
            yield f"attention logits of {series.path} may reach {max(after):.3g} since, {before[-1]:.3g} before"


def in_words(change: Change) -> str:
    """The change in words."""
    if change.factor == 0:
        return f"{change.path} was set to 0"
    if not 0.8 < change.factor < 1.25:
        return f"{change.path} became {change.factor:.3g} times as large"
    return f"{change.path} was replaced: its change is {change.ratio:.3g} times its rms"


def _settings(facts: Facts) -> Outcome:
    """Numbers of a norm's module, which no training changes."""
    training = facts.training
    if training is None:
        return NO_RUN
    cases = []
    for each in training.settings:
        what = "its eps" if "eps" in each.name else "a number of its module"
        line = f"{each.path}: {each.name}, {what}, went from {each.before:.3g} to {each.after:.3g} by step {each.step}"
        cases.append(Case(each.path, "error" if "eps" in each.name else "note", 0.0, line))
    return hit(cases, cases[0].line if cases else "", "setting")


def _stopped_norms(facts: Facts) -> Outcome:
    training = facts.training
    if training is None:
        return NO_RUN
    gone = [stop for stop in training.stopped if stop.kind == "norm"]
    cases = [Case(stop.path, "error", stop.since, _stop_line(stop, "took part")) for stop in gone]
    return hit(cases, f"{counted(len(cases), 'norm')} no longer normalized; {cases[0].line}" if cases else "")


def _stopped_blocks(facts: Facts) -> Outcome:
    """Blocks that no longer run or write, and weights without a gradient."""
    training = facts.training
    if training is None:
        return NO_RUN
    cases = []
    for stop in training.stopped:
        if stop.kind == "block":
            cases.append(Case(stop.path, "error", stop.since, _stop_line(stop, "took part")))
        elif stop.kind == "gradient":
            cases.append(Case(stop.path, "warning", stop.since, _stop_line(stop, "had a gradient")))
    return hit(cases, cases[0].line if cases else "", "place")


def _stop_line(stop: Stop, did: str) -> str:
    return (
        f"{stop.path}: {did} in {counted(stop.before, 'measured step')}, and in none of the {stop.since} from step "
        f"{stop.step} on"
    )


RULES = (
    Rule(
        id="F20",
        title="Parameters were changed by no optimizer",
        severity="error",
        threshold=(
            "rms of what changed between two steps over the parameter's own above 50 %, or changes above 5 % that "
            "add up to twice its length in 4 steps or more: of a gain or bias of a norm, one set to 0, or past "
            f"{_LARGE:g} times (error), of others (warning)"
        ),
        source="resets of weights in a run: Sokar et al. 2023, arXiv:2302.12902; a healthy step moves some per cent",
        why=(
            "Something beside the optimizer writes to the model: a checkpoint that is loaded, a reset, a clip of "
            "weights, a bug. The optimizer's moments belong to the old values, as does all that was learnt around them."
        ),
        remedy=("find what writes to the parameter before that step, and go back to the weights before it",),
        confirm="compare the parameter behind one optimizer step and before the next: they are the same to the bit",
        check=_changed,
        looks_at=("run",),
    ),
    Rule(
        id="F21",
        title="A norm stopped running",
        severity="error",
        threshold="ran in 8 steps or more and in none of the last 8 or more, or gives out what it is given (error)",
        source="layers dropped at random come back: Fan et al. 2019, arXiv:1909.11556",
        why="Without its norm a branch sees the stream at any scale; what was trained behind it does not fit.",
        remedy=(
            "find what replaced or bypasses the norm at that step: a patched forward, a condition, an exchanged module",
        ),
        confirm="nk.identify(module, shape) on the norm as it is now",
        check=_stopped_norms,
        follows=("F20",),
        looks_at=("run",),
    ),
    Rule(
        id="F22",
        title="A block or weight stopped taking part",
        severity="error",
        threshold=(
            "a block that ran in 8 steps or more and in none of the last 8 or more, or hands on what it is given "
            "(error); a weight that had a gradient in so many and then none (warning)"
        ),
        source="dormant parts of networks: Sokar et al. 2023, arXiv:2302.12902",
        why="What no longer writes to the stream, or gets exactly no gradient, is paid for and learns nothing.",
        remedy=("find what changed at that step: a bypass, a weight of 0, a detached tensor, a frozen parameter",),
        confirm="the block's output differs from its input, and each of its weights has a gradient",
        check=_stopped_blocks,
        follows=("F20", "F21", "F23", "F24"),
        looks_at=("run",),
    ),
    Rule(
        id="F26",
        title="A norm's settings changed",
        severity="error",
        threshold="a plain number of a norm's module is another than at the report before (error if it is its eps)",
        source="the eps family: meta-llama/llama#771, pytorch/torchtune#290",
        why="What was trained around one eps meets another: rows that are short beside it come out shorter.",
        remedy=("find what sets it at that step: a config that is read again, a checkpoint of another model",),
        confirm="print the module before and behind that step",
        check=_settings,
        follows=("F20",),
        looks_at=("run",),
    ),
)
"""The rules of this group, in order."""
