"""Group C: rows that must not affect each other. Time, batch, padding, ranks."""

from __future__ import annotations

import math
from statistics import median

from normkit.identification.sites import OtherNorm
from normkit.measurement.training import Training
from normkit.rules.axes import spans_tokens
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import (
    NO_TOKENS,
    NO_TRAINING,
    Case,
    Hit,
    NotChecked,
    Outcome,
    Rule,
    evidence_lines,
    hit,
    measured,
)
from normkit.text import counted, percent

_BATCH_NOISE = 0.12
# Batches of 32 and 64 vectors are usual; below 16 samples errors rise (Wu & He 2018, arXiv:1803.08494).
_FEW_SAMPLES = 16
# ResNet-50's error on ImageNet with 32, 16, 8, 4, 2 images a device: 23.6, 23.7, 24.8, 27.3, 34.7 % (table 2 there).
_PAIR = 2
# A share of the labels that no model of other labels has by chance.
_NEXT_SHARE = 0.95
_NO_TEXT = {
    "image": NotChecked("an image has no later tokens and no padding"),
    "recording": NotChecked("tried on token ids, not on sound"),
}


@Rule(
    id="C4",
    title="Statistics over time leak the future",
    severity="error",
    threshold=(
        "rows of earlier tokens move when later ones change, by 0.1 % or more (8 machine epsilons in 16 bits), "
        "while the norm's input does not change, in a model that is causal otherwise; in a run: a row holds several "
        f"tokens, and {percent(_NEXT_SHARE)} of the labels are the next input"
    ),
    source="DeepXi#18, btgym#79",
    why=(
        "A causal model must predict a token from those before it. Statistics that include later tokens give them "
        "away: the loss in training is too good, and generation, where they do not exist yet, fails."
    ),
    remedy=(
        "normalize each token by itself (LayerNorm, RMSNorm)",
        "where statistics over time are wanted, accumulate them over the past only",
    ),
    confirm="change the last token of a text: no logit before it may change",
    follows=("C1",),
    looks_at=("norms", "other norms"),
)
def leaked_future(facts: Facts) -> Outcome:
    """Earlier rows move with later tokens, through a norm, in a model that is causal otherwise."""
    if facts.leaks is None and facts.training is not None:
        return _leaking_in_a_run(facts, facts.training)
    if facts.leaks is None or facts.model.unit in _NO_TEXT:
        return _NO_TEXT.get(facts.model.unit, NO_TOKENS)
    verbs, changed = ("lets", "let"), "with later tokens changed, the rows of earlier ones"
    return _leaking(facts, "time", verbs, "later tokens affect earlier ones", changed, "error", "warning")


def _leaking_in_a_run(facts: Facts, training: Training) -> Outcome:
    """Norms whose rows hold several tokens, where the labels are the next input: no altered copy runs there."""
    shares = [share for _, share in measured(training, "labels next")]
    if not shares:
        return NotChecked("no labels of a cross-entropy were seen, which tell whether the next token is predicted")
    if median(shares) < _NEXT_SHARE:
        return None
    cases = [
        Case(site.path, "error", f"a row is {site.spec.rows.words}, and the labels are the next input")
        for site in facts.sites
        if spans_tokens(site, facts) and not facts.is_stock(site.path)
    ]
    return hit(cases, f"{counted(len(cases), 'norm')} with several tokens in a row, in a model of the next token")


def _leaking(
    facts: Facts, kind: str, verbs: tuple[str, str], what: str, changed: str, evaluating: Severity, training: Severity
) -> Hit | None:
    """One hit for one kind of leak through norms; a class of transformers that leaks does so by design."""
    leaks = [leak for leak in facts.leaks or () if leak.kind == kind and leak.path]
    always = {leak.path for leak in leaks if leak.mode == "evaluation"}
    known = () if facts.baseline is None else facts.baseline.others
    # A leak in evaluation mode needs no second line for training mode.
    leaks = [leak for leak in leaks if leak.mode == "evaluation" or leak.path not in always]
    is_stock = facts.is_stock(*(leak.path for leak in leaks))
    cases = [
        Case(
            leak.path,
            "note"
            if is_stock
            else evaluating
            if leak.mode == "evaluation"
            else "note"
            if leak.path in known
            else training,
            f"{changed} move by up to {percent(leak.change)} of their largest entry, in {leak.mode} mode",
        )
        for leak in leaks
    ]
    number = len({leak.path for leak in leaks})
    mode = "" if always else " in training mode"
    return hit(cases, f"{counted(number, 'norm')} that {verbs[number > 1]} {what}{mode}")


