"""Group F: dynamics. Attention logits explode, the residual stream grows, or the whole predicts worse than a guess."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from normkit.measurement.attention import SATURATED
from normkit.measurement.facts import Block, RowStatistics
from normkit.rules.facts import Facts
from normkit.rules.rule import CAUSES, WRONG_NORMS, Hit, NotChecked, Outcome, Rule, evidence_lines
from normkit.text import counted, percent

# Healthy heads, mean over the sampled rows: at most 27 in SmolLM2-135M, 18 in Gemma 3 270M, 45 in Qwen2.5-Coder
# 0.5B, whose logits reach 1,457 as its key bias adds to all of a row.
_LARGE, _EXPLODED, _CRITICAL = 100.0, 1e3, 1e4
# Share of saturated rows: large logits that share the weight, as under a distance penalty, do no harm.
_ROWS = 0.5

_FEWEST_STEPS, _FEWEST_BLOCKS = 4, 3
# Behind a norm a branch adds the same at any scale of the stream; without one it adds in proportion.
_FREE_BRANCH, _FREE_GROWTH, _NORMED_GROWTH = 0.5, 0.1, 0.6
# In the four trained models tried, the block that adds most adds at most 3.1 times as much as the next.
_HUGE = 50.0
_MASSIVE, _LONG, _TAKEN_AWAY = 1e3, 10.0, 0.25
# Nats above a uniform guess. Untrained models with small logits are some hundredths above it.
_WORSE = 1.0


@Rule(
    id="F1",
    title="Attention logits are too large",
    severity="error",
    threshold=(
        "a head's largest logit over its row's mean, mean over the sampled rows, in a head in which one key takes "
        f"over {percent(SATURATED)} in at least {percent(_ROWS)} of the rows: above {_LARGE:g} (warning), "
        f"{_EXPLODED:g} (error), {_CRITICAL:g} (critical)"
    ),
    source=(
        "growth to divergence: Wortsman et al. 2023, arXiv:2309.14322; QK-clip acts above 100 in Megatron-LM and "
        "Kimi K2, the further steps are ten times that each; healthy trained models stay below 45"
    ),
    why=(
        "Softmax depends only on the differences of a row's logits: a number that a key bias adds to all of them "
        "changes nothing. If they are hundreds apart, one token has weight 1: hardly any gradient reaches the others, "
        "and a small change of the input flips which one it is. In training such logits tend to grow on until the loss "
        "diverges."
    ),
    remedy=(
        "normalize queries and keys for each head (QK norm)",
        "in training: a lower learning rate, or QK-clip",
        "check the softmax scale: 1 / sqrt(head_dim), applied once",
    ),
    confirm="watch the spread over some steps, or over other texts: it grows where training is unstable",
    follows=("D3", "F11", "F12", *WRONG_NORMS, *CAUSES),
    looks_at=("attentions",),
    is_of_text=True,
)
def large_logits(facts: Facts) -> Outcome:
    """Heads in which one key takes nearly all the weight of a row, by the spread of the row's logits."""
    if not facts.attentions:
        return NotChecked("no attention call was seen")
    found = []
    for attention in facts.attentions:
        heads = zip(attention.spreads, attention.saturations, strict=True)
        spread, share = max(((spread, share) for spread, share in heads if share >= _ROWS), default=(0.0, 0.0))
        if spread > _LARGE:
            line = (
                f"{attention.path}: in its sharpest head the largest of a row's logits is {spread:.4g} above their "
                f"mean, and one key takes over {percent(SATURATED)} of the attention in {percent(share)} of the rows; "
                f"{attention.sampled_rows} query rows sampled over {counted(attention.heads, 'head')}, entropy "
                f"{attention.entropy:.2g} nat of {attention.uniform_entropy:.2g}"
            )
            found.append((spread, attention.path, line))
    if not found:
        return None
    found.sort(key=lambda each: -each[0])
    largest, named = found[0][0], {path for _, path, _ in found}
    critical = ": critical" if largest > _CRITICAL else ""
    return Hit(
        severity="error" if largest > _EXPLODED else "warning",
        sites=tuple(dict.fromkeys(attention.path for attention in facts.attentions if attention.path in named)),
        measured=(
            f"a row's largest logit is {largest:.4g} above the row's mean, in {counted(len(named), 'attention')}"
            f"{critical}"
        ),
        evidence=evidence_lines([line for _, _, line in found], "attention"),
    )


