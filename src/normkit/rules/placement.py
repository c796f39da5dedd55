"""Group D: the place. The residual is taken on the wrong side of a norm, or a norm is missing."""

from __future__ import annotations

from itertools import pairwise

from normkit.measurement.baseline import Baseline
from normkit.measurement.facts import place_of
from normkit.measurement.intent import Intent
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import NO_INTENT, Case, Hit, Outcome, Rule, evidence_lines, hit, same_rows
from normkit.text import counted

# Slope of a branch over the scale of its input: 0 behind a norm, 1 without one.
_FORGETS = 0.25
# Blocks whose output is not normalized.
_OPEN = ("pre", "peri", "output-only")
_FEWEST_OTHERS = 2


@Rule(
    id="D1",
    title="The residual is taken after the norm",
    severity="error",
    threshold="output length does not follow the input's (slope near 0), yet output rows have different lengths",
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
    follows=("D6",),
    looks_at=("blocks",),
)
def residual_after_norm(facts: Facts) -> Outcome:
    """Blocks that forget their input's scale and do not normalize their output."""
    cases = []
    for block in facts.blocks:
        parent = block.path.rpartition(".")[0]
        # Members of a list that are branches, each added to the stream outside, rightly begin with a norm.
        chain = [other for other in facts.blocks if other.path.rpartition(".")[0] == parent]
        is_chain = len(chain) < 2 or any(same_rows(one.stream_out, other.stream_in) for one, other in pairwise(chain))
        # A stock class was trained with its own wiring; any wiring can be declared.
        declared = None if facts.baseline is None else facts.baseline.placements.get(block.path)
        is_meant = declared == block.placement or facts.is_stock(block.path)
        # The norm of an embedding may stand in the first block: none of the others has it.
        elsewhere = {place_of(site.path) for site in facts.sites if not site.path.startswith(f"{block.path}.")}
        is_meant |= len(chain) > 1 and any(
            site.path.startswith(f"{block.path}.")
            and same_rows(block.stream_in, site.input)
            and place_of(site.path) not in elsewhere
            for site in facts.sites
        )
        if block.placement == "residual-after-norm" and is_chain and not is_meant:
            words = (
                f"with its input scaled up, the output keeps its length (slope {block.output_slope:.2f}, 1 if the "
                "stream is added unchanged), yet its rows differ in length, so the block does not end with a norm"
            )
            cases.append(Case(block.path, "error", words))
    measured = f"{counted(len(cases), 'block')} of {len(facts.blocks)} add the branch to the normalized stream"
    return hit(cases, measured, "block")


@Rule(
    id="D3",
    title="A norm of the architecture is missing",
    severity="error",
    threshold=(
        "a norm that is declared or that the config's class has, and that this model replaced, never calls, or "
        "calls without its rows being normalized; a norm whose output nothing reads; one that runs in all other "
        "modules of a class, at least two (warning; in the first of them, or of two modules, a note); pre-norm blocks "
        "of a model without a config and without a norm behind the last block (note)"
    ),
    source="vllm-project/speculators#313, ggml-org/llama.cpp#12957",
    why=(
        "The output of pre-norm blocks grows with depth and differs in length from token to token. The final norm "
        "brings it to the scale that the output weights were trained on; without it logits are far too large, "
        "by a factor that depends on the token."
    ),
    remedy=(
        "apply the norm, also where hidden vectors are exported to another model",
        "check that its weights were loaded",
    ),
    confirm="compare the input of the output layer with that of the original model on one text",
    follows=("E3",),
)
def missing_norm(facts: Facts) -> Outcome:
    """A norm that is declared, or that the config's class has, and this model does not run."""
    if facts.baseline is not None and (found := _missing_declared(facts, facts.baseline)) is not None:
        return found
    unread = [
        Case(path, "error", "it runs and nothing reads its output: the tensor that should be normalized is not")
        for path in facts.unread
        # The config's class may call norms so itself.
        if not facts.is_wired_as_stock(path)
    ]
    if unread:
        return hit(unread, f"{counted(len(unread), 'norm')} with an unused output")
    if facts.intent is None:
        return None if facts.baseline is not None else _left_out(facts) or _open_stream(facts) or NO_INTENT
    return _missing_of_class(facts, facts.intent) or _left_out(facts)


