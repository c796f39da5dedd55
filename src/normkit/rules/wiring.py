"""Group D, the wiring against what was declared: a norm at two places, twice in a row, in place, on the wrong side."""

from __future__ import annotations

import math
from collections import Counter

from normkit.measurement.facts import Block, Site
from normkit.measurement.sharing import Sharing
from normkit.rules.rule import NO_BASELINE, Case, Facts, Hit, Outcome, Rule, hit, same_rows
from normkit.rules.values import is_varied
from normkit.text import counted

_UNIT_ROWS = 1e-3
_KEPT = "five times that input leaves five times as long: it keeps a state, the scale of an earlier call"
# Behind a norm that centres, what is left of the mean is rounding.
_CENTRED = 1e-5
_FEWEST_ALIKE = 2
_PLACED = ("pre", "post", "peri", "output-only")


def _placed_otherwise(facts: Facts) -> Outcome:
    """Blocks whose norms sit elsewhere than declared."""
    if facts.baseline is None:
        return _unlike_the_others(facts) or NO_BASELINE
    cases = []
    for block in facts.blocks:
        declared = facts.baseline.placements.get(block.path, "unknown")
        # A residual on the wrong side of a norm has a rule of its own.
        if declared in ("unknown", block.placement) or block.placement in ("unknown", "residual-after-norm"):
            continue
        line = f"{block.path}: {facts.baseline.source} declares {declared}, its norms sit as in {block.placement}"
        # A block that is no module was not called on scaled inputs.
        seen = "" if math.isnan(block.output_slope) else f" ({_slopes(block)})"
        cases.append(Case(block.path, "error", 0.0, f"{line}{seen}"))
    return _hit(cases, "block", "whose norms sit elsewhere than declared")


def _unlike_the_others(facts: Facts) -> Hit | None:
    """Without a declaration: the only block of its list whose norms sit elsewhere than in all others."""
    lists: dict[str, list[Block]] = {}
    for block in facts.blocks:
        lists.setdefault(block.path.rpartition(".")[0], []).append(block)
    cases = []
    for members in lists.values():
        (common, count), *_ = Counter(block.placement for block in members).most_common(1)
        odd = [block for block in members if block.placement != common]
        if count < _FEWEST_ALIKE or len(odd) != 1 or common not in _PLACED or odd[0].placement not in _PLACED:
            continue
        if not facts.is_stock(odd[0].path):
            line = f"{odd[0].path}: placed as {odd[0].placement}-norm, the {count} other blocks as {common}-norm"
            cases.append(Case(odd[0].path, "warning", 0.0, f"{line} ({_slopes(odd[0])})"))
    return _hit(cases, "block", "whose norms sit elsewhere than in the other blocks")


def _slopes(block: Block) -> str:
    """Reaction of output and branch to the scale of the stream, which distinguishes post-norm from the others."""
    output = "follows" if block.output_slope > 0.5 else "forgets"
    branch = "follows" if block.branch_slope > 0.5 else "forgets"
    return f"the output {output} the input's scale, the branch {branch} it"


def _used_twice(facts: Facts) -> Outcome:
    """A norm at more places than it was declared for, or than what is around it runs."""
    cases = []
    for site in facts.sites:
        sharing = facts.shared.get(site.path)
        twins = () if sharing is None else sharing.twins
        meant = facts.intent.specs if facts.intent is not None else {}
        own = [path for path in twins if path in meant and not facts.is_tied_in_stock(site.path, path)]
        declared = None if facts.baseline is None else facts.baseline.norms.get(site.path)
        if own:
            line = f"{site.path}: serves {', '.join(own)} too, where the config's class has a norm for each"
            cases.append(Case(site.path, "error", 0.0, line))
        elif declared is not None:
            if site.forward_calls > declared.calls:
                calls = f"called {_times(site.forward_calls)} in one pass, declared is {_times(declared.calls)}"
                cases.append(Case(site.path, "error", 0.0, f"{site.path}: {calls}"))
        elif sharing is not None and not facts.is_wired_as_stock(site.path):
            cases.append(Case(site.path, "warning", 0.0, f"{site.path}: {_shared_in_words(sharing)}"))
    return _hit(cases, "norm", "at more than one place")


def _shared_in_words(sharing: Sharing) -> str:
    words = []
    if sharing.calls > sharing.around:
        words.append(f"called {_times(sharing.calls)} in one pass, what is around it {_times(sharing.around)}")
    if sharing.twins:
        words.append(f"shares its parameters with {', '.join(sharing.twins)}")
    return "; ".join(words)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _applied_twice(facts: Facts) -> Outcome:
    """A norm whose rows come in normalized already, and not by the design of the config's class."""
    cases = []
    for order, site in enumerate(facts.sites):
        before = facts.sites[order - 1] if order and same_rows(facts.sites[order - 1].output, site.input) else None
        # The output of a norm before a branch goes to the branch; the output of a norm behind it goes to the stream.
        is_for_branch = before is not None and before.role == "pre" and before.block == site.block is not None
        # The second of these takes out the mean that the first leaves in.
        if before is not None and site.spec.centring.numerator and not before.spec.centring.numerator:
            is_for_branch = False
        if not _is_normalized(site) and not is_for_branch:
            continue
        paths = (site.path,) if before is None else (before.path, site.path)
        declared = facts.baseline is not None and all(path in facts.baseline.norms for path in paths)
        if declared or facts.is_wired_as_stock(*paths):
            continue
        # A norm on an embedding or at the end of a block is often followed by a norm that reads the stream.
        inside = before is not None and before.block is not None and before.block == site.block
        is_copy = False
        low, high = site.input.rms_min, site.input.rms_max
        origin = f"the output of {before.path}" if before is not None else "what enters it"
        if _is_normalized(site):
            line = f"{site.path}: {origin} has rows of rms {low:.5f} to {high:.5f} already"
            line += ", as its gain is still 1" if before is not None and before.gain is not None else ""
        else:
            line = f"{site.path}: {origin} enters it as it is: two norms in a row, with only a gain between them"
            if before is not None and before.gain is not None and site.gain is not None:
                is_copy = is_varied(before) and before.gain.digest == site.gain.digest
            line += ", and the same gain: it is applied twice" if is_copy else ""
        cases.append(Case(site.path, "error" if is_copy else "warning" if inside else "note", 0.0, line))
    return _hit(cases, "norm", "of rows that are normalized already")