@Rule(
    id="F2",
    title="The residual stream is out of scale",
    severity="warning",
    threshold=(
        "over the later half of the blocks log variance rises in a straight line, by more than "
        f"{_NORMED_GROWTH:g} a block, or {_FREE_GROWTH:g} where the branch has no norm; or one block "
        f"adds over {_HUGE:g} times as much to the median row as any other"
    ),
    source="Kim et al. 2025, arXiv:2502.02732; Sun et al. 2025, arXiv:2502.05795",
    why=(
        "Behind a norm each block adds about the same variance, so the stream's variance rises in a straight "
        "line. If each block multiplies it instead, late blocks dominate early ones, 16-bit types overflow, and "
        "gradients grow alike."
    ),
    remedy=(
        "where a branch has no norm before it, normalize its input (pre-norm)",
        "where one does, normalize the branch's output too (peri-norm)",
        "scale the branches' output weights down by 1 / sqrt(2 * blocks) at initialisation",
        "one block alone: compare the scale of its output matrices with the other blocks', as after dequantization",
    ),
    confirm="plot the stream's rms over the depth on a logarithmic axis: a straight line is exponential growth",
    follows=("B5", "D1", "D3", "F11", "F12", *WRONG_NORMS, *CAUSES),
    looks_at=("blocks",),
    is_of_text=True,
)
def growing_stream(facts: Facts) -> Outcome:
    """Variance of the stream in the later half of the depth; one block that adds far more than any other."""
    if not facts.blocks:
        return NotChecked("no repeated blocks were found")
    depths = _depths(facts.blocks)
    if growing := next(filter(None, map(_growing_run, depths)), None):
        first, last, slope = growing[0], growing[-1], _slope(_log_variances(growing))
        start, end = first.stream_in.rms_median, last.stream_out.rms_median
        return Hit(
            severity="warning",
            sites=tuple(block.path for block in growing),
            measured=f"variance of the stream grows {math.exp(slope):.3g} times a block over {len(growing)} blocks",
            evidence=(
                f"{first.path} to {last.path}: the median row's rms goes from {start:.3g} to {end:.3g}",
                f"{last.path}: with its input scaled up, the branch follows with slope {last.branch_slope:.2f} "
                "(0 behind a norm, 1 without one)",
            ),
        )
    # The median row shows it: massive activations are in single rows.
    added = [block.branch_share * block.stream_in.rms_median for block in facts.blocks]
    if len(added) < _FEWEST_BLOCKS or not all(math.isfinite(value) for value in added):
        return None
    huge = facts.blocks[added.index(max(added))]
    # An encoder and a decoder add to streams of their own, and so do stages of several widths.
    depth, width = next(each for each in depths if huge in each), huge.stream_out.features
    alike = [
        value
        for value, block in zip(added, facts.blocks, strict=True)
        if block in depth and block.stream_out.features == width
    ]
    *_, second, largest = 0.0, *sorted(alike)
    if not largest > _HUGE * second > 0:
        return None
    return Hit(
        severity="warning",
        sites=(huge.path,),
        measured=f"one block adds {largest / second:.3g} times as much to the stream as any other",
        evidence=(
            f"{huge.path}: the median row changes by {huge.branch_share:.3g} times its length, to an rms of "
            f"{huge.stream_out.rms_median:.3g} from {huge.stream_in.rms_median:.3g}: the additions of other blocks are "
            "negligible",
        ),
    )


