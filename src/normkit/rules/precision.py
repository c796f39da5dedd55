"""Group E: precision. Sums of squares in 16 bits, numbers near or past overflow, differences between processes."""

from __future__ import annotations

from normkit.measurement.facts import Site
from normkit.measurement.training import Origin, Parameter, Training
from normkit.rules.dynamics import is_massive
from normkit.rules.facts import Facts
from normkit.rules.meant import fields_of, is_open, undecided
from normkit.rules.rule import (
    CAUSES,
    WRONG_NORMS,
    Case,
    Hit,
    NotChecked,
    Outcome,
    Rule,
    evidence_lines,
    hit,
    of_a_run,
)
from normkit.rules.scale import HALF
from normkit.text import counted

_STATISTICS = fields_of("E2")
_SUM_HEADROOM = 1.0
_LITTLE_HEADROOM, _NO_HEADROOM = 2.0, 0.5
# Factor over the median row's rms, if a block before has a massive activation.
_CARRIED = 100.0
# Beyond the order of a sum: reduced numbers are the same to the bit, and a checksum in another order differs by this.
_SPREADS = {"float64": 1e-6, "float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-3}


@Rule(
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
        "nk.convert(model) replaces such norms by norms that do so",
    ),
    confirm="nk.identify(module, shape).spec.statistics_dtype; compare one output with float64",
)
def narrow_statistics(facts: Facts) -> Outcome:
    """The site sums squares in its input's dtype, and that has 16 bits; a note where a wider model hides it."""
    cases: list[Case] = []
    for site in facts.sites:
        if not site.spec.casts.has_narrow_statistics or is_open(site, facts, _STATISTICS):
            continue
        intended, bits = facts.intended(site), site.statistics_headroom_bits
        if site.dtype in HALF:
            # bfloat16 ends where float32 does: its shortage is precision.
            is_short = bits is None or site.dtype != "float16"
            short = ", with 8 significant bits" if is_short else f", {bits:.2f} bits below overflow"
            words = f"the squares of {site.input.features} features are summed in {site.dtype}{short}"
            is_full = bits is not None and bits < _SUM_HEADROOM
            cases.append(Case(site.path, "error" if is_full else "warning", words))
        elif intended is not None and not intended.casts.has_narrow_statistics:
            words = f"in a 16-bit model it would sum in 16 bits, {facts.source_at(site.path)} says float32"
            cases.append(Case(site.path, "note", words))
    found = hit(cases, f"{counted(len(cases), 'norm')} with statistics in the input's dtype")
    return found or undecided(facts, _STATISTICS)


