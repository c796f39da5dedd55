"""Group F: dynamics. Attention logits explode, or the residual stream grows from block to block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from normkit.inspection.result import Attention, Block, Severity
from normkit.inspection.rules.rule import Facts, Hit, NotChecked, Outcome, Rule, counted, shortened, worst

# The healthy first block of MiniLM reaches 67, under a bound of 100.
_LARGE, _EXPLODED, _CRITICAL = 100.0, 1e3, 1e4
_COLLAPSED, _LONG_ROW = 0.1, math.log(32)

_FEWEST_STEPS = 4
# Behind a norm a branch adds the same at any scale of the stream; without one it adds in proportion.
_FREE_BRANCH, _FREE_GROWTH, _NORMED_GROWTH = 0.5, 0.1, 0.6
_MASSIVE = 1e3


def _logits_explode(facts: Facts) -> Outcome:
    """Exact logits of sampled rows; a large bound alone proves nothing, nor does low entropy."""
    if not facts.attentions:
        return NotChecked("no attention call was seen")
    cases = [(attention, severity) for attention in facts.attentions if (severity := _logit_severity(attention))]
    if not cases:
        return None
    cases.sort(key=lambda case: -case[0].sampled_max)
    largest = cases[0][0].sampled_max
    named = {attention.path for attention, _ in cases}
    critical = ": critical" if largest > _CRITICAL else ""
    return Hit(
        severity=worst([severity for _, severity in cases]),
        sites=tuple(dict.fromkeys(attention.path for attention in facts.attentions if attention.path in named)),
        measured=f"largest sampled logit {largest:.4g} over {counted(len(named), 'attention')}{critical}",
        evidence=shortened([_logit_line(attention) for attention, _ in cases], "attention"),
    )


def _logit_severity(attention: Attention) -> Severity | None:
    # Infinite logits are a matter of precision, which has its own rule.
    if not math.isfinite(attention.sampled_max):
        return None
    if attention.sampled_max > _EXPLODED:
        return "error"
    return "warning" if attention.sampled_max > _LARGE else None


def _logit_line(attention: Attention) -> str:
    line = (
        f"{attention.path}: largest logit {attention.sampled_max:.4g} over {attention.sampled_rows} sampled query "
        f"rows, none above {attention.bound:.4g}"
    )
    if attention.uniform_entropy >= _LONG_ROW and attention.entropy_min < _COLLAPSED:
        line += (
            f"; the sharpest head looks at one token only (entropy {attention.entropy_min:.2g} nat, "
            f"{attention.uniform_entropy:.2g} if it looked at all alike)"
        )
    return line


def _stream_grows(facts: Facts) -> Outcome:
    """Variance of the stream in the later half of the depth; then single elements far above the rest."""
    if not facts.blocks:
        return NotChecked("no repeated blocks were found")
    growing = _growing_run(facts.blocks)
    if growing:
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
    massive = [block for block in facts.blocks if block.stream_out.absmax > _MASSIVE * block.stream_out.rms_median > 0]
    if not massive:
        return None
    ratios = [block.stream_out.absmax / block.stream_out.rms_median for block in massive]
    return Hit(
        severity="note",
        sites=tuple(block.path for block in massive),
        measured=f"an element {max(ratios):.3g} times the median row's rms after {counted(len(massive), 'block')}",
        evidence=shortened(
            [
                f"{block.path}: largest magnitude {block.stream_out.absmax:.4g} beside a median rms of "
                f"{block.stream_out.rms_median:.3g}: a massive activation, usual in trained models"
                for block in massive
            ],
            "block",
        ),
    )


def _growing_run(blocks: Sequence[Block]) -> Sequence[Block]:
    """The blocks over which the stream grows exponentially, or nothing.

    Behind norms only the later half is looked at: there additive growth at most doubles the variance,
    while small embeddings make a healthy stream jump at the first blocks.
    """
    free = all(block.branch_slope > _FREE_BRANCH for block in blocks)
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
    """log of the median row's mean square: entering the first block, and leaving each."""
    rms = [blocks[0].stream_in.rms_median, *(block.stream_out.rms_median for block in blocks)]
    return [2 * math.log(value) if value > 0 else -math.inf for value in rms]


def _slope(values: Sequence[float]) -> float:
    """Of the least-squares line through values at 0, 1, 2, ..."""
    centre, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((index - centre) ** 2 for index in range(len(values)))
    return sum((index - centre) * (value - mean) for index, value in enumerate(values)) / spread


def _r_squared(values: Sequence[float]) -> float:
    """Share of the variance of the values that a straight line explains."""
    slope, centre, mean = _slope(values), (len(values) - 1) / 2, sum(values) / len(values)
    total = sum((value - mean) ** 2 for value in values)
    left = sum((value - mean - slope * (index - centre)) ** 2 for index, value in enumerate(values))
    return 1 - left / total if total > 0 else 0.0


RULES = (
    Rule(
        id="F1",
        title="Attention logits are too large",
        severity="error",
        threshold=(
            f"an exact logit of the sampled query rows above {_LARGE:g} (warning), above {_EXPLODED:g} (error), "
            f"above {_CRITICAL:g} (critical)"
        ),
        source=(
            "growth to divergence: Wortsman et al. 2023, arXiv:2309.14322; QK-clip acts above 100 in Megatron-LM and "
            "Kimi K2, the further steps are ten times that each"
        ),
        why=(
            "Softmax of logits hundreds apart is one token with weight 1: hardly any gradient reaches the others, and "
            "a small change of the input flips which one it is. In training such logits tend to grow on until the "
            "loss diverges."
        ),
        remedy=(
            "normalize queries and keys for each head (QK norm)",
            "in training: a lower learning rate, or QK-clip",
            "check the softmax scale: 1 / sqrt(head_dim), applied once",
        ),
        confirm="watch the largest logit over some steps, or over other texts: it grows where training is unstable",
        check=_logits_explode,
        follows=("F11", "F12"),
    ),
    Rule(
        id="F2",
        title="The residual stream is out of scale",
        severity="warning",
        threshold=(
            "over the later half of the blocks log variance rises in a straight line, by more than "
            f"{_NORMED_GROWTH:g} a block, or {_FREE_GROWTH:g} where no norm stands in the branch (warning); an element "
            f"above {_MASSIVE:g} times the median rms (note)"
        ),
        source=(
            "Kim et al. 2025, arXiv:2502.02732; Sun et al. 2025, arXiv:2502.05795; massive activations: "
            "Sun et al. 2024, arXiv:2402.17762"
        ),
        why=(
            "Behind a norm each block adds about the same variance, so the stream's variance rises in a straight "
            "line. Where it multiplies instead, late blocks dwarf early ones, 16-bit types overflow, and gradients "
            "grow alike. Single huge elements are usual in trained models, and matter where numbers are quantized."
        ),
        remedy=(
            "normalize the input of each branch (pre-norm), or its output too (peri-norm)",
            "scale the branches' output weights down by 1 / sqrt(2 * blocks) at initialisation",
        ),
        confirm="plot the stream's rms over the depth on a logarithmic axis: a straight line is exponential growth",
        check=_stream_grows,
        follows=("A5", "B5", "D1", "F11", "F12"),
    ),
)
"""The rules of this group, in order."""