@Rule(
    id="C5",
    title="Samples of a batch are coupled",
    severity="error",
    threshold=("rows move with another sample in evaluation mode (error), in training mode only (note)"),
    source="Shen et al. 2020, arXiv:2003.07845; x-transformers#320",
    why=(
        "With statistics of the batch, an answer depends on the other samples of the batch. A batch norm does so in "
        "training by design."
    ),
    remedy=(
        "use a norm of each token by itself (LayerNorm, RMSNorm)",
        "call model.eval() before evaluating, and check that every module follows",
    ),
    confirm="the output of one sample alone, and in a batch: the difference must be rounding",
    looks_at=("norms", "other norms"),
)
def coupled_samples(facts: Facts) -> Outcome:
    """Samples affect each other: in evaluation always a fault; in training what batch norms do."""
    leaks = facts.leaks or ()
    changed = "with another sample changed, the rows"
    leaking = _leaking(facts, "batch", ("couples", "couple"), "the samples of a batch", changed, "error", "note")
    if any(leak.kind == "batch" and leak.path and leak.mode == "evaluation" for leak in leaks):
        return leaking
    always = [Case(other.path, "error", other.reason) for other in facts.others if _batch_mode(other) == "always"]
    if always:
        return hit(always, f"{counted(len(always), 'norm')} with statistics of the batch in evaluation mode")
    elsewhere = next((leak for leak in leaks if leak.kind == "batch" and not leak.path), None)
    if leaking is not None or elsewhere is None:
        return leaking
    moved = f"of the model's output move by {percent(elsewhere.change)}"
    line = f"{changed} {moved}, and through no norm"
    return Hit(severity="note", sites=(), measured=f"rows {moved}, and no norm does it", evidence=(line,))


def _batch_mode(other: OtherNorm) -> str | None:
    """In which mode a norm shares statistics between samples, or None."""
    if other.passport.verdict != "batch":
        return None
    reading = other.passport.readings.get("batch")
    if reading is None or reading.value is None:
        return "training"
    return str(reading.value["mode"]) if 0 in reading.value["axes"] and reading.value["mode"] != "never" else None


@Rule(
    id="C6",
    title="Padding enters the statistics",
    severity="error",
    threshold=(
        "rows of tokens move when ids under mask 0 change, by 0.1 % or more (8 machine epsilons in 16 bits), "
        "while the norm's input does not change; of sound, or of rows without ids, the rows of a sample by what the "
        "zeros at its end change (a note for the stock class)"
    ),
    source="pytorch/pytorch#70529 and #81985, powernorm#13",
    why=(
        "The amount of padding depends on the longest text in the batch. If a norm counts padding, it shifts and "
        "scales real tokens: half a batch of zeros turns mean 0 and variance 1 into 0.9 and 0.35."
    ),
    remedy=(
        "take the moments over the tokens with mask 1 only",
        "use a norm of each token by itself (LayerNorm, RMSNorm)",
    ),
    confirm="pad one text by 10 and by 100: the rows of its tokens must not change",
    follows=("C1",),
    looks_at=("norms", "other norms"),
)
def counted_padding(facts: Facts) -> Outcome:
    """Rows of tokens move with the content of padding, through a norm."""
    has_ends = any(leak.kind == "padding" and leak.path for leak in facts.leaks or ())
    if facts.leaks is None or (facts.model.unit in _NO_TEXT and not has_ends):
        return _NO_TEXT.get(facts.model.unit, NO_TOKENS)
    what = "tokens under mask 0 changed" if facts.model.distinct is not None else "zeros at the ends of samples counted"
    changed = f"with the {what}, the other rows"
    evaluating: Severity = "error" if facts.model.padding > 0 else "warning"
    training: Severity = "warning" if facts.model.padding > 0 else "note"
    return _leaking(facts, "padding", ("counts", "count"), "padding in the statistics", changed, evaluating, training)