@Rule(
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
        "token that attends to it. If little room is left, a slightly different text can overflow. In "
        "float32 NaN comes from a broken weight or from 0 / 0 sooner than from overflow."
    ),
    remedy=(
        "find the first place in forward order: later places only pass it on",
        "run in bfloat16 or float32",
        "scale the weights that write to the stream down, as the norms behind it divide by its length: normkit fold "
        "SRC DST --ops scale --fit float16 does it and proves it, for families that it knows",
    ),
    confirm="run the same text in float32: finite there means overflow here, not a broken weight",
    follows=("A3", "A7", "A9", "A10", "E2", "F11", "F12", *WRONG_NORMS, *CAUSES),
    looks_at=("norms", "blocks", "run"),
)
def out_of_range(facts: Facts) -> Outcome:
    """NaN and infinity first, as nothing else counts then; else the distance of 16-bit numbers from overflow."""
    broken = {site.path: words for site in facts.sites if (words := _broken(site))}
    origin = None if facts.training is None else facts.training.origin
    if facts.training is not None and origin is not None and origin.kind.startswith("non-finite"):
        return _broken_run(facts, facts.training, origin, broken)
    norms = {site.path for site in facts.sites}
    if outside := [(name, count) for name, count in facts.broken if name.rpartition(".")[0] not in norms]:
        # Parameters of no norm that hold NaN or infinity are the cause of those at the norms behind them.
        is_root = [name.endswith("running_var") for name, _ in outside]
        lines = [
            f"{name}: {'negative, NaN' if is_variance else 'NaN'} or infinity: {count} of its entries"
            for (name, count), is_variance in zip(outside, is_root, strict=True)
        ]
        behind = f"{next(iter(broken), '')}: the first of {counted(len(broken), 'norm')} that show it, not the cause"
        if broken:
            lines.insert(1, behind)
        elif not any(is_root):
            # Batch norms are not among the norms that would show it.
            lines.insert(1, "no norm shows it on this text, which does not use these entries")
        return Hit(
            severity="error",
            sites=tuple(dict.fromkeys([*(name.rpartition(".")[0] for name, _ in outside), *broken])),
            measured=f"NaN or infinity in {counted(len(outside), 'parameter')}, first in {outside[0][0]}",
            evidence=evidence_lines(lines, "line"),
        )
    streams = [block for block in facts.blocks if block.stream_in.nonfinite or block.stream_out.nonfinite]
    if broken or streams:
        paths = tuple(broken) or tuple(block.path for block in streams)
        lines = [f"{path}: {words}" for path, words in broken.items()]
        if broken:
            lines[0] += f"; it is the first, {_beginning(paths[0], facts)}"
        if streams:
            where = "output" if not streams[0].stream_in.nonfinite else "input"
            lines.insert(1, f"{streams[0].path}: the first block with NaN or infinity, in its {where}")
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
    massive = {site.path for site in near if _is_of_massive(site, facts)}
    # Massive activations are about as large on any text; where one token is repeated, every row has them.
    by_chance = len(massive) < len(near) and not facts.has_few_tokens
    cases = [
        Case(
            site.path,
            "error" if least < _NO_HEADROOM else "warning" if by_chance else "note",
            f"largest magnitude {max(site.input.absmax, site.output.absmax):.4g} in {site.dtype}, "
            f"{site.headroom_bits:.2f} bits below overflow"
            + (", a massive activation: about as large on any text" if site.path in massive else ""),
            -site.headroom_bits,
        )
        for site in near
    ]
    return hit(cases, f"{least:.2f} bits below overflow at the worst of {counted(len(near), 'norm')}")


def _broken_run(facts: Facts, training: Training, origin: Origin, broken: dict[str, str]) -> Hit:
    """The first NaN or infinity of a run; the last measurement only shows how far they have spread since."""
    if origin.kind.endswith("backward pass") and training.has_skipped:
        # As F5 says of these steps: the weights never saw them.
        return Hit(
            severity="note",
            sites=(),
            measured=f"NaN or infinity in the gradients of step {origin.step}, which was skipped",
            evidence=(f"{origin.path or 'the gradient norm'}: {origin.detail}; later losses and gradients are finite",),
        )
    streams = [block.path for block in facts.blocks if block.stream_in.nonfinite or block.stream_out.nonfinite]
    first = [origin.path] if origin.path else []
    return Hit(
        severity="error",
        sites=tuple(dict.fromkeys([*first, *broken, *streams])),
        measured=f"NaN or infinity from step {origin.step} on" + (f", first at {origin.path}" if first else ""),
        evidence=evidence_lines(
            [f"{origin.path}: {origin.detail}", *(f"{path}: {words}" for path, words in broken.items())]
        ),
    )


def _broken(site: Site) -> str:
    """The NaN and infinity of a site in words; "" without any."""
    counts = [
        (0 if site.gain is None else site.gain.nonfinite, "in the gain"),
        (0 if site.bias is None else site.bias.nonfinite, "in the bias"),
        (site.input.nonfinite, "rows of the input"),
        (site.output.nonfinite, "rows of the output"),
    ]
    words = ", ".join(f"{count} {where}" for count, where in counts if count)
    return f"NaN or infinity: {words}" if words else ""


def _beginning(path: str, facts: Facts) -> str:
    """The module where the NaN of the first broken site in forward order begins."""
    site = next(site for site in facts.sites if site.path == path)
    if any(part is not None and part.nonfinite for part in (site.gain, site.bias)):
        return "so the fault starts in its parameters"
    if site.input.nonfinite:
        before = next((earlier.path for earlier in reversed(facts.sites[: site.order])), "the model's input")
        return f"and they come in with its input: look between {before} and here"
    return "and its input is finite, so the norm itself makes them"


