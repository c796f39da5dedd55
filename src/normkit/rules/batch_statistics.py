"""Group C, what batch norms take their statistics from: modes, eps, divisors, dropout in front, padding, repetition."""

from __future__ import annotations

import math

from normkit.measurement.facts import BatchNorm
from normkit.rules.batch_norms import FEWEST_SAMPLES, NO_STATISTICS, NOISE, is_of_samples, moved
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import Case, NotChecked, Outcome, Rule, hit
from normkit.rules.scale import HARMFUL, VISIBLE, severity_of
from normkit.text import counted, percent

# The difference then has half of the energy of what tells samples apart. A trained pitch tracker has 0 on tones and
# 1 on white noise.
_CHANGE = math.sqrt(0.5)
# Statistics of the training's own data differ by what sampling does: five trained networks have 0.5 to 1.7 times that,
# three whose last data were sorted 5 to 22 times.
_NOTED, _CLEAR = 0.4, 4.0
# The same for the statistics of one norm: those of the three have 4 times and more.
_FURTHER = 3.0
# sqrt(2 / 32): a batch of 32 vectors, the smallest usual one, has a variance that is off by as much.
_VARIANCE = 0.25
_FEWEST_ROWS = 64
# The output is then 5 % shorter than without.
_EPS_SHARE = 0.1
_FEWEST, _MOST = 3, 0.75
_HALF = 0.5
NO_PAUSE = NotChecked("no run is interrupted to evaluate: nk.inspect tells, on a batch of its data")
"""The answer of a rule that takes a pass in the other mode."""


@Rule(
    id="C13",
    title="Evaluation mode gives another output than training mode",
    severity="warning",
    threshold=(
        f"batch norms that take the batch's statistics in place of the running ones change the output by more than "
        f"{_CHANGE:.2g} of its deviation across samples, beyond what halves of the batch do to each other (warning; a "
        f"note for fewer than {FEWEST_SAMPLES} samples, or where these halves make more than {percent(NOISE)}); by "
        f"more than {_NOTED:g}, which is over {_CLEAR:g} times what the halves do (note)"
    ),
    source="pytorch/pytorch#4741 and #5406; Singh & Shrivastava 2019, arXiv:1904.06031 (EvalNorm)",
    why=(
        "The loss that training shows is that of training mode. Where evaluation mode gives other outputs, its loss "
        "is another too, though weights and data are the same: small differences of many batch norms add up."
    ),
    remedy=(
        "look at the batch norms of rules C8 to C10 and C16 first: they are the cause where there are any",
        "pass data through in training mode, without an optimizer, until the statistics fit (torch.optim.swa_utils."
        "update_bn)",
        "train with larger batches, or with the running statistics at the end (freeze them for the last epochs)",
    ),
    confirm="the loss of the same batch in training mode and in evaluation mode, dropout off in both",
    follows=("C8", "C9", "C10", "C14", "C16"),
    looks_at=("batch norms",),
    is_of_text=True,
)
def other_output(facts: Facts) -> Outcome:
    """The output of one batch in both modes, less what the size of the batch explains."""
    if not facts.batch_norms:
        return None
    modes = facts.modes
    if facts.training is not None:
        return NO_PAUSE
    if modes is None or not any(norm.is_gathered for norm in facts.batch_norms):
        return NO_STATISTICS
    change = modes.beyond_sampling
    is_clear = change > _NOTED and modes.change > _CLEAR * modes.sampling and is_of_samples(modes)
    if not (change > _CHANGE or is_clear):
        return None
    words = (
        f"in training mode the output of {counted(modes.samples, 'sample')} is off by {percent(modes.change)} of its "
        f"deviation across samples, of which halves of the batch explain {percent(modes.sampling)}"
    )
    if modes.decided > 0:
        words += f"; the largest entry is another one for {percent(modes.decided)} of them"
    severity: Severity = "warning" if is_of_samples(modes) and change > _CHANGE else "note"
    cases = [Case("", severity, words, math.inf, name="the model")]
    for norm in facts.batch_norms:
        if norm.is_gathered and norm.rows >= _FEWEST_ROWS and norm.change > _FURTHER * norm.sampling:
            cases.append(Case(norm.path, severity, moved(norm), norm.change))
    return hit(cases, f"the output moves by {percent(change)} of what tells samples apart")


