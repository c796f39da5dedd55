"""Group E, the backend: cast order, results off their formula, dtypes that change, checkpoints that do not fit."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from normkit.checkpoint.misfits import Misfit
from normkit.conventions.eps import EPS
from normkit.identification.sites import OtherNorm
from normkit.measurement.facts import Site
from normkit.rules.axes import over_time
from normkit.rules.facts import Facts
from normkit.rules.meant import compared, fields_of, is_open, undecided
from normkit.rules.rule import Case, Hit, NotChecked, Outcome, Rule, evidence_lines, hit
from normkit.rules.scale import HALF, HARMFUL, VISIBLE, severity_of
from normkit.spec import NormSpec
from normkit.text import counted, dtype_name, percent

# In units of `normkit.units` for plain code; 16 families stay below 1.9 in float32 and 1.0 in 16 bits.
_OFF = {"float64": 1e3, "float32": 64.0, "float16": 4.0, "bfloat16": 4.0}
_NARROW = 4.0
_WRONG = 1e-1
_NO_SUM = 1.0
# Readings that rules of the formula and of the axes report.
_TOLD = {"degree", "rescaled eps", "coupled axes", "rounding"}


@Rule(
    id="E1",
    title="Another order of casts than is meant",
    severity="warning",
    threshold="bit for bit another program than the config's class or the baseline has (in 16 bits; else a note)",
    source="huggingface/transformers#29402 and #33133, NVIDIA/TransformerEngine#1132",
    why=(
        "Rounding the row before the gain, or only after it, gives other bits in 20 to 40 % of the outputs in 16 "
        "bits. Neither is wrong; a checkpoint was trained with one, and tests that compare tokens notice the other."
    ),
    remedy=("use the order that the checkpoint was trained with: nk.NormSpec(cast=...)",),
    confirm="nk.identify(module, shape).readings['casts']",
)
def other_casts(facts: Facts) -> Outcome:
    """Another order of rounding than that of the config's class, or of the baseline."""

    def judge(site: Site, wanted: NormSpec, facts: Facts) -> Case | None:
        passport, spec = facts.passports.get(site.path), site.spec
        # A norm that was found without a passport was called as a function, whose casts are torch's.
        if passport is None or not (spec.has_weight or spec.has_bias):
            return None
        # E2 reports statistics in 16 bits.
        if spec.casts.has_narrow_statistics and not wanted.casts.has_narrow_statistics:
            return None
        is_mixed = passport.weight is not None and dtype_name(passport.weight.dtype) != site.dtype
        if spec.casts.order(has_wide_weight=is_mixed) == wanted.casts.order(has_wide_weight=is_mixed):
            return None
        words = f"{spec.casts.words}; {facts.source_at(site.path)} says {wanted.casts.words}"
        return Case(site.path, "warning" if site.dtype in HALF else "note", words)

    found = compared(facts, (*fields_of("E1"), *fields_of("E2")), judge, "with another order of casts")
    if isinstance(found, Hit) and found.severity == "note":
        return replace(found, measured=f"{found.measured}, which shows in 16 bits only")
    return found