def _left_out(facts: Facts) -> Hit | None:
    """Norms that run in all like modules but one, which is none of the config's class."""
    cases = []
    for each in facts.omissions:
        if facts.is_stock(each.path.rpartition(".")[0]) or facts.declared(each.path) is not None:
            continue
        words = "the norm is there and never called" if each.is_uncalled else "there is no norm"
        words += f", and one runs in {'' if each.others == 1 else 'each of '}{counted(each.others, 'other module')}"
        words += " of its class"
        # Two modules have no majority, and the first block of ModernBERT has no norm by design.
        severity: Severity = "note" if each.others < _FEWEST_OTHERS or each.is_first else "warning"
        cases.append(Case(each.path, severity, words, each.others))
    return hit(cases, f"{counted(len(cases), 'norm')} left out that like modules have")


def _missing_of_class(facts: Facts, intent: Intent) -> Hit | None:
    """Norms of the config's class that were replaced, that normalize nothing, or that are never called."""
    lines: dict[str, str] = {}
    for path, spec in intent.specs.items():
        if _has_norm_at(path, facts):
            continue
        parent = path.rpartition(".")[0]
        if path in intent.replaced:
            lines[path] = f"{intent.source} computes {spec}, no norm runs here"
        elif path in facts.called and not facts.is_stock(path):
            lines[path] = f"{intent.source} computes {spec}, and the module that is called here normalizes nothing"
        elif (
            facts.called
            and path not in facts.called
            and parent in facts.called
            and not facts.is_stock(parent)
            and any(place_of(other) == place_of(path) for other in facts.running)
        ):
            lines[path] = f"{intent.source} calls it, here it is never called, though norms like it in other blocks are"
    known = {norm.path for norm in facts.batch_norms}
    for path in intent.batch_eps:
        if path in intent.replaced and path not in known:
            lines[path] = f"{intent.source} has a batch norm, none runs here"
    is_replaced = any(path in intent.replaced for path in lines)
    num_open = sum(block.placement in _OPEN for block in facts.blocks)
    if facts.blocks and num_open >= len(facts.blocks) / 2 and facts.final_norm is None and not is_replaced:
        # Norms outside the blocks that did not run, where the blocks do not normalize their output.
        inside = tuple(f"{block.path}." for block in facts.blocks)
        for path in intent.specs:
            if path not in lines and not _has_norm_at(path, facts) and not path.startswith(inside):
                lines[path] = (
                    f"{intent.source} has it, here it is never called, and nothing normalizes the last block's output"
                )
    if not lines:
        return None
    return Hit(
        severity="error",
        sites=tuple(path for path in (*intent.specs, *intent.batch_eps) if path in lines),
        measured=f"{counted(len(lines), 'norm')} of {intent.source} {'is' if len(lines) == 1 else 'are'} missing",
        evidence=evidence_lines([*(f"{path}: {words}" for path, words in lines.items()), *_open_end(facts)]),
    )


def _missing_declared(facts: Facts, baseline: Baseline) -> Hit | None:
    """Declared norms that do not run, except those of blocks that are not there."""
    gone = set(baseline.placements) - {block.path for block in facts.blocks}
    inside = tuple(f"{block}{mark}" for block in gone for mark in ".:")
    sites = [path for path in baseline.norms if not _has_norm_at(path, facts) and not path.startswith(inside)]
    lines = [f"{path}: {baseline.source} declares {baseline.norms[path].spec}, no norm runs here" for path in sites]
    known = {norm.path for norm in facts.batch_norms}
    lost = [path for path in baseline.batch_norms if path not in known and not path.startswith(inside)]
    # Folding takes nearly all of them out.
    lost = lost if 2 * len(lost) < len(baseline.batch_norms) else []
    sites += lost
    lines += [f"{path}: {baseline.source} declares a batch norm, none runs here" for path in lost]
    # A norm that is tied to another one runs in that one's place.
    final, tied = baseline.final_norm, facts.running - {site.path for site in facts.sites}
    open_ended = final is not None and facts.final_norm is None and final not in tied
    if final is not None and open_ended and final not in sites:
        sites.append(final)
        lines.append(f"{final}: declared as the final norm; it runs, but nothing normalizes the last block's output")
    if not sites:
        return None
    return Hit(
        severity="error",
        sites=tuple(sites),
        measured=f"{counted(len(sites), 'norm')} of {baseline.source} {'is' if len(sites) == 1 else 'are'} missing",
        evidence=evidence_lines(lines + (_open_end(facts) if open_ended else [])),
    )


