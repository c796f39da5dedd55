"""Group D: the place. The residual is taken on the wrong side of a norm, or a norm is missing."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from normkit.measurement.baseline import Baseline
from normkit.measurement.facts import Block
from normkit.measurement.intent import Intent
from normkit.rules.likes import place_of
from normkit.rules.rule import NO_INTENT, Case, Facts, Hit, Outcome, Rule, evidence_lines, hit, same_rows
from normkit.text import counted

# Slope of a branch over the scale of its input: 0 behind a norm, 1 without one.
_FORGETS = 0.25
# Blocks that hand their stream on unnormalized.
_OPEN = ("pre", "peri", "output-only")


def _residual_after_norm(facts: Facts) -> Outcome:
    """Blocks that forget their input's scale without normalizing what leaves them."""
    wrong = [
        block
        for block in facts.blocks
        if block.placement == "residual-after-norm" and _hands_on(block, facts) and not _is_meant_so(block, facts)
    ]
    if not wrong:
        return None
    return Hit(
        severity="error",
        sites=tuple(block.path for block in wrong),
        measured=f"{counted(len(wrong), 'block')} of {len(facts.blocks)} add the branch to the normalized stream",
        evidence=evidence_lines(
            [
                f"{block.path}: with its input scaled up, the output keeps its length (slope {block.output_slope:.2f}, "
                "1 where the stream goes through), yet its rows differ in length, so no norm stands at the end"
                for block in wrong
            ],
            "block",
        ),
    )


def _hands_on(block: Block, facts: Facts) -> bool:
    """Its list is a chain. Members that are branches, each added to the stream outside, begin with a norm rightly."""
    parent = block.path.rpartition(".")[0]
    chain = [other for other in facts.blocks if other.path.rpartition(".")[0] == parent]
    return len(chain) < 2 or any(same_rows(one.stream_out, other.stream_in) for one, other in pairwise(chain))


def _is_meant_so(block: Block, facts: Facts) -> bool:
    """A stock class that is wired so was trained so; and it can be declared."""
    declared = facts.baseline is not None and facts.baseline.placements.get(block.path) == block.placement
    return declared or facts.is_stock(block.path)


def _missing_norm(facts: Facts) -> Outcome:
    """A norm that is declared, or that the config's class has, and this model does not run."""
    if facts.baseline is not None and (hit := _missing_declared(facts, facts.baseline)) is not None:
        return hit
    if (unread := _unread(facts)) is not None:
        return unread
    if facts.intent is None:
        return None if facts.baseline is not None else _open_stream(facts) or NO_INTENT
    running = facts.running
    replaced = [
        path for path in facts.intent.specs if path in facts.intent.replaced and not _has_norm_at(path, running)
    ]
    dead = [path for path in facts.intent.specs if path not in replaced and _is_dead(path, facts)]
    skipped = [path for path in facts.intent.specs if path not in replaced and _is_skipped(path, facts)]
    idle = [] if replaced or facts.final_norm is not None else _idle_outside_blocks(facts, facts.intent)
    idle = [path for path in idle if path not in dead and path not in skipped]
    missing = len(replaced) + len(dead) + len(skipped) + len(idle)
    if not missing:
        return None
    lines = [
        f"{path}: {facts.intent.source} computes {facts.intent.specs[path]}, no norm runs here" for path in replaced
    ]
    lines += [
        f"{path}: {facts.intent.source} computes {facts.intent.specs[path]}, and what is called here normalizes nothing"
        for path in dead
    ]
    lines += [
        f"{path}: {facts.intent.source} calls it, here it is never called, though its likes in other blocks are"
        for path in skipped
    ]
    lines += [
        f"{path}: {facts.intent.source} has it, here it is never called, and nothing normalizes the last block's output"
        for path in idle
    ]
    lines += _open_end(facts)
    return Hit(
        severity="error",
        sites=tuple(path for path in facts.intent.specs if path in {*replaced, *dead, *skipped, *idle}),
        measured=f"{counted(missing, 'norm')} of {facts.intent.source} {'is' if missing == 1 else 'are'} missing",
        evidence=evidence_lines(lines),
    )