@Rule(
    id="C14",
    title="Batch norms with another eps than meant",
    severity="error",
    threshold=(
        "another eps than that of the config's class or the intent file, or than that of three quarters of the other "
        f"batch norms: by its effect at the median running variance, over {percent(HARMFUL)} an error, over "
        f"{percent(VISIBLE)} a warning, else a note; without any of these an eps that is over {percent(_EPS_SHARE)} of "
        "the median channel's variance (note)"
    ),
    source=(
        "keras.layers.BatchNormalization has 1e-3, torch.nn.BatchNorm2d 1e-5; gzuidhof/nn-transfer#3, "
        "qqwweee/keras-yolo3#451"
    ),
    why=(
        "A port that keeps the other library's default divides channels of small variance by another number: 1e-3 in "
        "place of 1e-5 halves the output of a channel whose variance is 4e-4. Loading the weights does not change eps."
    ),
    remedy=(
        "set eps to that of the library and the config that the weights were trained with",
        "where the other eps is meant, write it into an intent file",
    ),
    confirm="nk.identify(module, shape).readings['batch'].value['eps']; running_var beside it",
    looks_at=("batch norms",),
)
def other_eps(facts: Facts) -> Outcome:
    """The eps that each batch norm acts with, against the one that is meant, at its own running variances."""
    cases = []
    for norm in facts.batch_norms:
        if math.isnan(norm.eps) or not norm.eps_share > 0:
            continue
        meant, source = _meant_eps(norm, facts)
        variance = norm.eps / norm.eps_share - norm.eps
        if meant is None:
            if norm.is_gathered and norm.eps_share > _EPS_SHARE:
                words = f"eps {norm.eps:g} is {percent(norm.eps_share)} of the median channel's variance + eps"
                cases.append(Case(norm.path, "note", words))
        elif not math.isclose(norm.eps, meant, rel_tol=1e-3):
            effect = abs(math.sqrt((variance + meant) / (variance + norm.eps)) - 1)
            words = f"eps {norm.eps:g}, {source} {meant:g}: at the median running variance of {variance:.3g} this "
            words += f"changes the output by {percent(effect)}"
            cases.append(Case(norm.path, severity_of(effect), words, effect))
    return hit(
        cases, f"{len(cases)} of {counted(len(facts.batch_norms), 'batch norm')} where eps matters", "batch norm"
    )


def _meant_eps(norm: BatchNorm, facts: Facts) -> tuple[float | None, str]:
    """The eps that is meant, and who says so; None where nobody does."""
    declared = None if facts.baseline is None else facts.baseline.batch_norms.get(norm.path)
    if facts.baseline is not None and declared is not None and declared.eps is not None:
        return declared.eps, f"{facts.baseline.source or 'the intent file'} says"
    if facts.intent is not None and norm.path in facts.intent.batch_eps:
        return facts.intent.batch_eps[norm.path], "the config says"
    others = [other.eps for other in facts.batch_norms if other.path != norm.path and not math.isnan(other.eps)]
    usual = max(set(others), key=others.count, default=norm.eps)
    if len(others) >= _FEWEST and usual != norm.eps and others.count(usual) >= _MOST * len(others):
        return usual, f"{others.count(usual)} of {counted(len(others), 'other batch norm')} have"
    return None, ""


@Rule(
    id="C15",
    title="Variances of batches are divided by another count",
    severity="warning",
    threshold=(
        "a running variance that takes the sum of squares over N, not N - 1, or a batch that is divided by its "
        f"unbiased variance; with the fewest numbers a channel that were seen, over {percent(HARMFUL)} of the "
        "deviation is a warning, else a note"
    ),
    source="pytorch/pytorch#1410 and #3122, ml-explore/mlx#3817, callummcdougall/ARENA_3.0#415",
    why=(
        "PyTorch normalizes by the biased variance and gathers the unbiased one, flax gathers the biased one. A mix "
        "makes evaluation mode differ from training mode by sqrt(N / (N - 1)): nothing for images, 3 % for 16 vectors."
    ),
    remedy=(
        "gather var(unbiased=True) and divide by var(unbiased=False), as torch.nn.BatchNorm2d does",
        "if the weights were trained this way, keep it: the difference is that of the given size",
    ),
    confirm="running_var after one batch with momentum=1, beside x.var(unbiased=True)",
    looks_at=("batch norms",),
)
def other_divisor(facts: Facts) -> Outcome:
    """The number that a batch adds to the running variance, and its divisor, as tried on a copy."""
    cases = []
    for norm in facts.batch_norms:
        size = max(norm.call_rows, 2)
        deviation = math.sqrt(size / (size - 1)) - 1
        words = []
        if norm.correction != 1 and not math.isnan(norm.correction):
            words.append("the running variance gathers the sum of squares over " + _count(norm.correction))
        if norm.own_correction:
            words += (
                []
                if math.isnan(norm.own_correction)
                else [f"in training it divides by the root of the sum of squares over {_count(norm.own_correction)}"]
            )
        if words:
            seen = f"; with {norm.call_rows} numbers a channel that is {percent(deviation)} of the deviation"
            severity: Severity = "warning" if norm.call_rows and deviation > HARMFUL else "note"
            cases.append(Case(norm.path, severity, " and ".join(words) + (seen if norm.call_rows else ""), deviation))
    return hit(cases, f"{counted(len(cases), 'batch norm')} unlike PyTorch's", "batch norm")