def _open_stream(facts: Facts) -> Hit | None:
    """Pre-norm blocks whose sum nothing normalizes, in a model with unknown intent: a note."""
    others = (*(norm.path for norm in facts.handwritten), *(norm.path for norm in facts.others))
    # A batch norm may be the final one, and a norm that reads the last block's output beside others, as in a UNet.
    last_inside = max((site.order for site in facts.sites if site.block is not None), default=-1)
    if facts.batch_norms or any(site.block is None and site.order > last_inside for site in facts.sites):
        return None
    inside = tuple(f"{block.path}{mark}" for block in facts.blocks for mark in ".:")
    if facts.final_norm is not None or len(facts.blocks) < 2 or any(not path.startswith(inside) for path in others):
        return None
    if any(block.placement not in _OPEN for block in facts.blocks):
        return None
    last = facts.blocks[-1].path
    return Hit(
        severity="note",
        sites=(last,),
        measured="a pre-norm stack without a final norm",
        evidence=(
            f"{last}: no norm is behind the last block, whose output is the sum of all blocks",
            *_open_end(facts),
            "a note, as it is unknown what was meant, and a norm may follow outside of what was inspected",
        ),
    )


def _open_end(facts: Facts) -> list[str]:
    """The lengths of the rows after the last block, if no final norm follows it."""
    if not facts.blocks or facts.final_norm is not None:
        return []
    low, _, high = facts.blocks[-1].stream_out.rms_quantiles
    return [
        f"{facts.blocks[-1].path}: the last block's output rows have an rms from {low:.3g} (5 %) to {high:.3g} (95 %), "
        "and the next module reads them as they are"
    ]


def _has_norm_at(path: str, facts: Facts) -> bool:
    """A norm runs here, inside the module that is here now, or as a function of the enclosing module."""
    parent = path.rpartition(".")[0]
    return path in facts.running or any(
        site.startswith((f"{path}.", f"{path}:", f"{parent}:")) for site in facts.running
    )


@Rule(
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
)
def unseen_norm(facts: Facts) -> Outcome:
    """Rows normalized where no norm was found, and blocks whose branch forgets the scale of its input without one."""
    handwritten = [norm for norm in facts.handwritten if not norm.keeps_scale]
    cases = [Case(norm.path, "note", norm.reason, 1.0) for norm in handwritten]
    known = [norm.path for norm in handwritten] + [site.path for site in facts.sites]
    known += [other.path for other in facts.others] + [norm.path for norm in facts.batch_norms]
    for block in facts.blocks:
        # A block of one called norm is that norm's; one that is not linear for another reason also forgets scale.
        if any(path.startswith((f"{block.path}.", f"{block.path}:")) or path == block.path for path in known):
            continue
        if abs(block.branch_slope) <= _FORGETS:
            words = (
                f"with its input scaled up, its branch does not change (slope {block.branch_slope:.2f}, 0 behind a "
                "norm), and no norm was found in it: no torch function shows it"
            )
            cases.append(Case(block.path, "note", words))
    return hit(cases, f"rows are normalized at {counted(len(cases), 'place')} where no norm was found", "place")


RULES = (residual_after_norm, missing_norm, unseen_norm)
"""The rules of this file."""
