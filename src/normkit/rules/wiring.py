"""Group D, the wiring: norms at another place than declared, at two places, twice in a row, or in place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from normkit.measurement.facts import Block, Site, place_of
from normkit.rules.facts import Facts
from normkit.rules.rule import NO_BASELINE, Case, Hit, Outcome, Rule, hit, same_rows
from normkit.rules.values import is_varied
from normkit.text import counted

_UNIT_ROWS = 1e-3
# Behind a norm that centres, rounding is all that remains of the mean.
_CENTRED = 1e-5
_FEWEST_ALIKE = 2
_PLACED = ("pre", "post", "peri", "output-only")
_SIDES = {
    "pre": "stands before a branch",
    "post": "stands in the stream, behind the sum",
    "output": "stands at the end of a branch",
}


@Rule(
    id="D2",
    title="Norms sit elsewhere than declared",
    severity="error",
    threshold=(
        "the placement of a block, from its outputs for scaled inputs, against the intent file (error); without one "
        "a single block that is placed otherwise than all others of its list, or one of whose norms is (warning)"
    ),
    source="Torch-KWT#13",
    why=(
        "norm(x + f(x)) and x + norm(f(x)) have the same norms and the same shapes. The first normalizes the "
        "stream at each block, the second never; the second is a fault where the first was meant, and the design "
        "of OLMo 2. Weights trained with one do not fit the other."
    ),
    remedy=(
        "move the norm to the side that was declared, or that the other blocks have",
        "if the new place is meant, change it in the intent file and train anew",
    ),
    confirm="scale a block's input by 100: the output of a post-norm block stays as long, any other grows",
    follows=("D3", "D6"),
    looks_at=("blocks",),
)
def other_placement(facts: Facts) -> Outcome:
    """Blocks whose norms are elsewhere than declared."""
    if facts.baseline is None:
        return _unlike_the_others(facts) or NO_BASELINE
    cases = []
    for block in facts.blocks:
        declared = facts.baseline.placements.get(block.path, "unknown")
        # A residual on the wrong side of a norm is D1.
        if declared in ("unknown", block.placement) or block.placement in ("unknown", "residual-after-norm"):
            continue
        words = f"{facts.baseline.source} declares {declared}, its norms are placed as in {block.placement}"
        # A block that is no module was not called on scaled inputs.
        words += "" if math.isnan(block.output_slope) else f" ({_slopes(block)})"
        cases.append(Case(block.path, "error", words))
    return hit(cases, f"{counted(len(cases), 'block')} with norms elsewhere than declared", "block")


def _unlike_the_others(facts: Facts) -> Hit | None:
    """Without a declaration: the only block of its list whose norms are elsewhere than in all others."""
    lists: dict[str, list[Block]] = {}
    for block in facts.blocks:
        lists.setdefault(block.path.rpartition(".")[0], []).append(block)
    cases = []
    for members in lists.values():
        (common, count), *_ = Counter(block.placement for block in members).most_common(1)
        odd = [block for block in members if block.placement != common]
        if count < _FEWEST_ALIKE or len(odd) != 1 or common not in _PLACED or facts.is_stock(odd[0].path):
            continue
        if odd[0].placement not in _PLACED:
            # Where its norms sit in several ways, the block has no placement, and each norm tells by itself.
            moved = _moved(facts, odd[0], members)
            words = f"{moved}; all norms of the {count} other blocks sit as in {common}-norm" if moved else ""
        else:
            words = f"placed as {odd[0].placement}-norm, the {count} other blocks as {common}-norm ({_slopes(odd[0])})"
        if words:
            cases.append(Case(odd[0].path, "warning", words))
    return hit(cases, f"{counted(len(cases), 'block')} with norms elsewhere than in the other blocks", "block")


def _moved(facts: Facts, odd: Block, members: Sequence[Block]) -> str:
    """The norms of a block whose role is another than that of the same norm in all other blocks, in words."""
    others = tuple(f"{block.path}." for block in members if block is not odd)
    lines = []
    for site in facts.sites:
        like = [
            each.role
            for each in facts.sites
            if each.path.startswith(others) and place_of(each.path) == place_of(site.path)
        ]
        if not site.path.startswith(f"{odd.path}.") or len(like) < _FEWEST_ALIKE or len(set(like)) > 1:
            continue
        if site.role in _SIDES and like[0] in _SIDES and site.role != like[0]:
            lines.append(f"{site.path} {_SIDES[site.role]}, elsewhere it {_SIDES[like[0]]}")
    return "; ".join(lines)


def _slopes(block: Block) -> str:
    """Reaction of output and branch to the scale of the stream, which distinguishes post-norm from the others."""
    output = "follows" if block.output_slope > 0.5 else "forgets"
    branch = "follows" if block.branch_slope > 0.5 else "forgets"
    return f"the output {output} the input's scale, the branch {branch} it"


@Rule(
    id="D4",
    title="One norm serves several places",
    severity="warning",
    threshold=(
        "more calls in a forward pass than declared or than the module around it has, or parameters shared with "
        "another norm (warning); where the config's class has a norm for each place (error)"
    ),
    source="OLMo#222",
    why=(
        "Attention and MLP read streams of different scale. One gain for both is a compromise, and its gradient "
        "is the sum of two; a checkpoint with two norms loses one of them silently. Parallel branches share one "
        "norm by design: they call it once."
    ),
    remedy=(
        "make a module for each place",
        "if sharing is meant, declare it in an intent file",
    ),
    confirm="count the calls of the module in one forward pass; compare id() of the weights",
)
def shared_norm(facts: Facts) -> Outcome:
    """A norm at more places than it was declared for, or called more often than the module around it."""

    def times(number: int) -> str:
        return "once" if number == 1 else f"{number} times"

    cases = []
    for site in facts.sites:
        sharing, declared = facts.shared.get(site.path), facts.declared(site.path)
        twins = () if sharing is None else sharing.twins
        meant = facts.intent.specs if facts.intent is not None else {}
        own = [path for path in twins if path in meant and not facts.is_tied_in_stock(site.path, path)]
        if own:
            words = f"serves {', '.join(own)} too, where the config's class has a norm for each"
            cases.append(Case(site.path, "error", words))
        elif declared is not None:
            if site.forward_calls > declared.calls:
                words = f"called {times(site.forward_calls)} in one pass, declared is {times(declared.calls)}"
                cases.append(Case(site.path, "error", words))
        elif sharing is not None and not facts.is_wired_as_stock(site.path, *twins):
            calls = f"called {times(sharing.calls)} in one pass, the module around it {times(sharing.around)}"
            parts = [calls] if sharing.calls > sharing.around else []
            parts += [f"shares its parameters with {', '.join(twins)}"] if twins else []
            cases.append(Case(site.path, "warning", "; ".join(parts)))
    return hit(cases, f"{counted(len(cases), 'norm')} at more than one place")


@Rule(
    id="D5",
    title="A norm follows a norm",
    severity="warning",
    threshold=(
        f"every input row has mean square 1 ± {_UNIT_ROWS:g}, centred if the norm centres: in one block behind "
        "a norm (warning), elsewhere (note); or the input is the unchanged output of the norm in front of a branch "
        "(warning); or it is the output of a norm with the same gain, or of the norm itself (error)"
    ),
    source="ggml-org/llama.cpp#1925",
    why=(
        "The second of two norms in a row changes nothing until the first has a gain, and then it undoes the effect "
        "of that gain on the length. Often the stream was meant to enter, not the first norm's output."
    ),
    remedy=(
        "remove one of the two",
        "check which tensor enters: the stream, or the output of a norm",
    ),
    confirm="replace the second norm by the identity: the output stays the same",
    follows=("D1", "D6"),
    is_of_text=True,
)
def norm_after_norm(facts: Facts) -> Outcome:
    """A norm whose input rows are normalized already, and not by the design of the config's class."""
    cases = []
    for order, site in enumerate(facts.sites):
        before = facts.sites[order - 1] if order and same_rows(facts.sites[order - 1].output, site.input) else None
        # The output of a norm before a branch goes to the branch; the output of a norm behind it goes to the stream.
        is_for_branch = before is not None and before.role == "pre" and before.block == site.block is not None
        # The second of these takes out the mean that the first leaves in.
        if before is not None and site.spec.centring.numerator and not before.spec.centring.numerator:
            is_for_branch = False
        paths = (site.path,) if before is None else (before.path, site.path)
        is_declared = all(facts.declared(path) is not None for path in paths)
        own, other = site.gain, None if before is None else before.gain
        has_varied_gain = own is not None and is_varied(own)
        is_copy = has_varied_gain and own is not None and other is not None and own.digest == other.digest
        sharing = facts.shared.get(site.path)
        twins = () if sharing is None else sharing.twins
        if site.path in facts.in_a_row and facts.declared(site.path) is None:
            # Rows of its second call are none of its first: no statistic of both tells.
            if not facts.is_wired_as_stock(site.path, *twins):
                words = "it is called on its own output: one norm is applied twice in a row"
                cases.append(Case(site.path, "error" if has_varied_gain else "warning", words))
            continue
        if is_declared or not (_is_normalized(site) or is_for_branch or is_copy) or facts.is_wired_as_stock(*paths):
            continue
        # A norm on an embedding or at the end of a block is often followed by a norm that reads the stream.
        is_inside = before is not None and before.block is not None and before.block == site.block
        origin = f"the output of {before.path}" if before is not None else "its input"
        if _is_normalized(site):
            words = f"{origin} already has rows of rms {site.input.rms_min:.5f} to {site.input.rms_max:.5f}"
            words += ", as its gain is still 1" if before is not None and before.gain is not None else ""
        else:
            words = f"its input is {origin}: two norms in a row, with only a gain between them"
            words += ", and the same gain: it is applied twice" if is_copy else ""
        # Functions with one gain that one module calls are a norm that this module applies twice.
        caller = site.path.partition(":")[0]
        is_within = is_copy and before is not None and before.path.partition(":")[0] == caller != site.path
        cases.append(
            Case(caller if is_within else site.path, "error" if is_copy else "warning" if is_inside else "note", words)
        )
    return hit(cases, f"{counted(len(cases), 'norm')} of rows that are normalized already")


