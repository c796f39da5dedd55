"""Group F, the depth and the start: idle blocks, gradients from block to block, and the initialisation."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

from normkit.measurement.facts import Block
from normkit.measurement.training import Quantity, Series, Training
from normkit.rules.facts import Facts, stacks
from normkit.rules.finding import Severity
from normkit.rules.rule import (
    CAUSES,
    NO_TRAINING,
    WRONG_NORMS,
    Case,
    Hit,
    NotChecked,
    Outcome,
    Rule,
    first_values,
    hit,
    of_a_run,
)
from normkit.text import counted, percent

_IDLE_SHARE, _IDLE_COSINE, _IDLE_BLOCKS = 0.02, 0.998, 0.25

# Healthy runs of the demo models stay between 1.2 and 4.6.
_STEEP = 10.0
_FEWEST_BLOCKS = 3
# Each of the layers that start at 0 one behind another, as adaLN-Zero's gates and last layer, takes one step to open.
_OPEN = 4
# Healthy starts of the demo models: 0.98 to 1.05.
_POOR_START, _BAD_START = 1.25, 2.0
NOT_A_MEAN = 50.0
"""A first loss of over so many times log(vocabulary) is a sum over tokens, which is not judged."""
_UNTRAINED = 0.8
_ZERO_AT_START = (
    "nothing, if they are meant to start at zero: look again when the model is trained",
    "they are not meant to: draw their last matrices anew, or load them",
)
_STEEP_START, _LARGE_LOGITS = 10.0, 100.0


@Rule(
    id="F3",
    title="Blocks do nothing",
    severity="warning",
    threshold=(
        f"more than {percent(_IDLE_BLOCKS)} of the blocks change the median row by less than "
        f"{percent(_IDLE_SHARE)} of its length, with a cosine above {_IDLE_COSINE:g} (warning; a note where the "
        "model may be untrained); fewer blocks that change no bit of it, or branches in blocks whose output rows are "
        "all one vector while their input rows differ (warning; in most blocks a note)"
    ),
    source="Sun et al. 2025, arXiv:2502.05795 (the curse of depth)",
    why=(
        "A pre-norm stream grows with the depth, and each branch adds about the same. Late blocks then hardly turn "
        "the stream: they cost time and memory, and could be left out. A single block that adds nothing among "
        "others that work was zeroed or not loaded, and a branch that adds one vector to all rows has an "
        "activation that gives 0 everywhere."
    ),
    remedy=(
        "scale each norm's output by 1 / sqrt(depth) (LayerNorm scaling), or normalize the branches' outputs",
        "use fewer blocks",
        "one block or branch: load its matrices and biases anew, and compare them with the checkpoint's",
    ),
    confirm="leave these blocks out and measure the loss: if it stays, they did nothing",
    looks_at=("blocks",),
    follows=("D3", "F2", *WRONG_NORMS),
    is_of_text=True,
)
def idle_blocks(facts: Facts) -> Outcome:
    """Blocks whose output is nearly their input."""
    seen = [block for block in facts.blocks if math.isfinite(block.branch_share)]
    if not seen:
        return NotChecked("no repeated blocks were found" if not facts.blocks else "no block could be compared")
    idle = [block for block in seen if block.branch_share < _IDLE_SHARE and block.cosine > _IDLE_COSINE]
    if len(idle) <= _IDLE_BLOCKS * len(seen):
        return _idle_alone(facts, seen)
    # Branches that start at zero are a design, and training moves them; a watch knows how they started.
    severity: Severity = "warning" if facts.training is None and facts.is_trained else "note"
    cases = [
        Case(
            block.path,
            severity,
            f"the median row changes by {percent(block.branch_share)} of its length, cosine between "
            f"before and after {block.cosine:.4f}",
        )
        for block in idle
    ]
    measured = f"{len(idle)} of {counted(len(seen), 'block')} change their stream by under {percent(_IDLE_SHARE)}"
    found = hit(cases, measured, "block")
    if all(block.branch_share == 0 for block in idle) and severity == "note":
        words = f"{measured}: branches that start at zero are a usual initialisation, and training moves them"
        return found and replace(found, measured=words, remedy=_ZERO_AT_START)
    return found


def _idle_alone(facts: Facts, seen: Sequence[Block]) -> Outcome:
    """A few blocks that add nothing, and branches that add the same vector to every row, while other blocks work."""
    dead = [block.path for block in seen if block.branch_share == 0]
    constant = [path for path in facts.constant if not path.startswith(tuple(f"{path}." for path in dead))]
    lines = dict.fromkeys(dead, "adds exactly nothing to its stream, though the other blocks work")
    lines |= dict.fromkeys(
        constant, "adds the same vector to every row, whatever its input is: nothing in it depends on the row"
    )
    # A design, or the start of training, affects most of the blocks; a watch sees how they develop.
    severity: Severity = "note" if 2 * len(lines) > len(seen) or facts.training is not None else "warning"
    cases = [Case(path, severity, line) for path, line in lines.items()]
    words = [f"{counted(len(dead), 'block')} that add{'s' * (len(dead) == 1)} nothing"] if dead else []
    if constant:
        words.append(f"{len(constant)} branch{'es' * (len(constant) > 1)} whose output does not depend on the input")
    return hit(cases, f"{' and '.join(words)}, among {counted(len(seen), 'block')}", "place")


@Rule(
    id="F4",
    title="Gradients fade or swell over the depth",
    severity="error",
    threshold=(
        "gradient behind the last block of a stack over that behind its first, as it is and relative to the stream, "
        f"median over the measured steps, above {_STEEP:g} or below {1 / _STEEP:g} (warning); exactly 0 behind a block "
        f"at every measured step, of weights that were trained before or with one from step {_OPEN} on (error)"
    ),
    source="Xiong et al. 2020, arXiv:2002.04745; healthy runs of the demo models stay between 1.2 and 4.6",
    why=(
        "All blocks share one learning rate. If the gradient changes by a factor at every block, some of them "
        "learn too fast while others do not learn; post-norm needs a warm-up for this reason."
    ),
    remedy=(
        "a norm before each branch (pre-norm), which gives the gradient a direct path",
        "with post-norm: a warm-up of the learning rate, and branches that start small",
        "where it is exactly 0: look for a gain of 0 or a detached tensor behind the last block with one",
    ),
    confirm="plot the gradient's rms over the blocks: after the change the line is nearly level",
    follows=("A5", "B5", "B17", "D1", "F11", "F12", *CAUSES),
    looks_at=("run",),
)
@of_a_run(NO_TRAINING)
def steep_gradients(facts: Facts, training: Training) -> Outcome:
    """The gradient at the last block's output against that at the first's of each stack, median over the steps."""
    series = [each for each in training.of("activation gradient") if each.path]
    if len(series) < _FEWEST_BLOCKS:
        return NotChecked("the gradients of fewer than three blocks were measured")
    silent = [each.path for each in series if each.values and all(value == 0 for value in each.values)]
    if silent and not (training.began_trained or any(each.steps[-1] >= _OPEN for each in series)):
        return NotChecked(f"gates and heads that start at 0 let gradients through after some steps; fewer than {_OPEN}")
    if silent:
        return Hit(
            severity="error",
            sites=tuple(silent),
            measured=f"no gradient at all behind {counted(len(silent), 'block')}",
            evidence=(f"{silent[-1]}: the gradient of its output was exactly 0 at every measured step",),
        )
    depths = [depth for depth in _depths(facts, training) if len(depth) >= _FEWEST_BLOCKS]
    if not depths:
        return NotChecked("no stack has three blocks whose gradients were measured")
    widths = {block.path: block.stream_out.features for block in facts.blocks}
    if not (depths := [depth for depth in depths if len({widths.get(path) for path in depth} - {None}) < 2]):
        return NotChecked("the blocks have streams of several widths, whose gradients differ anyway")
    if not (seen := [(depth, ratios) for depth in depths if (ratios := profile_ratios(training, depth))]):
        return NotChecked("no step with finite gradients at the first and the last block was measured")
    by_path = {each.path: _by_step(each) for each in series}
    cases = []
    for depth, ratios in seen:
        ratio = median(ratio for _, ratio in ratios)
        if 1 / _STEEP <= ratio <= _STEEP:
            continue
        step, steepness = ratios[-1][0], max(ratio, 1 / ratio)
        weaker, stronger = ("first", "last") if ratio > 1 else ("last", "first")
        measured = (
            f"the gradient is {steepness:.3g} times smaller at the {weaker} block than at the {stronger}: a factor of "
            f"{steepness ** (1 / (len(depth) - 1)):.2f} a block"
        )
        lines = (
            *(f"step {step}: rms {by_path[path][step]:.3g} behind {path}" for path in (depth[0], depth[-1])),
            f"median ratio over {counted(len(ratios), 'measured step')}: {ratio:.3g}",
        )
        cases.append((steepness, (depth[0], depth[-1]), measured, lines))
    if not cases:
        return None
    cases.sort(key=lambda case: -case[0])
    return Hit(
        severity="warning",
        sites=tuple(path for _, ends, _, _ in cases for path in ends),
        measured=cases[0][2],
        evidence=tuple(line for _, _, _, lines in cases for line in lines),
    )


def _depths(facts: Facts, training: Training) -> list[list[str]]:
    """Paths of the blocks whose gradients were measured, one stack after the other; of a model without any, norms."""
    paths = [each.path for each in training.of("activation gradient") if each.path]
    return [paths] if {site.path for site in facts.sites}.issuperset(paths) else stacks(paths)


def profile_ratios(training: Training, depth: Collection[str]) -> list[tuple[int, float]]:
    """Steps, and the gradient behind the last block of a stack over the gradient behind the first.

    The ratio is taken as it is or relative to the stream's rms, whichever is nearer to 1: if a block lengthens a short
    stream, the gradient shrinks by as much, and nothing is lost.
    """

    def ratio_of(profile: Sequence[dict[int, float]], step: int) -> float:
        first, last = profile[0].get(step, math.nan), profile[-1].get(step, math.nan)
        return last / first if first else math.nan

    gradients, streams = (
        [_by_step(each) for each in training.of(quantity) if each.path in depth]
        for quantity in ("activation gradient", "stream rms")
    )
    found = []
    for step in gradients[0] if gradients else ():
        plain = ratio_of(gradients, step)
        relative = plain * ratio_of(streams, step) if len(streams) > 1 else math.nan
        if 0 < plain < math.inf:
            candidates = [ratio for ratio in (plain, relative) if 0 < ratio < math.inf]
            found.append((step, min(candidates, key=lambda ratio: abs(math.log(ratio)))))
    return found


def _by_step(series: Series) -> dict[int, float]:
    return dict(series.pairs())


@Rule(
    id="F12",
    title="The initialisation is off",
    severity="error",
    threshold=(
        f"a first loss above {_POOR_START:g} times log(vocabulary) (warning) or {_BAD_START:g} times (error); in "
        f"an untrained model, attention logits above {_LARGE_LOGITS:g} or gradients {_STEEP_START:g} times apart "
        "over the depth of a stack in the first step (warning)"
    ),
    source=(
        "an even guess has a loss of log(vocabulary); healthy starts of the demo models: 0.98 to 1.05 times that, "
        "logits to 5; with weights ten times as large 3.3 to 3.7 times, and 440 (Wortsman et al. 2023, "
        "arXiv:2309.14322)"
    ),
    why=(
        "A model that knows nothing should guess evenly. A larger first loss means that it is sure of something that "
        "it cannot know: logits or streams start too large, and the first hundreds of steps only undo that."
    ),
    remedy=(
        "draw weights with a deviation near 1 / sqrt(width), the family's own, and embeddings likewise",
        "scale the weights that write to the stream by 1 / sqrt(2 * blocks)",
        "check that nothing was initialised twice, or left as it was allocated",
    ),
    confirm="the loss of the first step is log(vocabulary), to some per cent",
    follows=("B5", "F16", "F17", "F19"),
    looks_at=("run",),
)
@of_a_run(NO_TRAINING)
def poor_start(facts: Facts, training: Training) -> Outcome:
    """The first step of an untrained model: its loss, its logits, its gradients."""
    loss = start_of(training, "loss")
    if not training.vocabulary or math.isnan(loss):
        return NotChecked("the first step, or the number of the output's entries, is not known")
    if training.began_trained:
        return NotChecked("the run began with trained weights")
    uniform = math.log(training.vocabulary)
    if loss > NOT_A_MEAN * uniform:
        return NotChecked(f"a first loss of {loss:.3g} is no mean over tokens")
    if loss < _UNTRAINED * uniform:
        return None
    lines = []
    # If the model is called several times in a step, its loss may be the sum over these calls.
    calls = min((site.calls // max(site.forward_calls, 1) for site in facts.sites), default=1)
    loss_of_a_call = loss / max(1, calls)
    if loss_of_a_call > _POOR_START * uniform:
        lines.append(
            f"the first loss is {loss:.3g}; an even guess over all {training.vocabulary} entries has {uniform:.3g}"
        )
    bounds = [(value, path) for path, value in first_values(training, "logit bound").items() if math.isfinite(value)]
    logits, place = max(bounds, default=(math.nan, ""))
    if logits > _LARGE_LOGITS:
        lines.append(f"{place}: attention logits up to {logits:.3g} in the first step")
    starts = (profile_ratios(training, depth) for depth in _depths(facts, training))
    firsts = [ratio for ratios in starts for step, ratio in ratios if step == 0]
    ratio = max(firsts, key=lambda ratio: abs(math.log(ratio)), default=1.0)
    if not 1 / _STEEP_START <= ratio <= _STEEP_START:
        lines.append(f"the first gradient is {ratio:.3g} times as large behind the last block as behind the first")
    if not lines:
        return None
    return Hit(
        severity="error" if loss_of_a_call > _BAD_START * uniform else "warning",
        sites=(place,) if logits > _LARGE_LOGITS else (),
        measured=f"first loss {loss:.3g}, {loss / uniform:.3g} times log({training.vocabulary})",
        evidence=tuple(lines),
    )


def start_of(training: Training, name: Quantity) -> float:
    """The value of a series of the whole model in step 0; NaN if it was not seen or is not finite."""
    value = first_values(training, name).get("", math.nan)
    return value if math.isfinite(value) else math.nan


RULES = (idle_blocks, steep_gradients, poor_start)
"""The rules of this file."""