def _unread(facts: Facts) -> Hit | None:
    """Norms that run and whose output nothing reads, but for those that the config's class calls so itself."""
    cases = [
        Case(path, "error", 0.0, f"{path}: it runs and nobody reads its output: what it was to feed is not normalized")
        for path in facts.unread
        if not facts.is_wired_as_stock(path)
    ]
    return hit(cases, f"{counted(len(cases), 'norm')} of which the output is unused")


def _open_stream(facts: Facts) -> Hit | None:
    """Pre-norm blocks whose sum nothing normalizes, in a model of which nothing tells what was meant: a note."""
    other = (*(norm.path for norm in facts.handwritten), *(norm.path for norm in facts.others))
    inside = tuple(f"{block.path}{mark}" for block in facts.blocks for mark in ".:")
    if facts.final_norm is not None or len(facts.blocks) < 2 or any(not path.startswith(inside) for path in other):
        return None
    if any(block.placement not in _OPEN for block in facts.blocks):
        return None
    last = facts.blocks[-1].path
    return Hit(
        severity="note",
        sites=(last,),
        measured="a pre-norm stack without a final norm",
        evidence=(
            f"{last}: no norm stands behind the last block, whose output is the sum of all blocks",
            *_open_end(facts),
            "a note, as nothing tells what was meant, and a norm may follow outside of what was inspected",
        ),
    )


def _is_dead(path: str, facts: Facts) -> bool:
    """It is called, normalizes nothing, and is not the config's class with its own forward."""
    return path in facts.called and not facts.is_stock(path) and not _has_norm_at(path, facts.running)


def _is_skipped(path: str, facts: Facts) -> bool:
    """Nothing calls it, the module around it is not the config's class, and norms of its name run in other blocks."""
    parent = path.rpartition(".")[0]
    if not facts.called or path in facts.called or parent not in facts.called or facts.is_stock(parent):
        return False
    running = facts.running
    return not _has_norm_at(path, running) and any(place_of(other) == place_of(path) for other in running)


def _missing_declared(facts: Facts, baseline: Baseline) -> Hit | None:
    """Declared norms that do not run, but for those of blocks that are not there."""
    running = facts.running
    gone = set(baseline.placements) - {block.path for block in facts.blocks}
    missing = [
        path
        for path in baseline.norms
        if not _has_norm_at(path, running) and not any(path.startswith((f"{block}.", f"{block}:")) for block in gone)
    ]
    lines = [f"{path}: {baseline.source} declares {baseline.norms[path].spec}, no norm runs here" for path in missing]
    sites = tuple(missing)
    # A norm that is tied to another one runs in that one's place.
    final, tied = baseline.final_norm, running - {site.path for site in facts.sites}
    open_ended = final is not None and facts.final_norm is None and final not in tied
    if final is not None and open_ended and final not in sites:
        sites = (*sites, final)
        lines.append(f"{final}: declared as the final norm; it runs, but nothing normalizes what leaves the last block")
    if not sites:
        return None
    words = "is" if len(sites) == 1 else "are"
    return Hit(
        severity="error",
        sites=sites,
        measured=f"{counted(len(sites), 'norm')} of {baseline.source} {words} missing",
        evidence=evidence_lines(lines + (_open_end(facts) if open_ended else [])),
    )


def _normalized_unseen(facts: Facts) -> Outcome:
    """Rows normalized where no norm was found, and blocks whose branch forgets the scale of its input without one."""
    handwritten = [norm for norm in facts.handwritten if not norm.keeps_scale]
    seen = [norm.path for norm in handwritten]
    known = [*seen, *(site.path for site in facts.sites), *(other.path for other in facts.others)]
    cases = [Case(norm.path, "note", 1.0, f"{norm.path}: {norm.reason}") for norm in handwritten]
    for block in facts.blocks:
        # A block of one called norm is that norm's; one that is not linear for another reason also forgets scale.
        if any(path.startswith((f"{block.path}.", f"{block.path}:")) or path == block.path for path in known):
            continue
        if abs(block.branch_slope) <= _FORGETS:
            line = (
                f"{block.path}: with its input scaled up, its branch stands still (slope {block.branch_slope:.2f}, 0 "
                "behind a norm), and no norm was found in it: it is one that no torch function shows"
            )
            cases.append(Case(block.path, "note", 0.0, line))
    return hit(cases, f"rows are normalized at {counted(len(cases), 'place')} where no norm was found", "place")