def _is_normalized(site: Site) -> bool:
    rows = site.input
    if rows.rows < 2 or max(abs(rows.rms_min**2 - 1), abs(rows.rms_max**2 - 1)) > _UNIT_ROWS:
        return False
    return not site.spec.centring.numerator or rows.mean_energy < _CENTRED


def _changes_what_it_should_not(facts: Facts) -> Outcome:
    """A norm that changes its own input, or that keeps something from one call to the next."""
    cases = []
    others = {other.path: other.passport for other in facts.others}
    dtypes = {site.path: site.dtype for site in facts.sites}
    for path, passport in {**facts.passports, **others}.items():
        repeated = passport.readings.get("repeatable")
        if repeated is not None and repeated.value is False:
            cases.append(Case(path, "error", 0.0, f"{path}: {repeated.evidence[0]}"))
        given = passport.readings.get("input")
        if given is None or given.value != "overwritten":
            continue
        tried = passport.readings.get("overwritten in")
        overwritten = [passport.dtype] if tried is None else tried.value
        same = dtypes.get(path, passport.dtype) in overwritten
        line = f"{path}: {given.evidence[0]}, in {' and '.join(overwritten)}"
        if not same:
            line += f"; here it runs in {dtypes[path]}, where a conversion spares the input"
        cases.append(Case(path, "error" if same else "warning", 0.0, line))
    cases += [
        Case(norm.path.partition(":")[0], "error", 0.0, f"{norm.path.partition(':')[0]}: {norm.reason}; yet {_KEPT}")
        for norm in facts.handwritten
        if norm.keeps_scale
    ]
    return _hit(cases, "norm", "with an output or an input that is not what it was")


def _hit(cases: list[Case], noun: str, words: str) -> Hit | None:
    return hit(cases, f"{counted(len(cases), noun)} {words}", noun)


RULES = (
    Rule(
        id="D2",
        title="Norms sit elsewhere than declared",
        severity="error",
        threshold=(
            "the placement of a block, from its answers to scaled inputs, against the intent file (error); without one "
            "a single block that is placed otherwise than all others of its list (warning)"
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
        check=_placed_otherwise,
        follows=("D3", "D6"),
        looks_at=("blocks",),
    ),
    Rule(
        id="D4",
        title="One norm serves several places",
        severity="warning",
        threshold=(
            "more calls in a forward pass than declared or than what is around it has, or parameters shared with "
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
        check=_used_twice,
    ),
    Rule(
        id="D5",
        title="A norm follows a norm",
        severity="warning",
        threshold=(
            f"every row enters with mean square 1 ± {_UNIT_ROWS:g}, centred if the norm centres: in one block behind "
            "a norm (warning), elsewhere (note); or the output of the norm in front of a branch enters as it is "
            "(warning; where both have the same gain, an error)"
        ),
        source="ggml-org/llama.cpp#1925",
        why=(
            "The second of two norms in a row changes nothing until the first has a gain, and then it takes away what "
            "that gain does to the length. Often the stream was meant to enter, not the first norm's output."
        ),
        remedy=(
            "remove one of the two",
            "check which tensor enters: the stream, or what was normalized already",
        ),
        confirm="replace the second norm by the identity: the output stays the same",
        check=_applied_twice,
        follows=("D1", "D6"),
        is_of_text=True,
    ),
    Rule(
        id="D6",
        title="A norm overwrites its input, or is not repeatable",
        severity="error",
        threshold="any bit of the input that the call changes; another output for the same input, in evaluation mode",
        source="nano-vllm#170, vllm-project/vllm#41972",
        why=(
            "The input is also the residual: changed under the hands of whoever adds it later, the stream is lost. "
            "x.float() is no copy of a float32 tensor, so this may show in float32 and not in 16 bits. An output that "
            "changes from call to call holds memory that was never filled, or what an earlier call left."
        ),
        remedy=(
            "write to a new tensor: no mul_ or add_ on the input or on a view of it",
            "where the norm adds a residual, return the sum as a second output",
            "fill what torch.empty_like allocates before it is read, and draw no random numbers in evaluation mode",
        ),
        confirm="compare a clone of the input with it after the call, in float32; call twice and compare the outputs",
        check=_changes_what_it_should_not,
        looks_at=("norms", "other norms"),
    ),
)
"""The rules of this group, in order."""