@Rule(
    id="C7",
    title="Batch statistics are of too little",
    severity="warning",
    threshold=(
        "a batch norm that is no SyncBatchNorm in a run of several processes; or sqrt(2 / N) above "
        f"{percent(_BATCH_NOISE)}, the relative noise of a variance of N rows; over samples alone, fewer than "
        f"{_FEW_SAMPLES}; or calls of {_PAIR} samples and fewer, whatever the number of rows"
    ),
    source="pytorch/pytorch#22192 and #48988, fvcore#152; batches of 2: Wu & He 2018, arXiv:1803.08494, table 2",
    why=(
        "Each process normalizes by its own share of the batch, so more processes mean noisier statistics and "
        "running ones that drift apart. A variance of 8 rows is off by 50 %, one of 128 by 12 %."
    ),
    remedy=(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which weights by the number of rows",
        "a larger batch on each device, or a norm that needs none (LayerNorm, RMSNorm, GroupNorm)",
    ),
    confirm="compare running_mean between processes after some steps without broadcasting buffers",
    looks_at=("norms", "other norms"),
)
def small_batches(facts: Facts) -> Outcome:
    """Batch norms in a run of several ranks, or with statistics of few samples."""
    batched = [other for other in facts.others if _batch_mode(other) is not None]
    if not batched:
        return None
    if facts.training is None:
        return NO_TRAINING
    ranks = facts.training.ranks
    alone = [other for other in batched if ranks > 1 and not other.reason.startswith("SyncBatchNorm")]
    tokens = max((site.input.rows // max(site.calls, 1) for site in facts.sites), default=0)
    # Statistics over samples alone are of at most the rows that the run was fed in a step.
    fed = facts.training.tokens // (ranks * max(facts.training.steps, 1))
    few: dict[str, int] = {}
    for other in batched:
        reading = other.passport.readings.get("batch")
        axes = [0] if reading is None or reading.value is None else reading.value["axes"]
        is_of_samples = len(axes) < 2
        # Without a norm of single tokens, each sample has what the norm was called with: pixels or frames.
        rows = fed if is_of_samples else tokens or fed * math.prod(other.passport.shape[axis] for axis in axes if axis)
        if 0 < rows < (_FEW_SAMPLES if is_of_samples else 2 / _BATCH_NOISE**2):
            few[other.path] = rows
    # The rows of one sample are alike: their number does not tell how well the batch stands for all data.
    pairs = [
        norm for norm in facts.batch_norms if norm.is_live and 0 < norm.call_samples <= _PAIR and norm.path not in few
    ]
    lines = [f"{other.path}: each of the {ranks} processes normalizes by its own share of the batch" for other in alone]
    lines += [
        f"{path}: a variance of {rows} rows has a relative noise of {percent(math.sqrt(2 / rows))}, which evaluation "
        "mode does not have"
        for path, rows in few.items()
    ]
    lines += [f"{norm.path}: normalizes by {counted(norm.call_samples, 'sample')} at a time" for norm in pairs]
    if not lines:
        return None
    paths = {*(other.path for other in alone), *few, *(norm.path for norm in pairs)}
    words = [f"not synchronised over {ranks} processes"] if alone else []
    words += [f"with batch statistics of {min(few.values())} rows"] if few else []
    words += [f"with batches of {counted(min(norm.call_samples for norm in pairs), 'sample')}"] if pairs else []
    return Hit(
        severity="warning",
        sites=tuple(other.path for other in batched if other.path in paths),
        measured=f"{counted(len(paths), 'batch norm')} {' and '.join(words)}",
        evidence=evidence_lines(lines),
    )


RULES = (leaked_future, coupled_samples, counted_padding, small_batches)
"""The rules of this file."""