@Rule(
    id="E5",
    title="Outputs are off their own formula, or follow none",
    severity="error",
    threshold=(
        f"an output off its formula in float64 by more than {_OFF['float32']:g} units of float32 "
        f"(error) or {_OFF['bfloat16']:g} of a 16-bit dtype, {_NARROW:g} times that with 16-bit statistics "
        f"(warning), {percent(_WRONG)} of the size of its terms there (error); a norm that no spec describes "
        "where the config's class or the intent file has one (error), or one whose output is multiplied by another "
        f"number than there, by {percent(VISIBLE)} (warning) or {percent(HARMFUL)} (error); a pre-hook of the user "
        "that changes the input of a norm (warning)"
    ),
    source="microsoft/onnxruntime#29034, pytorch/pytorch#66707; norms of 16 families stay below 1.9 units",
    why=(
        "On its own, with random rows, the norm computes the formula that is shown. On the model's rows it does "
        "not: a kernel for this shape, size or dtype is wrong, or something between the call and the output "
        "changes it. A norm that follows no known formula was written anew, and does not fit the weights."
    ),
    remedy=(
        "run the same input through torch's own norm, and compare row by row",
        "switch the fused kernel off; look for hooks and in-place operations on the output",
    ),
    confirm="norm(x) against nk.identify(norm, shape)(x.double()) for the model's own x",
    follows=("D6",),
    looks_at=("norms", "other norms"),
)
def off_its_formula(facts: Facts) -> Outcome:
    """Sampled outputs against the formula that the norm was found to compute; and norms of no formula at all."""
    off = [case for site in facts.sites if (case := _off(site, facts)) is not None]
    unknown = [
        Case(other.path, "error", f"{facts.source_at(other.path)} says {spec}; {other.reason}", math.inf)
        for other in facts.others
        if (spec := facts.intended_at(other.path)) is not None and _is_of_no_formula(other, facts)
    ]
    rounded = [
        Case(other.path, "error", f"{other.reason}; {facts.source_at(other.path)} says {spec}", 1.0)
        for other in facts.others
        if "rounding" in other.passport.readings and (spec := facts.intended_at(other.path)) is not None
    ]
    computed, scaled = [], []
    for site in facts.sites:
        spec = facts.intended(site)
        if spec is None or facts.is_stock(site.path):
            continue
        says, factor = f"{facts.source_at(site.path)} says", _other_factor(site, facts)
        if factor is not None:
            scaled.append(factor)
        elif facts.is_gain_open(site) and spec.gain.offset != site.spec.gain.offset:
            unknown.append(Case(site.path, "warning", f"{says} {spec}; its gain is computed otherwise"))
        if (made := facts.reading(site.path, "affine")) is not None:
            computed.append(Case(site.path, "error", f"{made.value}; {says} {spec}", 1.0))
    hooked = [
        Case(
            hook.path,
            "warning",
            f"a hook changes the input by up to {percent(hook.change)} of its largest element: "
            f"{'; '.join(hook.hooks)}; the formula holds for the changed input, and not for the given one",
            hook.change,
        )
        for hook in facts.input_hooks
    ]
    groups = (
        (off, "off their own formula"),
        (unknown, "of no known formula"),
        (rounded, "rounded to 16 bits in a wider model"),
        (computed, "with a gain or a bias that is computed otherwise than meant"),
        (scaled, "multiplied by a number that is not meant"),
        (hooked, "of another input than is given"),
    )
    words = next((words for group, words in groups if group), "")
    cases = [*off, *unknown, *rounded, *computed, *scaled, *hooked]
    return hit(cases, f"outputs {words} at {counted(len(cases), 'norm')}")


def _off(site: Site, facts: Facts) -> Case | None:
    """Sampled outputs that differ from the site's spec in float64 by more than rounding."""
    passport = facts.passports.get(site.path)
    weight = None if passport is None else passport.weight
    dtypes = [site.dtype, site.output_dtype, "" if weight is None else dtype_name(weight.dtype)]
    # The coarsest of input, gain and output.
    dtype = max((dtype for dtype in dtypes if dtype in EPS), key=lambda dtype: EPS[dtype], default="")
    limit = _OFF.get(dtype, math.inf)
    limit *= _NARROW if site.dtype in HALF and site.spec.casts.has_narrow_statistics else 1.0
    # Other rules report overflow and numbers that are not finite.
    overflows = site.statistics_headroom_bits is not None and site.statistics_headroom_bits < _NO_SUM
    if not site.error > limit or overflows or site.output.nonfinite or site.input.nonfinite:
        return None
    share = site.error * EPS[dtype]
    words = f"an output is {site.error:.3g} units of {dtype} off {site.spec}: {percent(share)} of the size of its terms"
    return Case(site.path, "error" if share > _WRONG or dtype not in HALF else "warning", words, share)