def _depths(blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks of each stream: of a list that does not go on with what the block before it returned, by themselves.

    So encoder and decoder are a depth each, and the stages of one width are one.
    """
    depths: list[list[Block]] = []
    for block in blocks:
        last = depths[-1][-1] if depths else None
        is_next = last is not None and (
            block.path.rpartition(".")[0] == last.path.rpartition(".")[0]
            or (block.stream_in.rms_median, block.stream_in.absmax)
            == (last.stream_out.rms_median, last.stream_out.absmax)
        )
        if is_next:
            depths[-1].append(block)
        else:
            depths.append([block])
    return depths


def _growing_run(blocks: Sequence[Block]) -> Sequence[Block]:
    """The blocks over which the stream grows exponentially, or nothing.

    Behind norms only the later half counts: there additive growth at most doubles the variance, while small embeddings
    make a healthy stream jump at the first blocks.
    """
    # The running statistics of a batch norm inside the branch keep the scale, and it is a norm all the same.
    free = all(block.branch_slope > _FREE_BRANCH and block.placement != "in-branch" for block in blocks)
    run = blocks if free else blocks[len(blocks) // 2 :]
    if len(run) < _FEWEST_STEPS or len({block.stream_in.features for block in run}) > 1:
        return ()
    logs = _log_variances(run)
    if not all(math.isfinite(value) for value in logs):
        return ()
    threshold = _FREE_GROWTH if free else _NORMED_GROWTH
    steady = all(after - before > threshold / 2 for before, after in pairwise(logs))
    if not steady or _slope(logs) <= threshold:
        return ()
    variances = [math.exp(value - max(logs)) for value in logs]
    return run if _r_squared(logs) > _r_squared(variances) else ()


def _log_variances(blocks: Sequence[Block]) -> list[float]:
    """log of the median row's mean square: at the input of the first block, and at the output of each."""
    rms = [blocks[0].stream_in.rms_median, *(block.stream_out.rms_median for block in blocks)]
    return [2 * math.log(value) if value > 0 else -math.inf for value in rms]


def _slope(values: Sequence[float]) -> float:
    """Slope of the least-squares line through values at 0, 1, 2, ..."""
    centre, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((index - centre) ** 2 for index in range(len(values)))
    return sum((index - centre) * (value - mean) for index, value in enumerate(values)) / spread


def _r_squared(values: Sequence[float]) -> float:
    """Share of the variance of the values that a straight line explains."""
    slope, centre, mean = _slope(values), (len(values) - 1) / 2, sum(values) / len(values)
    total = sum((value - mean) ** 2 for value in values)
    left = sum((value - mean - slope * (index - centre)) ** 2 for index, value in enumerate(values))
    return 1 - left / total if total > 0 else 0.0


@Rule(
    id="F13",
    title="Massive activations",
    severity="note",
    threshold=f"an element of a block's output above {_MASSIVE:g} times the median row's rms",
    source="Sun et al. 2024, arXiv:2402.17762; attention sinks: Xiao et al. 2023, arXiv:2309.17453",
    why=(
        "Trained transformers often keep a few huge elements in fixed features of the first token or of a "
        "delimiter: an early block writes them, a late one takes them away. Norms turn such a row into one fixed "
        "direction, and heads with nothing to look for attend there: a sink. It harms nothing by itself; it "
        "matters where numbers are quantized or kept in float16, or where that token is dropped from a cache."
    ),
    remedy=(
        "nothing, where the model is run as it was trained",
        "keep these features in 16 bits or more when activations are quantized, and the sink's token in the cache",
        "float16: see the headroom of the norms; bfloat16 holds them",
    ),
    confirm="set these elements to 0 in one forward pass: the loss rises by far, as heads lose their sink",
    follows=("B5", "D1", "E3", "F2", *WRONG_NORMS),
    looks_at=("blocks",),
    is_of_text=True,
)
def massive_activations(facts: Facts) -> Outcome:
    """Single elements far above the rest: where they begin, which blocks keep them, and where they end."""
    if not facts.blocks:
        return NotChecked("no repeated blocks were found")
    massive = [block for block in facts.blocks if is_massive(block.stream_out)]
    if not massive:
        return None
    first, last, fullest = massive[0], facts.blocks[-1], max(massive, key=lambda block: block.stream_out.absmax)
    entering = f"{first.stream_in.absmax:.4g}"
    if is_massive(first.stream_in):
        lines = [f"{first.path}: its input already has {entering}: it begins before the blocks"]
    else:
        lines = [f"{first.path}: it begins here: the output has {_largest(first)}, the input at most {entering}"]
    if fullest is not first:
        lines.append(f"{fullest.path}: it is largest here: the output has {_largest(fullest)}")
    stream = fullest.stream_out
    lowest = math.ceil(8 * math.log2(_LONG * stream.rms_median))
    rows = sum(count for place, count in stream.histogram if place >= lowest)
    lines.append(
        f"{fullest.path}: {rows:,} of {counted(stream.rows, 'row')} {'is' if rows == 1 else 'are'} over {_LONG:g} "
        "times as long as the median one"
    )
    # The threshold alone may be crossed because the other rows have grown.
    smaller = (block for block in facts.blocks if block.stream_out.absmax < _TAKEN_AWAY * stream.absmax)
    gone = next((block for block in smaller if block.index > fullest.index), None)
    if gone is None:
        lines.append(f"{last.path}: the last block still has it in its output, with {last.stream_out.absmax:.4g}")
    else:
        lines.append(f"{gone.path}: it ends here: the output has at most {gone.stream_out.absmax:.4g}")
    if fullest.peak is not None and fullest.peak.position == 0:
        lines.append(
            "it is at the first token of its text, an attention sink: heads with nothing to look for attend to it"
        )
    return Hit(
        severity="note",
        sites=tuple(dict.fromkeys(block.path for block in (first, fullest, gone or last))),
        measured=(
            f"an element {stream.absmax / stream.rms_median:.4g} times the median row's rms; "
            f"{len(massive)} of {counted(len(facts.blocks), 'block')} have such elements in their output"
        ),
        evidence=tuple(lines),
    )


def is_massive(stream: RowStatistics) -> bool:
    """Its largest element is a massive activation."""
    return stream.absmax > _MASSIVE * stream.rms_median > 0


def _largest(block: Block) -> str:
    if block.peak is None:
        return f"{block.stream_out.absmax:.4g}"
    token = f"token {block.peak.token!r}" if block.peak.token else "the token"
    return f"{block.peak.value:.4g} in feature {block.peak.feature} of {token} at position {block.peak.position}"


@Rule(
    id="F28",
    title="The model predicts the text worse than a uniform guess",
    severity="error",
    threshold=f"the loss of a trained model is more than {_WORSE:g} nat above log(vocabulary)",
    source="a uniform guess has log(vocabulary) by definition; a converted model that answers garbage: mlx-lm#1198",
    why=(
        "A model that works on this kind of text is far below this loss. Something is wrong with the model, with its "
        "weights or with the text. Norms can be right all the same."
    ),
    remedy=(
        "see whether loading left weights out, and whether biases or a whole kind of matrix are zeros: "
        "normkit compare MODEL REFERENCE names them",
        "check that the tokenizer is the model's own, and that the text is of the kind that it was trained on",
        "read the other findings: a wrong norm can do this alone",
    ),
    confirm="the loss of the model that this one was made from, on the same text",
    looks_at=("loss",),
    is_of_text=True,
)
def lost_language(facts: Facts) -> Outcome:
    """A trained model whose loss on a text is above that of equal probabilities."""
    loss, guess = facts.model.loss, facts.model.uniform_loss
    if not (facts.has_trained_matrices or facts.is_trained):
        return NotChecked("the model is not trained") if facts.has("loss") else None
    # Not so either where the loss is NaN.
    if not loss - guess > _WORSE:
        return None
    chance = f"a uniform guess over {math.exp(guess):,.0f} tokens gives it {math.exp(-guess):.1e}"
    return Hit(
        severity="error",
        sites=(),
        measured=f"a loss of {loss:.3f} nats per token, where a uniform guess has {guess:.3f}",
        evidence=(f"the right token has a probability of {math.exp(-loss):.1e} (geometric mean); {chance}",),
    )


RULES = (large_logits, growing_stream, massive_activations, lost_language)
"""The rules of this file."""