def _is_normalized(site: Site) -> bool:
    rows = site.input
    if rows.rows < 2 or max(abs(rows.rms_min**2 - 1), abs(rows.rms_max**2 - 1)) > _UNIT_ROWS:
        return False
    return not site.spec.centring.numerator or rows.mean_energy < _CENTRED


@Rule(
    id="D6",
    title="A norm overwrites its input, or is not repeatable",
    severity="error",
    threshold="any bit of the input that the call changes; another output for the same input, in evaluation mode",
    source="nano-vllm#170, vllm-project/vllm#41972",
    why=(
        "The input is also the residual: if the norm changes it before it is added, the stream is lost. "
        "x.float() is no copy of a float32 tensor, so this may show in float32 and not in 16 bits. An output that "
        "changes from call to call contains memory that was never filled, or state of an earlier call."
    ),
    remedy=(
        "write to a new tensor: no mul_ or add_ on the input or on a view of it",
        "where the norm adds a residual, return the sum as a second output",
        "fill what torch.empty_like allocates before it is read, and draw no random numbers in evaluation mode",
    ),
    confirm="compare a clone of the input with it after the call, in float32; call twice and compare the outputs",
    looks_at=("norms", "other norms"),
)
def side_effects(facts: Facts) -> Outcome:
    """A norm that changes its own input, or that keeps something from one call to the next."""
    cases = []
    others = {other.path: other.passport for other in facts.others}
    dtypes = {site.path: site.dtype for site in facts.sites}
    for path, passport in {**facts.passports, **others}.items():
        repeated = passport.readings.get("repeatable")
        if repeated is not None and repeated.value is False:
            cases.append(Case(path, "error", repeated.evidence[0]))
        given = passport.readings.get("input")
        if given is None or given.value != "overwritten":
            continue
        tried = passport.readings.get("overwritten in")
        overwritten = [passport.dtype] if tried is None else tried.value
        is_here = dtypes.get(path, passport.dtype) in overwritten
        words = f"{given.evidence[0]}, in {' and '.join(overwritten)}"
        words += "" if is_here else f"; here it runs in {dtypes[path]}, where a conversion copies the input"
        cases.append(Case(path, "error" if is_here else "warning", words))
    for norm in facts.handwritten:
        if norm.keeps_scale:
            words = "yet five times that input gives five times the output: it keeps the scale of an earlier call"
            cases.append(Case(norm.path.partition(":")[0], "error", f"{norm.reason}; {words}"))
    return hit(cases, f"{counted(len(cases), 'norm')} that changes its input or depends on earlier calls")


RULES = (other_placement, shared_norm, norm_after_norm, side_effects)
"""The rules of this file."""
