"""Group E: precision. Sums of squares in 16 bits, and numbers near or past the end of their type."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.measurement.facts import Site
from normkit.measurement.quantities import Spectrum
from normkit.measurement.training import Origin
from normkit.rules.dynamics import is_massive
from normkit.rules.meant import fields_of, is_open, undecided
from normkit.rules.rule import CAUSES, WRONG_NORMS, Case, Facts, Hit, Outcome, Rule, evidence_lines, hit
from normkit.rules.scale import HALF
from normkit.text import counted

_STATISTICS = fields_of("E2")
_SUM_HEADROOM = 1.0
_LITTLE_HEADROOM, _NO_HEADROOM = 2.0, 0.5
# Factor over the median row's rms, if a block before has a massive activation.
_CARRIED = 100.0


def _statistics_in_16_bit(facts: Facts) -> Outcome:
    """The site sums squares in its input's dtype, and that has 16 bits; a note where a wider model hides it."""
    cases: list[Case] = []
    for site in facts.sites:
        if not site.spec.casts.has_narrow_statistics or is_open(site, facts, _STATISTICS):
            continue
        if site.dtype in HALF:
            bits = site.statistics_headroom_bits
            full = bits is not None and bits < _SUM_HEADROOM
            # bfloat16 ends where float32 does: what it lacks is precision.
            lacks = ", with 8 significant bits" if bits is None or site.dtype != "float16" else _below_overflow(bits)
            line = f"{site.path}: the squares of {site.input.features} features are summed in {site.dtype}{lacks}"
            cases.append(Case(site.path, "error" if full else "warning", 0.0, line))
        elif (intended := facts.intended(site)) is not None and not intended.casts.has_narrow_statistics:
            line = f"{site.path}: in a 16-bit model it would sum in 16 bits, {facts.source_at(site.path)} says float32"
            cases.append(Case(site.path, "note", 0.0, line))
    return hit(cases, f"{counted(len(cases), 'norm')} with statistics in the input's dtype") or undecided(
        facts, _STATISTICS
    )


def _out_of_range(facts: Facts) -> Outcome:
    """NaN and infinity first, as nothing else counts then; else how far 16-bit numbers are from overflow."""
    broken = [site for site in facts.sites if _nonfinite(site)]
    streams = [block for block in facts.blocks if block.stream_in.nonfinite or block.stream_out.nonfinite]
    if (began := _where_it_began(facts)) is not None:
        if began.kind.endswith("backward pass") and facts.training is not None and facts.training.has_skipped:
            # One verdict with that of the spikes: the weights never saw these steps.
            where = began.path or "the gradient norm"
            return Hit(
                severity="note",
                sites=(),
                measured=f"NaN or infinity in the gradients of step {began.step}, which was skipped",
                evidence=(f"{where}: {began.detail}; later losses and gradients are finite",),
            )
        after = [*(site.path for site in broken), *(block.path for block in streams)]
        return Hit(
            severity="error",
            sites=tuple(dict.fromkeys([began.path, *after] if began.path else after)),
            measured=f"NaN or infinity from step {began.step} on" + (f", first at {began.path}" if began.path else ""),
            evidence=evidence_lines([f"{began.path}: {began.detail}", *map(_broken, broken)]),
        )
    norms = {site.path for site in facts.sites}
    if outside := [(name, count) for name, count in facts.broken if name.rpartition(".")[0] not in norms]:
        return _broken_parameters(outside, broken)
    if broken or streams:
        paths = tuple(site.path for site in broken) or tuple(block.path for block in streams)
        lines = [_first_mover(broken[0], facts)] if broken else []
        lines += [_broken(site) for site in broken[1:]]
        if streams:
            where = "leave" if not streams[0].stream_in.nonfinite else "enter"
            lines.insert(1, f"{streams[0].path}: the first block with NaN or infinity, which {where} it")
        return Hit(
            severity="error",
            sites=paths,
            measured=f"NaN or infinity at {counted(len(paths), 'place')}, first at {paths[0]}",
            evidence=evidence_lines(lines),
        )
    near = [site for site in facts.sites if site.dtype in HALF and site.headroom_bits < _LITTLE_HEADROOM]
    if not near:
        return None
    least = min(site.headroom_bits for site in near)
    # Massive activations are about as large on any text; where one token is repeated, every row has them.
    by_chance = any(not _is_of_massive(site, facts) for site in near) and not facts.has_few_tokens
    return Hit(
        severity="error" if least < _NO_HEADROOM else "warning" if by_chance else "note",
        sites=tuple(site.path for site in near),
        measured=f"{least:.2f} bits left below overflow at the fullest of {counted(len(near), 'norm')}",
        evidence=evidence_lines(
            [
                f"{site.path}: largest magnitude {max(site.input.absmax, site.output.absmax):.4g} in {site.dtype}"
                f"{_below_overflow(site.headroom_bits)}"
                + (", a massive activation: about as large on any text" if _is_of_massive(site, facts) else "")
                for site in sorted(near, key=lambda site: site.headroom_bits)
            ]
        ),
    )