def _is_of_massive(site: Site, facts: Facts) -> bool:
    """The largest element of input and output is a massive activation, also where the other rows have grown since."""
    fullest = max(site.input, site.output, key=lambda rows: rows.absmax)
    carried = any(is_massive(block.stream_out) for block in facts.blocks)
    return is_massive(fullest) or (carried and fullest.absmax > _CARRIED * fullest.rms_median)


@Rule(
    id="E7",
    title="Replicas differ between processes",
    severity="error",
    threshold=(
        "checksum of a parameter or its gradient before the step differs between processes that should hold the "
        f"same by more than {_SPREADS['float32']:g} (float32) or {_SPREADS['bfloat16']:g} (16 bits)"
    ),
    source="NVIDIA/Megatron-LM#1446 and #7452, gpt-neox#1257 and #1259",
    why=(
        "Under tensor or sequence parallelism the norms are replicated, but each process sees part of the tokens. "
        "If their gradients are not added up, each copy learns from its own part: the copies drift apart, the "
        "model is no longer one, and its loss stalls without an error."
    ),
    remedy=(
        "sum the gradients of replicated parameters over the processes that share them (all-reduce), or mark them "
        "so that the framework does",
        "broadcast the parameters from one process, as they differ already",
    ),
    confirm="after one step with the reduction in place, the checksums are equal in every process",
    follows=("E8",),
    looks_at=("run",),
)
@of_a_run()
def different_replicas(_facts: Facts, training: Training) -> Outcome:
    """Checksums of what all processes should hold alike: gradients before the step first, as they are the cause."""
    if training.ranks < 2:
        return NotChecked("one process has no replicas")

    def limit(parameter: Parameter) -> float:
        return _SPREADS.get(parameter.dtype, 1e-6)

    concerned = [
        each
        for each in training.parameters
        if each.gradient_rank_spread > limit(each) or each.rank_spread > limit(each)
    ]
    if not concerned:
        return None
    num_unreduced = sum(each.gradient_rank_spread > limit(each) for each in concerned)
    if num_unreduced:
        measured = f"gradients of {counted(num_unreduced, 'parameter')} differ between {training.ranks} processes"
    else:
        measured = f"{counted(len(concerned), 'parameter')} with other numbers in some of {training.ranks} processes"
    cases = []
    for each in concerned:
        parts = []
        if each.gradient_rank_spread > limit(each):
            parts.append(f"its gradient differs by {each.gradient_rank_spread:.2g} before the optimizer's step")
        if each.rank_spread > limit(each):
            parts.append(f"it differs by {each.rank_spread:.2g} itself")
        # Norms first: where sharded and replicated parameters mix, norms are the ones that are forgotten.
        cases.append(
            Case(
                *(each.site or each.path, "error", ", and ".join(parts)),
                effect=float(bool(each.site)),
                name=f"{each.path} ({each.kind})",
            )
        )
    largest = max(max(each.gradient_rank_spread, each.rank_spread) for each in concerned)
    return hit(cases, f"{measured}, by up to {largest:.2g}", "parameter")


@Rule(
    id="E8",
    title="The watch's own numbers are wrong",
    severity="error",
    threshold="statistics of known uneven, shifted shards within 1e-6 of float64",
    source="NVIDIA/TransformerEngine#3044 (a pooled variance below 0), radixark/miles_diffusion#35",
    why="Every other number here was pooled the same way, so none of them can be trusted.",
    remedy=(
        "check that all processes run the same code, and that the group given is the one that holds the model",
        "report it with the line above: it is a fault of normkit or of the communication library",
    ),
    confirm="the report says: observer verified",
    looks_at=("run",),
)
@of_a_run()
def wrong_observer(_facts: Facts, training: Training) -> Outcome:
    """The watch's own pooling must give the right statistics of known numbers."""
    if training.ranks < 2:
        return NotChecked("one process pools nothing")
    if training.observer.startswith("observer verified"):
        return None
    return Hit(
        severity="error",
        sites=(),
        measured=training.observer or "no self-test was run",
        evidence=("the processes pooled statistics of uneven shards with shifted means, and float64 gives others",),
    )


RULES = (narrow_statistics, out_of_range, different_replicas, wrong_observer)
"""The rules of this file."""
