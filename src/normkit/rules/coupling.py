"""Group C: rows that should not know of each other. Time, batch, padding, ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

from normkit.identification.sites import OtherNorm
from normkit.measurement.row_leakage import Leak
from normkit.rules.finding import Severity
from normkit.rules.rule import NO_TOKENS, NO_TRAINING, Facts, Hit, Outcome, Rule, evidence_lines, worst
from normkit.text import counted, percent

# With a small batch, sampling alone makes the statistics of the two modes differ by some 20 %.
_MODE_GAP = 1.0
_BATCH_NOISE = 0.12
# Batches of 32 and 64 vectors are usual; below 16 samples errors rise (Wu & He 2018, arXiv:1803.08494).
_FEW_SAMPLES = 16


def _leaks_future(facts: Facts) -> Outcome:
    """Earlier rows move with later tokens, through a norm, in a model that is causal but for this."""
    if facts.leaks is None:
        return NO_TOKENS
    leaks = _of_norms(facts.leaks, "time")
    changed = "with later tokens changed, the rows of earlier ones"
    return _leak_hit(facts, leaks, changed, "let earlier tokens know of later ones", "error", "warning")


def _couples_batch(facts: Facts) -> Outcome:
    """Samples know of each other: in evaluation always a fault; in training what batch norms do, if modes agree."""
    leaks = facts.leaks or ()
    leaking = _of_norms(leaks, "batch")
    changed = "with another sample changed, the rows"
    if any(leak.mode == "evaluation" for leak in leaking):
        return _leak_hit(facts, leaking, changed, "couple the samples of a batch", "error", "note")
    always = [other for other in facts.others if _batch_mode(other) == "always"]
    if always:
        return Hit(
            severity="error",
            sites=tuple(other.path for other in always),
            measured=f"{counted(len(always), 'norm')} with statistics of the batch in evaluation mode",
            evidence=evidence_lines([f"{other.path}: {other.reason}" for other in always]),
        )
    apart = [leak for leak in leaks if leak.kind == "mode" and leak.change > _MODE_GAP]
    if apart:
        largest = max(leak.change for leak in apart)
        return Hit(
            severity="note" if facts.is_untrained or facts.is_stock(*(leak.path for leak in apart)) else "warning",
            sites=tuple(leak.path for leak in apart),
            measured=f"training and evaluation mode differ by up to {percent(largest)} of the output's rms",
            evidence=evidence_lines(
                [
                    f"{leak.path}: on the same input, the batch's own statistics change the output by "
                    f"{percent(leak.change)} of what the running ones give"
                    for leak in sorted(apart, key=lambda leak: -leak.change)
                ]
            ),
        )
    elsewhere = [leak for leak in leaks if leak.kind == "batch" and not leak.path]
    if leaking or not elsewhere:
        return _leak_hit(facts, leaking, changed, "couple the samples of a batch", "error", "note")
    line = f"{changed} of the model's output move by {percent(elsewhere[0].change)}, and through no norm"
    return Hit(severity="note", sites=(), measured="samples of a batch are coupled", evidence=(line,))


def _counts_padding(facts: Facts) -> Outcome:
    """Rows of tokens move with the content of padding, through a norm."""
    if facts.leaks is None:
        return NO_TOKENS
    leaks = _of_norms(facts.leaks, "padding")
    words, changed = "let padding into their statistics", "with the tokens under mask 0 changed, the other rows"
    padded = facts.model.padding > 0
    return _leak_hit(facts, leaks, changed, words, "error" if padded else "warning", "warning" if padded else "note")


def _of_norms(leaks: Iterable[Leak], kind: str) -> list[Leak]:
    return [leak for leak in leaks if leak.kind == kind and leak.path]


def _leak_hit(
    facts: Facts, leaks: list[Leak], changed: str, words: str, evaluating: Severity, training: Severity
) -> Outcome:
    """One hit for one kind of leak; a class of transformers that leaks was meant to."""
    if not leaks:
        return None
    always = {leak.path for leak in leaks if leak.mode == "evaluation"}
    # A leak in evaluation mode needs no second line for training mode.
    leaks = [leak for leak in leaks if leak.mode == "evaluation" or leak.path not in always]
    known = () if facts.baseline is None else facts.baseline.others
    severity = worst(
        [evaluating if leak.mode == "evaluation" else "note" if leak.path in known else training for leak in leaks]
    )
    paths = tuple(dict.fromkeys(leak.path for leak in leaks))
    mode = "" if always else " in training mode"
    return Hit(
        severity="note" if facts.is_stock(*paths) else severity,
        sites=paths,
        measured=f"{counted(len(paths), 'norm')} that {words if len(paths) > 1 else _singular(words)}{mode}",
        evidence=evidence_lines(
            [
                f"{leak.path}: {changed} move by up to {percent(leak.change)} of their largest entry, "
                f"in {leak.mode} mode"
                for leak in leaks
            ]
        ),
    )


def _singular(words: str) -> str:
    verb, _, rest = words.partition(" ")
    return f"{verb}s {rest.replace('their', 'its')}"


def _uneven_batches(facts: Facts) -> Outcome:
    """Batch norms in a run of several ranks, or with statistics of few samples."""
    batched = [other for other in facts.others if _batch_mode(other) is not None]
    if not batched:
        return None
    if facts.training is None:
        return NO_TRAINING
    ranks = facts.training.ranks
    alone = [other for other in batched if ranks > 1 and not other.reason.startswith("SyncBatchNorm")]
    lines = [f"{other.path}: each of the {ranks} processes normalizes by its own share of the batch" for other in alone]
    tokens = max((site.input.rows // max(site.calls, 1) for site in facts.sites), default=0)
    # Statistics over samples alone are of no more rows than the run was fed in a step.
    fed = facts.training.tokens // (ranks * max(facts.training.steps, 1))
    rows = {other.path: tokens if len(_shared_axes(other)) > 1 else fed for other in batched}
    few = [
        other
        for other in batched
        if 0 < rows[other.path] < (2 / _BATCH_NOISE**2 if len(_shared_axes(other)) > 1 else _FEW_SAMPLES)
    ]
    lines += [
        f"{other.path}: a variance of {rows[other.path]} rows has a relative noise of "
        f"{percent(math.sqrt(2 / rows[other.path]))}, which eval mode does not have"
        for other in few
    ]
    if not lines:
        return None
    paths = {other.path for other in (*alone, *few)}
    words = [f"not synchronised over {ranks} processes"] if alone else []
    words += [f"with batch statistics of {min(rows[other.path] for other in few)} rows"] if few else []
    return Hit(
        severity="warning",
        sites=tuple(other.path for other in batched if other.path in paths),
        measured=f"{counted(len(paths), 'batch norm')} {' and '.join(words)}",
        evidence=evidence_lines(lines),
    )


def _gathers_nothing(facts: Facts) -> Outcome:
    """Batch norms whose statistics no batch has ever entered."""
    # Some classes of transformers draw the gains of batch norms at the start: nothing was to be gathered yet.
    if not facts.ungathered or (facts.training is None and facts.is_untrained):
        return None
    return Hit(
        severity="error",
        sites=facts.ungathered,
        measured=f"{counted(len(facts.ungathered), 'batch norm')} with mean 0 and variance 1 in every channel",
        evidence=evidence_lines(
            [f"{path}: gain or bias have moved, the running statistics have not" for path in facts.ungathered]
        ),
    )


def _batch_mode(other: OtherNorm) -> str | None:
    """In which mode a norm shares statistics between samples, or None."""
    if other.passport.verdict != "batch":
        return None
    reading = other.passport.readings.get("batch")
    if reading is None or reading.value is None:
        return "training"
    return str(reading.value["mode"]) if 0 in reading.value["axes"] else None


def _shared_axes(other: OtherNorm) -> list[int]:
    reading = other.passport.readings.get("batch")
    return [] if reading is None or reading.value is None else list(reading.value["axes"])


RULES = (
    Rule(
        id="C4",
        title="Statistics over time leak the future",
        severity="error",
        threshold=(
            "rows of earlier tokens move when later ones change, by 0.1 % or more (8 machine epsilons in 16 bits), "
            "while the norm's input stands still, in a model that is causal otherwise"
        ),
        source="DeepXi#18, btgym#79",
        why=(
            "A causal model must predict a token from those before it. Statistics that hold later tokens tell it "
            "about them: the loss in training is too good, and at generation, where they are not there yet, it fails."
        ),
        remedy=(
            "normalize each token by itself (LayerNorm, RMSNorm)",
            "where statistics over time are wanted, accumulate them over the past only",
        ),
        confirm="change the last token of a text: no logit before it may change",
        check=_leaks_future,
        follows=("C1",),
        looks_at=("norms", "other norms"),
    ),
    Rule(
        id="C5",
        title="Samples of a batch are coupled",
        severity="error",
        threshold=(
            "rows move with another sample in evaluation mode (error), in training mode only (note); or the modes "
            f"differ by more than {percent(_MODE_GAP)} of the output (warning)"
        ),
        source="Shen et al. 2020, arXiv:2003.07845; x-transformers#320",
        why=(
            "With statistics of the batch, an answer depends on what else was asked at the same time. A batch norm "
            "does so in training by design; where its running statistics do not describe the data, the model that is "
            "evaluated is not the one that was trained."
        ),
        remedy=(
            "use a norm of each token by itself (LayerNorm, RMSNorm)",
            "call model.eval() before evaluating, and check that every module follows",
            "train on, or pass data through in training mode, until the running statistics fit",
        ),
        confirm="the output of one sample alone, and in a batch: the difference must be rounding",
        check=_couples_batch,
        looks_at=("norms", "other norms"),
    ),
    Rule(
        id="C6",
        title="Padding enters the statistics",
        severity="error",
        threshold=(
            "rows of tokens move when ids under mask 0 change, by 0.1 % or more (8 machine epsilons in 16 bits), "
            "while the norm's input stands still"
        ),
        source="pytorch/pytorch#70529 and #81985, powernorm#13",
        why=(
            "Padding is as long as the longest text in the batch happens to make it. Where a norm counts it, real "
            "tokens are shifted and scaled by it: half a batch of zeros turns mean 0 and variance 1 into 0.9 and 0.35."
        ),
        remedy=(
            "take the moments over the tokens with mask 1 only",
            "use a norm of each token by itself (LayerNorm, RMSNorm)",
        ),
        confirm="pad one text by 10 and by 100: the rows of its tokens must not change",
        check=_counts_padding,
        follows=("C1",),
        looks_at=("norms", "other norms"),
    ),
    Rule(
        id="C7",
        title="Batch statistics are of too little",
        severity="warning",
        threshold=(
            "a batch norm that is no SyncBatchNorm in a run of several processes; or sqrt(2 / N) above "
            f"{percent(_BATCH_NOISE)}, the relative noise of a variance of N rows; over samples alone, fewer than "
            f"{_FEW_SAMPLES}"
        ),
        source="pytorch/pytorch#22192 and #48988, fvcore#152",
        why=(
            "Each process normalizes by its own share of the batch, so more processes mean noisier statistics and "
            "running ones that drift apart. A variance of 8 rows is off by 50 %, one of 128 by 12 %."
        ),
        remedy=(
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which weights by the number of rows",
            "a larger batch on each device, or a norm that needs none (LayerNorm, RMSNorm, GroupNorm)",
        ),
        confirm="compare running_mean between processes after some steps without broadcasting buffers",
        check=_uneven_batches,
        looks_at=("norms", "other norms"),
    ),
    Rule(
        id="C8",
        title="Batch norms without statistics",
        severity="error",
        threshold="running mean 0 and running variance 1 in every channel, beside a gain or a bias that has moved",
        source="inference takes what training gathered: Ioffe & Szegedy 2015, arXiv:1502.03167, algorithm 2",
        why=(
            "A batch norm that stands in evaluation mode while its model trains normalizes nothing: it divides by the "
            "variance 1 that it was made with. So does one whose statistics a checkpoint did not bring."
        ),
        remedy=(
            "call model.train() before training, and look for what calls .eval() on the norms",
            "where a checkpoint was loaded, look for running_mean and running_var among its missing keys",
            "with trained weights, pass some batches through in training mode to gather statistics",
        ),
        confirm="after one step, num_batches_tracked must be 1",
        check=_gathers_nothing,
        looks_at=("norms", "other norms"),
    ),
)
"""The rules of this group, in order."""
