"""A plan of folding and its verification in words."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from normkit.checkpoint.logits import Agreement
from normkit.checkpoint.plan import FoldPlan, NormChange
from normkit.checkpoint.reader import TensorInfo
from normkit.checkpoint.shard import output_info
from normkit.checkpoint.verification import Checked, Verification
from normkit.models.graph import Graph
from normkit.show.grouping import merged, pattern
from normkit.show.parts import Column, Fact, Section, Table, Tone, Verdict, printable
from normkit.text import counted, percent, shortened, significant

_FATES = {
    "folded": "folded",
    "mantissa": "powers of two folded",
    "scaled": "divided",
    "divided": "kept as b / g",
    "shift": "kept as x + b",
    "plain": "1 + weight stored",
    "identity": "nothing to fold",
    "none": "-",
    "left": "left",
}
# Coordinates that stay whole are told in a remark.
_IN_PART = ("mantissa", "scaled")
_RELATIONS = {
    "identical": "bit for bit the source's",
    "power": "times powers of two",
    "product": "one product, rounded once",
    "sum": "summed in float64, rounded once",
    "constant": "constants",
}
_COLUMNS = (
    Column("norm", "norm"),
    Column("count", "count", numeric=True),
    Column("gain", "gain"),
    Column("bias", "bias"),
    Column("kind", "becomes"),
    Column("readers", "folded into"),
)
_LEFT = Verdict(tone="warning", headline="asked for and not done, as it would change what the model computes")
_KEPT = Verdict(tone="note", headline="kept where it is, exactly")
_TONES: dict[bool | None, Tone] = {True: "good", False: "error", None: "neutral"}


def describe_plan(plan: FoldPlan, tensors: Mapping[str, TensorInfo], memory: int | None = None) -> Section:
    """A plan, safe to print: the fate of each norm, what is not done and why, and the size of the result.

    Args:
        plan: What is done.
        tensors: Of the source.
        memory: Bytes that carrying it out takes; None where it is done.
    """
    summary = f"{plan.num_folded} of {counted(len(plan.norms), 'norm')} folded"
    if plan.centred:
        summary += f", {counted(len(plan.centred), 'writer')} centred"
    if "scale" in plan.operations and not any(refusal.operation == "scale" for refusal in plan.refusals):
        summary += f", scaled by 2^-{plan.options['halvings']}"
    if plan.rotated_sums:
        summary += f", {counted(sum(bool(edit.rotations) for edit in plan.edits), 'tensor')} rotated"
    elif plan.rotated_values:
        summary += f", residual stream not rotated, values of {counted(len(plan.rotated_values), 'attention')} rotated"
    if rms := plan.num_rms:
        summary += f", {counted(rms, 'LayerNorm')} made {'an RMSNorm' if rms == 1 else 'RMSNorms'}"
    # A reason that is among the refusals is not told a second time.
    refused = {(refusal.place, refusal.reason) for refusal in plan.refusals}
    left = merged((refusal.operation, refusal.place, refusal.reason) for refusal in plan.refusals)
    kept = merged(
        ("bias", norm.name, reason)
        for norm in plan.norms
        for reason in norm.reasons
        if (norm.name, reason) not in refused
    )
    facts = _size(plan, tensors)
    if memory is not None:
        facts.append(Fact("memory", f"some {memory / 1e9:.1f} GB, whatever the size"))
    changes = [f"{key} = {value}" for key, value in plan.config.items() if key != "normkit"]
    changes += [f"without {key}" for key in plan.dropped]
    if plan.swaps:
        changes.append(f"{counted(len(plan.swaps), 'norm')} recorded as RMSNorms, for nk.load")
    if changes:
        facts.append(Fact("config.json", ", ".join(changes)))
    described = Section(
        title=plan.architecture,
        gist=summary,
        tables=(_norm_table(plan.norms),),
        sections=tuple(
            Section(
                verdict=verdict,
                sections=tuple(Section(title=f"{what}: {place}", notes=(reason,)) for what, place, reason in reasons),
            )
            for verdict, reasons in ((_LEFT, left), (_KEPT, kept))
            if reasons
        ),
        facts=tuple(facts),
        remarks=plan.remarks,
    )
    return printable(described)


def describe_proof(found: Verification, agreement: Agreement | None = None, tokens: str = "") -> Section:
    """A verification, safe to print: the verdict and each check.

    Args:
        found: What was checked.
        agreement: Of the logits, or None.
        tokens: What they were compared on, in words.
    """
    checks = list(found.checks)
    if agreement:
        said = (
            f"differ by {significant(agreement.difference)} at most, of {significant(agreement.largest)}, in float64, "
            f"on {counted(agreement.tokens, agreement.noun)} ({tokens})"
        )
        if agreement.difference:
            first = "token" if agreement.noun == "token" else "class"
            same = percent(agreement.same_first)
            said += f"; KL {significant(agreement.divergence)}, the same first {first} at {same}"
        if agreement.moved_by_eps:
            said += "; the source has the eps that the result's norms act as with, which moves its own logits by "
            said += significant(agreement.moved_by_eps)
        if agreement.unit:
            rounding = significant(agreement.rounding)
            said += f"; moving the source's weights by half a unit in the last place: {rounding}"
        checks.append(Checked(name="logits", passed=agreement.holds, what=said))
    if failed := sum(check.passed is False for check in checks):
        detail = f"{failed} of {counted(len(checks), 'check')} failed"
        verdict = Verdict(tone="error", headline="not proved", detail=detail)
    else:
        detail = "every tensor follows from the source, bit for bit"
        verdict = Verdict(tone="good", headline="proved", detail=detail)
    described = Section(
        title=found.source if found.source == found.result else f"{found.source} -> {found.result}",
        verdict=verdict,
        facts=tuple(Fact(check.name, check.what, tone=_TONES[check.passed]) for check in checks),
        remarks=tuple(
            f"not proved: {said}"
            for said in (found.unproved if found.passed else ())
            if agreement is None or "--logits" not in said
        ),
    )
    return printable(described)


def norm_mappings(graph: Graph) -> dict[str, list[dict[str, Any]]]:
    """The norms whose gain may leave, with the linear maps that read each, as llm-compressor takes them.

    Names are regular expressions after "re:"; layers of one kind share an entry. "norm_mappings" are the fields of its
    `NormMapping` (SpinQuantModifier), "awq_mappings" those of its `AWQMapping` (AWQModifier), without heads. A norm
    whose reader takes several rows side by side is left out: they multiply such a map by no gain.
    """
    everything = [norm.name for norm in graph.norms] + [linear.name for linear in graph.linears]

    def expressions(names: Iterable[str]) -> list[str]:
        """One for each kind of name; with any index where all of the kind are among them, else with theirs."""
        alike = dict.fromkeys(pattern(name) for name in names)
        made = []
        for kind in alike:
            held, others = ([name for name in group if pattern(name) == kind] for group in (names, everything))
            indices = zip(*([part for part in name.split(".") if part.isdigit()] for name in held), strict=True)
            # A module without a gain may have the name, in a layer that lacks the norm.
            places = (
                r"\d+"
                if set(held) == set(others) and {*column} == {str(at) for at in range(len({*column}))}
                else f"({'|'.join(dict.fromkeys(column))})"
                for column in indices
            )
            parts = (next(places) if part == "*" else re.escape(part) for part in kind.split("."))
            made.append("re:^" + r"\.".join(parts) + "$")
        return made

    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for norm in graph.norms:
        if not graph.against_folding(norm, untie=True) and not any(_.is_joined for _ in graph.readers(norm.gives)):
            linears = dict.fromkeys(pattern(linear.name) for linear in graph.readers(norm.gives))
            kinds[pattern(norm.name), *linears].append(norm.name)
    gives = {norm.name: norm.gives for norm in graph.norms}
    found: dict[str, list[dict[str, Any]]] = {"norm_mappings": [], "awq_mappings": []}
    for norms in kinds.values():
        readers = [linear for name in norms for linear in graph.readers(gives[name])]
        (name,) = expressions(norms)
        found["norm_mappings"].append({"norm": name, "linears": expressions([linear.name for linear in readers])})
        if inner := [linear.name for linear in readers if not linear.is_head]:
            found["awq_mappings"].append({"smooth_layer": name, "balance_layers": expressions(inner)})
    return found


def _norm_table(changes: Iterable[NormChange]) -> Table:
    """Norms that are alike share a row."""
    alike: dict[tuple[str, ...], list[NormChange]] = defaultdict(list)
    for norm in changes:
        readers = tuple(dict.fromkeys(reader.rpartition(".")[2] for reader in norm.readers))
        kind = "RMSNorm" if norm.becomes_rms else "-"
        is_told = norm.kept and norm.gain not in _IN_PART
        kept = f", {counted(len(norm.kept), 'coordinate')} kept" if is_told else ""
        gain, bias = _FATES[norm.gain] + kept, _FATES[norm.bias]
        alike[pattern(norm.name), gain, bias, kind, shortened(readers, 4) or "-"].append(norm)
    rows = []
    for (path, *words), norms in alike.items():
        name = path if len(norms) > 1 else norms[0].name
        rows.append([name, f"{len(norms)}", *words])
    return Table.of("Norms", _COLUMNS, rows, "no norm")


def _size(plan: FoldPlan, tensors: Mapping[str, TensorInfo]) -> list[Fact]:
    """How the tensors come about, and the bytes of all of them before and after."""
    counts = Counter(edit.relation for edit in plan.edits)
    before = sum(info.nbytes for info in tensors.values())
    after = sum(output_info(edit, tensors).nbytes for edit in plan.edits)
    words = ", ".join(f"{count} {_RELATIONS[relation]}" for relation, count in counts.items())
    size = _in_bytes(before) + ("" if after == before else f" -> {_in_bytes(after)}")
    return [Fact("tensors", words), Fact("size", size)]


def _in_bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return counted(count, "byte")