def _open_end(facts: Facts) -> list[str]:
    """The lengths of the rows after the last block, if no final norm follows it."""
    if not facts.blocks or facts.final_norm is not None:
        return []
    low, _, high = facts.blocks[-1].stream_out.rms_quantiles
    return [
        f"{facts.blocks[-1].path}: rows leave the last block with an rms from {low:.3g} (5 %) to {high:.3g} (95 %), "
        "and reach what reads them as they are"
    ]


def _has_norm_at(path: str, running: Collection[str]) -> bool:
    """A norm runs here, inside what stands here now, or as a function of the enclosing module."""
    parent = path.rpartition(".")[0]
    return path in running or any(site.startswith((f"{path}.", f"{path}:", f"{parent}:")) for site in running)


def _idle_outside_blocks(facts: Facts, intent: Intent) -> list[str]:
    """Norms of the config's class outside the blocks that did not run, where the blocks leave the stream as it is."""
    open_ended = sum(1 for block in facts.blocks if block.placement in _OPEN)
    if not facts.blocks or open_ended < len(facts.blocks) / 2:
        return []
    running = facts.running
    return [
        path
        for path in intent.specs
        if not _has_norm_at(path, running) and not any(path.startswith(f"{block.path}.") for block in facts.blocks)
    ]


RULES = (
    Rule(
        id="D7",
        title="Rows are normalized where no norm was found",
        severity="note",
        threshold=(
            "a product or quotient outside all norms that makes rows of many lengths alike to 1 %; or a block without "
            f"a norm whose branch grows with slope {_FORGETS:g} or less in the scale of its input"
        ),
        source="a norm forgets the scale of its input: van Laarhoven 2017, arXiv:1706.05350",
        why=(
            "A norm written out in a forward, as x * rsqrt(mean(x^2) + eps), is no module and no function that can be "
            "called by itself. Its formula, its eps, its gain and its types are not checked by any rule."
        ),
        remedy=(
            "make it a module, or call torch.nn.functional.rms_norm or layer_norm: then every rule looks at it",
            "check it by itself: normkit identify and nk.testing.assert_conforms take a function",
        ),
        confirm="replace the expression by nk.normalize with the spec that is meant, and compare the outputs",
        check=_normalized_unseen,
    ),
    Rule(
        id="D1",
        title="The residual is taken after the norm",
        severity="error",
        threshold="output length does not follow the input's (slope near 0), yet rows leave with different lengths",
        source="pytorch/pytorch#61165, tracel-ai/burn#1056",
        why=(
            "A pre-norm block computes x + f(norm(x)). With norm(x) + f(norm(x)) the stream loses its scale at every "
            "block: the direct path for gradients is gone, and weights trained with the other wiring do not fit."
        ),
        remedy=(
            "keep the block's input before normalizing it, and add the branch to that: x + f(norm(x))",
            "if the weights were trained this way, keep the wiring: changing it breaks them",
        ),
        confirm="scale the block's input by 100: the output of a pre-norm block grows about 100 times",
        check=_residual_after_norm,
        follows=("D6",),
        looks_at=("blocks",),
    ),
    Rule(
        id="D3",
        title="A norm of the architecture is missing",
        severity="error",
        threshold=(
            "a norm that is declared or that the config's class has, and that this model replaced, never calls, or "
            "calls without its rows being normalized; a norm whose output nothing reads; pre-norm blocks of a model "
            "without a config behind which no norm stands (note)"
        ),
        source="vllm-project/speculators#313, ggml-org/llama.cpp#12957",
        why=(
            "What leaves pre-norm blocks grows with depth and differs in length from token to token. The final norm "
            "brings it to the scale that the output weights were trained on; without it logits are far too large, "
            "and how far depends on the token."
        ),
        remedy=(
            "apply the norm, also where hidden vectors are exported to another model",
            "check that its weights were loaded",
        ),
        confirm="compare the input of the output layer with that of the original model on one text",
        check=_missing_norm,
        follows=("E3",),
    ),
)
"""The rules of this group, in order."""