def _is_of_no_formula(other: OtherNorm, facts: Facts) -> bool:
    """It normalizes, as neither a spec describes nor the config's class does, and no other rule says why."""
    leaks = any(leak.path == other.path for leak in facts.leaks or ())
    told = leaks or other.passport.readings.keys() & _TOLD or over_time(other.passport) is not None
    return other.passport.verdict == "norm" and not told and not facts.is_stock(other.path)


def _other_factor(site: Site, facts: Facts) -> Case | None:
    """Gain and bias are multiplied by a number that is not meant."""
    declared = facts.declared(site.path)
    meant = 1.0 if declared is None else declared.factor
    change = abs(site.factor / meant - 1.0)
    if severity_of(change) == "note":
        return None
    words = f"its output is {site.factor:g} times the row with its gain and bias, {facts.source_at(site.path)} says "
    return Case(site.path, severity_of(change), words + ("once" if meant == 1 else f"{meant:g} times"), change)


@Rule(
    id="E6",
    title="The dtype changes in the norm",
    severity="warning",
    threshold=(
        "a norm of a wider model that rounds to 16 bits, or another output dtype than the config's class or the "
        "baseline has (warning); a note without either, or "
        "where gain and input have one dtype here and the output would follow the other"
    ),
    source="huggingface/transformers#29402 (float32 gains beside 16-bit inputs), #33133",
    why=(
        "A float32 gain on a 16-bit row makes the output float32: the next modules run wider and slower, take twice "
        "the memory, or fail where two dtypes meet. The reverse drops digits that the model was trained with."
    ),
    remedy=(
        "cast the output back to the input's dtype, or the parameters to the model's",
        "if it is meant, say so: nk.NormSpec(output_dtype='promote')",
    ),
    confirm="norm(x).dtype beside x.dtype; nk.identify(norm, shape) names a norm that rounds whatever it is given",
    looks_at=("norms", "other norms"),
)
def changed_dtype(facts: Facts) -> Outcome:
    """The output's dtype differs from the input's and from the meant one, or would differ with a wider gain.

    Where something says what a norm that rounds on its way should compute, E5 reports it.
    """
    cases = [
        Case(other.path, "warning", other.passport.readings["rounding"].evidence[0], 1.0)
        for other in facts.others
        if "rounding" in other.passport.readings and facts.intended_at(other.path) is None
    ]
    for site in facts.sites:
        if not site.output_dtype or not site.dtype:
            continue
        passport, declared, intended = facts.passports.get(site.path), facts.declared(site.path), facts.intended(site)
        if passport is not None and passport.dtype in HALF and site.dtype not in HALF:
            words = f"its parameters are {passport.dtype}, and it rounds its {site.dtype} input to that"
            cases.append(Case(site.path, "warning", words, 1.0))
        own, wanted = site.spec.casts, site.spec.casts if intended is None else intended.casts
        meant = site.dtype
        if declared is not None and declared.dtype == site.dtype:
            meant = declared.output_dtype
        elif intended is not None and wanted.output == own.output:
            meant = site.output_dtype
        elif intended is not None:
            held = None if passport is None else passport.bias if passport.weight is None else passport.weight
            meant = dtype_name(wanted.output_dtype(getattr(torch, site.dtype), held, None))
        if site.output_dtype != meant:
            words = f"{site.dtype} enters, {site.output_dtype} leaves, {meant} is expected"
            cases.append(Case(site.path, "note" if intended is None else "warning", words, 1.0))
        elif (
            # Gain and input have one dtype here; the output could follow either.
            wanted.output != own.output
            and (site.spec.has_weight or site.spec.has_bias)
            and not is_open(site, facts, fields_of("E6"))
        ):
            words = f"its output is {own.output_words}, {facts.source_at(site.path)} says {wanted.output_words}"
            cases.append(Case(site.path, "note", f"{words}: it shows where the two differ"))
    changes = [case for case in cases if case.effect]
    number = counted(len({case.path for case in changes or cases}), "norm")
    where = "not that of the input" if changes else "it would be another one, with a gain of another dtype,"
    return hit(cases, f"{where} at {number}") or undecided(facts, fields_of("E6"))