def _broken_parameters(broken: Sequence[tuple[str, int]], behind: Sequence[Site]) -> Hit:
    """Parameters of no norm that hold NaN or infinity are the cause of what the norms behind them show."""
    places = tuple(dict.fromkeys(name.rpartition(".")[0] for name, _ in broken))
    lines = [f"{name}: NaN or infinity: {count} of its entries" for name, count in broken]
    if behind:
        lines.insert(1, f"{behind[0].path}: the first of {counted(len(behind), 'norm')} that show it, no cause")
    else:
        lines.insert(1, "no norm shows it on this text, which does not come by there")
    return Hit(
        severity="error",
        sites=(*places, *(site.path for site in behind)),
        measured=f"NaN or infinity in {counted(len(broken), 'parameter')}, first in {broken[0][0]}",
        evidence=evidence_lines(lines, "line"),
    )


def _is_of_massive(site: Site, facts: Facts) -> bool:
    """The largest element that enters or leaves is a massive activation, also where the other rows have grown since."""
    fullest = max(site.input, site.output, key=lambda rows: rows.absmax)
    carried = any(is_massive(block.stream_out) for block in facts.blocks)
    return is_massive(fullest) or (carried and fullest.absmax > _CARRIED * fullest.rms_median)


def _where_it_began(facts: Facts) -> Origin | None:
    """The first NaN or infinity of a run; the last measurement only shows how far they have spread since."""
    began = None if facts.training is None else facts.training.origin
    return began if began is not None and began.kind.startswith("non-finite") else None


def _below_overflow(bits: float) -> str:
    return f", {bits:.2f} bits below overflow"


def _nonfinite(site: Site) -> bool:
    parameters = _nonfinite_entries(site.gain) + _nonfinite_entries(site.bias)
    return bool(site.input.nonfinite or site.output.nonfinite or parameters)


def _nonfinite_entries(parameter: Spectrum | None) -> int:
    return 0 if parameter is None else parameter.nonfinite


def _first_mover(site: Site, facts: Facts) -> str:
    """The first site in forward order, and whether it is the culprit."""
    if _nonfinite_entries(site.gain) or _nonfinite_entries(site.bias):
        return f"{_broken(site)}; it is the first, so the fault starts in its parameters"
    if site.input.nonfinite:
        before = next((earlier.path for earlier in reversed(facts.sites[: site.order])), "the model's input")
        return f"{_broken(site)}; it is the first, and they come in with its input: look between {before} and here"
    return f"{_broken(site)}; it is the first, and its input is finite, so the norm itself makes them"


def _broken(site: Site) -> str:
    counts = [
        (_nonfinite_entries(site.gain), "in the gain"),
        (_nonfinite_entries(site.bias), "in the bias"),
        (site.input.nonfinite, "rows of the input"),
        (site.output.nonfinite, "rows of the output"),
    ]
    return f"{site.path}: NaN or infinity: " + ", ".join(f"{count} {where}" for count, where in counts if count)


RULES = (
    Rule(
        id="E2",
        title="Statistics are computed in 16 bits",
        severity="error",
        threshold=f"squares summed in a 16-bit type (warning), less than {_SUM_HEADROOM:g} bit below overflow (error)",
        source="pytorch/pytorch#66707, microsoft/onnxruntime#29034",
        why=(
            "In float16 a sum of squares over 4096 features overflows at an rms of 4, and the norm silently returns "
            "zeros; in bfloat16 it has 8 bits, and small terms vanish beside the sum. The error adds up over the depth."
        ),
        remedy=(
            "convert the input to float32 before squaring, and back at the end",
            "nk.convert(model) sets in norms that do so",
        ),
        confirm="nk.identify(module, shape).spec.statistics_dtype; compare one output with float64",
        check=_statistics_in_16_bit,
    ),
    Rule(
        id="E3",
        title="Numbers near or past the end of their type",
        severity="error",
        threshold=(
            f"any NaN or infinity, in a parameter too (error); 16-bit activations less than {_LITTLE_HEADROOM:g} bits "
            f"(warning; massive activations a note) or {_NO_HEADROOM:g} bits (error) below overflow"
        ),
        source="huggingface/transformers#5651, #9295 and #14189",
        why=(
            "float16 ends at 65504. One element past it is infinite, the norm of its row is NaN, and so is every later "
            "token that attends to it. Where little room is left, a text slightly unlike those tried is enough. In "
            "float32 NaN comes from a broken weight or from 0 / 0 sooner than from overflow."
        ),
        remedy=(
            "find the first place in forward order: what comes after only passes it on",
            "run in bfloat16 or float32",
            "scale the weights that write to the stream down, where the norm behind it forgets the scale",
        ),
        confirm="run the same text in float32: finite there means overflow here, not a broken weight",
        check=_out_of_range,
        follows=("A3", "A7", "A9", "A10", "E2", "F11", "F12", *WRONG_NORMS, *CAUSES),
        looks_at=("norms", "blocks", "run"),
    ),
)
"""The rules of this group, in order."""