def _count(correction: float) -> str:
    return "N" if correction == 0 else f"N {'-' if correction > 0 else '+'} {abs(correction):g}"


@Rule(
    id="C16",
    title="Dropout in front of batch norms",
    severity="warning",
    threshold=(
        f"in training mode the variance that enters, of the median channel, is more than {percent(_VARIANCE)} off that "
        f"in evaluation mode (warning), which is the noise of a variance of 32 rows; over {percent(2 * HARMFUL)} a note"
    ),
    source="Li et al. 2018, arXiv:1801.05134 (variance shift), sections 3 and 5",
    why=(
        "Dropout keeps the mean of what follows and raises its variance: half of the entries twice as large have twice "
        "the second moment. The running variance is gathered with dropout on and used with dropout off, so evaluation "
        "mode divides by too much."
    ),
    remedy=(
        "move dropout behind the last batch norm, as in front of the classifier alone",
        "use a smaller rate, or gather the statistics again with dropout off (torch.optim.swa_utils.update_bn with the "
        "dropout modules in evaluation mode)",
    ),
    confirm="running_var beside the variance that enters in evaluation mode",
    looks_at=("batch norms",),
)
def variance_shift(facts: Facts) -> Outcome:
    """The variance that enters each batch norm with dropout on, against that with dropout off."""
    if facts.batch_norms and all(math.isnan(norm.dropout) for norm in facts.batch_norms):
        is_run = facts.training is not None
        return NotChecked(
            "no module of dropout is in front of one" if is_run else "the model did not run in training mode"
        )
    cases = []
    for norm in facts.batch_norms:
        shift = norm.dropout**2 - 1
        # A ratio of variances that noise makes of few numbers says nothing.
        if not abs(shift) > 2 * HARMFUL or norm.rows < _FEWEST_ROWS:
            continue
        words = f"the variance that enters is {norm.dropout**2:.3g} times as large in training mode"
        words += f", behind {norm.behind}" if norm.behind else ", without a module of dropout in front"
        words += "" if facts.training is None else ", of the first batch and weights"
        cases.append(Case(norm.path, "warning" if abs(shift) > _VARIANCE else "note", words, abs(shift)))
    largest = max((case.effect for case in cases), default=0.0)
    return hit(cases, f"{counted(len(cases), 'batch norm')} behind dropout, by up to {percent(largest)}", "batch norm")


@Rule(
    id="C17",
    title="Padding or repeated samples in batch statistics",
    severity="warning",
    threshold=(
        f"over {percent(_VARIANCE)} of the rows that enter are padding by the batch's mask, or {percent(_HALF)} of its "
        "samples equal earlier ones (warning); fewer, or a batch norm of the stock class, are a note"
    ),
    source="pytorch/pytorch#70529, pytorch/audio#4205, huggingface/transformers#47739",
    why=(
        "A batch norm without a mask takes padding for data: its rows are all alike, so they move the mean and lower "
        "the variance by their share, which depends on how long the other samples of a batch are. Repeated samples "
        "leave the statistics of fewer: half as many, a variance 1.4 times as noisy."
    ),
    remedy=(
        "take the statistics over the rows with mask 1: gather these into (rows, channels) before the batch norm",
        "batch samples of similar length, so that there is little padding",
        "draw samples without repetition, and drop the last batch in place of filling it up",
    ),
    confirm="running_mean after the same samples with twice the padding",
    looks_at=("batch norms",),
)
def counted_padding(facts: Facts) -> Outcome:
    """Rows under a mask, and samples that come twice, in what batch norms were fed with."""
    leaking = {leak.path for leak in facts.leaks or () if leak.kind == "padding"}
    cases = []
    # Frozen statistics take in no batch.
    updated = [norm for norm in facts.batch_norms if norm.share != 0]
    for norm in updated:
        # C6 has changed the content of padding and seen the rows of tokens move.
        if norm.padding > 0 and norm.path not in leaking:
            severity: Severity = "warning" if norm.padding > _VARIANCE and not facts.is_stock(norm.path) else "note"
            words = f"{percent(norm.padding)} of the rows that enter are padding, and in training all of them count"
            cases.append(Case(norm.path, severity, words, norm.padding))
    measured = [f"padding at {counted(len(cases), 'batch norm')}"] if cases else []
    repeated = max((norm.repeated for norm in updated if not math.isnan(norm.repeated)), default=0.0)
    if repeated > 0:
        words = f"{percent(repeated)} of the samples are equal to an earlier one of their batch"
        cases.append(Case("", "warning" if repeated >= _HALF else "note", words, repeated, name="the batches"))
        measured.append(f"{percent(repeated)} of the samples repeated")
    return hit(cases, " and ".join(measured), "batch norm")


RULES = (other_output, other_eps, other_divisor, variance_shift, counted_padding)
"""The rules of this file."""