@Rule(
    id="E9",
    title="A library's norm is replaced in memory",
    severity="note",
    threshold="a forward or class of torch or transformers that is not the one in its file",
    source="linkedin/Liger-Kernel#74",
    why=(
        "Kernels and training libraries put their own code in the place of a class. That is legitimate, and it "
        "is why the class itself cannot tell what it is meant to compute. Other rules say where the replacement "
        "computes something else."
    ),
    remedy=(
        "if it is meant, nothing; else find the import that replaces it, and remove it",
        "after an update of either library, compare the outputs with those of the class as its file has it",
    ),
    confirm="inspect.getsourcefile(type(module).forward) beside the file of the class",
)
def replaced_code(facts: Facts) -> Outcome:
    """Code in memory that is not the library's own; its formula is compared with the spec of the class."""
    if facts.patches is None:
        return NotChecked("only an inspection looks at the code of a library's norms")
    if not facts.patches:
        return None
    lines = []
    for patch in facts.patches:
        is_compared = facts.intent is not None and set(patch.sites) <= facts.intent.declared
        by = "compared with the spec that is declared for the class"
        by = by if is_compared else "no declared spec to compare it with"
        # A function of torch, without sites, may be called by any norm.
        lines.append(f"{patch.name} is {patch.now}" + (f"; {by}" if patch.sites else ""))
    paths = tuple(dict.fromkeys(path for patch in facts.patches for path in patch.sites))
    measured = f"{', '.join(patch.name for patch in facts.patches[:3])} replaced"
    measured += f", which {counted(len(paths), 'norm')} would run" if paths else ""
    return Hit(severity="note", sites=paths, measured=measured, evidence=evidence_lines([*dict.fromkeys(lines)]))


@Rule(
    id="E10",
    title="The checkpoint and the model do not fit",
    severity="error",
    threshold=(
        "a list of layers that has more or fewer members in the file than in the model (error); a head that is not "
        "tied, and whose weights the file of the whole model lacks (warning)"
    ),
    source="huggingface/transformers#5403 (left-over weights are a warning there), #43429 (a head that is not tied)",
    why=(
        "Layers that config.json does not ask for are left out without an error, and those that the file lacks are "
        "drawn at random: the model computes something else than it was trained to. Without its head it gives no "
        "logits and no loss."
    ),
    remedy=(
        "take config.json and the weights from the same model, or download both again",
        "set the number of layers, as num_hidden_layers, to that of the file",
        "if the head shares the table of embeddings, set tie_word_embeddings to true",
    ),
    confirm="the second value of from_pretrained(folder, output_loading_info=True)",
)
def parts_that_do_not_fit(facts: Facts) -> Outcome:
    """Layers that only the file or only the model has, and heads without weights."""
    if facts.misfits is None:
        return NotChecked("only where normkit loads a model, the file is compared with it")
    cases, measured = [], []
    for part in facts.misfits:
        case, words = _case(part)
        cases.append(case)
        measured.append(words)
    return hit(cases, "; ".join(measured), "list")


def _case(part: Misfit) -> tuple[Case, str]:
    """The case, and what was measured."""
    if part.is_head:
        words = "config.json does not tie it to the table of embeddings, and the file has no weights of it"
        return Case(part.path, "warning", words), "the head has no weights"
    change = part.in_file - part.in_model
    done = "not run" if change > 0 else "drawn at random"
    words = f"config.json asks for {part.in_model}, the file has {part.in_file}"
    number = counted(abs(change), "layer")
    return Case(part.path, "error", words, abs(change)), f"{number} {'is' if abs(change) == 1 else 'are'} {done}"


RULES = (other_casts, off_its_formula, changed_dtype, replaced_code, parts_that_do_not_fit)
"""The rules of this file."""
