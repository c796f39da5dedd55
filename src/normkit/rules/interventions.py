"""Group F, interventions in a run: parameters changed by no optimizer, norms and blocks that stop."""

from __future__ import annotations

from dataclasses import replace

from normkit.measurement.training import Change, Training
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import Case, NotChecked, Outcome, Rule, hit, of_a_run
from normkit.text import counted

_LARGE = 3.0
_KINDS = {"gain": "the norm's gain", "bias of a norm": "the norm's bias"}


@Rule(
    id="F20",
    title="Parameters were changed by no optimizer",
    severity="error",
    threshold=(
        "rms of the change between two steps over the parameter's own above 50 %, or changes above 5 % that "
        "add up to twice its length in 4 steps or more: of a gain or bias of a norm, one set to 0, or past "
        f"{_LARGE:g} times (error), of others (warning)"
    ),
    source="resets of weights in a run: Sokar et al. 2023, arXiv:2302.12902; a healthy step moves some per cent",
    why=(
        "Something other than the optimizer writes to the model: a checkpoint that is loaded, a reset, a clip of "
        "weights, a bug. The optimizer's moments belong to the old values, as does all that was learnt around them."
    ),
    remedy=("find what writes to the parameter before that step, and go back to the weights before it",),
    confirm="compare the parameter after one optimizer step and before the next: they are the same to the bit",
    looks_at=("run",),
)
@of_a_run()
def changed_parameters(_facts: Facts, training: Training) -> Outcome:
    """Gains first: one of them changes all that passes its norm."""
    if not training.optimizers:
        return NotChecked("nothing is known of an optimizer: give it to nk.watch")
    kinds = {parameter.path: parameter for parameter in training.parameters}
    cases = []
    for change in training.changes:
        parameter, words, name = kinds.get(change.path), in_words(change), f"step {change.step}"
        if parameter is not None and parameter.site:
            words += f"; it is {_KINDS[parameter.kind]}"
            cases.append(Case(parameter.site, "error", words, change.ratio + 1e6, name))
        else:
            severity: Severity = "error" if change.ratio >= _LARGE or change.factor == 0 else "warning"
            cases.append(Case(change.path, severity, words, change.ratio, name))
    if not cases:
        return None
    cases.sort(key=lambda case: -case.effect)
    found = hit(cases, f"{cases[0].line.partition(';')[0]}, by no optimizer", "parameter")
    # The later logits of attentions whose weights were changed.
    lines = []
    for series in training.of("logit bound"):
        steps = [change.step for change in training.changes if change.path.startswith(f"{series.path}.")]
        pairs = list(series.pairs())
        before = [value for step, value in pairs if step < min(steps, default=0)]
        after = [value for step, value in pairs if step >= min(steps, default=0)]
        if before and after and max(after) > _LARGE * before[-1]:
            lines.append(f"attention logits of {series.path} may reach {max(after):.3g} since, {before[-1]:.3g} before")
    return None if found is None else replace(found, evidence=(*found.evidence, *lines))


def in_words(change: Change) -> str:
    """The change in words."""
    if change.factor == 0:
        return f"{change.path} was set to 0"
    if not 0.8 < change.factor < 1.25:
        return f"{change.path} became {change.factor:.3g} times as large"
    return f"{change.path} was replaced: its change is {change.ratio:.3g} times its rms"


@Rule(
    id="F21",
    title="A norm stopped running",
    severity="error",
    threshold="ran in 8 steps or more and in none of the last 8 or more, or returns its input unchanged (error)",
    source="layers dropped at random come back: Fan et al. 2019, arXiv:1909.11556",
    why="Without its norm a branch reads the stream at any scale; the weights trained behind it do not fit.",
    remedy=(
        "find what replaced or bypasses the norm at that step: a patched forward, a condition, an exchanged module",
    ),
    confirm="nk.identify(module, shape) on the norm as it is now",
    follows=("F20",),
    looks_at=("run",),
)
@of_a_run()
def stopped_norms(_facts: Facts, training: Training) -> Outcome:
    """Norms that no longer run or no longer normalize."""
    cases = _stopped(training, {"norm": ("error", "took part")})
    return hit(cases, f"{counted(len(cases), 'norm')} no longer normalized; {cases[0].line}" if cases else "")


@Rule(
    id="F22",
    title="A block or weight stopped taking part",
    severity="error",
    threshold=(
        "a block that ran in 8 steps or more and in none of the last 8 or more, or returns its input unchanged "
        "(error); a weight that had a gradient in so many and then none (warning)"
    ),
    source="dormant parts of networks: Sokar et al. 2023, arXiv:2302.12902",
    why="A block that no longer writes to the stream, or a weight without a gradient, costs time and learns nothing.",
    remedy=("find what changed at that step: a bypass, a weight of 0, a detached tensor, a frozen parameter",),
    confirm="the block's output differs from its input, and each of its weights has a gradient",
    follows=("F20", "F21", "F23", "F24"),
    looks_at=("run",),
)
@of_a_run()
def stopped_blocks(_facts: Facts, training: Training) -> Outcome:
    """Blocks that no longer run or write, and weights without a gradient."""
    cases = _stopped(training, {"block": ("error", "took part"), "gradient": ("warning", "had a gradient")})
    return hit(cases, cases[0].line if cases else "", "place")


def _stopped(training: Training, kinds: dict[str, tuple[Severity, str]]) -> list[Case]:
    cases = []
    for stop in training.stopped:
        if stop.kind in kinds:
            severity, did = kinds[stop.kind]
            words = f"{did} in {counted(stop.before, 'measured step')}, and in none of the {stop.since} from step "
            cases.append(Case(stop.path, severity, f"{words}{stop.step} on", stop.since))
    return cases


@Rule(
    id="F26",
    title="A norm's settings changed",
    severity="error",
    threshold="a plain number of a norm's module is another than at the report before (error if it is its eps)",
    source="the eps family: meta-llama/llama#771, pytorch/torchtune#290",
    why="Weights that were trained around one eps meet another: rows that are short beside it come out shorter.",
    remedy=("find what sets it at that step: a config that is read again, a checkpoint of another model",),
    confirm="print the module before and after that step",
    follows=("F20",),
    looks_at=("run",),
)
@of_a_run()
def changed_settings(_facts: Facts, training: Training) -> Outcome:
    """Numbers of a norm's module, which no training changes."""
    cases = []
    for each in training.settings:
        is_eps = "eps" in each.name
        what = "its eps" if is_eps else "a number of its module"
        words = f"{each.name}, {what}, went from {each.before:.3g} to {each.after:.3g} by step {each.step}"
        cases.append(Case(each.path, "error" if is_eps else "note", words))
    return hit(cases, cases[0].line if cases else "", "setting")


RULES = (changed_parameters, stopped_norms, stopped_blocks, changed_settings)
"""The rules of this file."""
