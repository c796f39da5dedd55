"""Group E, the backend: cast order, results off their own formula, dtypes that change silently."""

from __future__ import annotations

import dataclasses
import math

import torch

from normkit.conventions.eps import EPS
from normkit.identification.sites import OtherNorm
from normkit.measurement.facts import Site
from normkit.rules.axes import over_time
from normkit.rules.finding import Severity
from normkit.rules.meant import compared, fields_of, is_open, undecided
from normkit.rules.rule import Case, Facts, Hit, NotChecked, Outcome, Rule, evidence_lines, hit
from normkit.rules.scale import HALF, HARMFUL, VISIBLE, severity_of
from normkit.spec import NormSpec
from normkit.text import counted, dtype_name, percent

# In units of `normkit.units` for plain code; 16 families stay below 1.9 in float32 and 1.0 in 16 bits.
_OFF = {"float64": 1e3, "float32": 64.0, "float16": 4.0, "bfloat16": 4.0}
_NARROW = 4.0
_WRONG = 1e-1
_NO_SUM = 1.0
# Readings that rules of the formula and of the axes report.
_TOLD = {"degree", "rescaled eps", "coupled axes"}


def _cast_order(facts: Facts) -> Outcome:
    """Another order of rounding than that of the config's class, or of the baseline."""
    found = compared(facts, (*fields_of("E1"), *fields_of("E2")), _casts, "with another order of casts")
    if isinstance(found, Hit) and found.severity == "note":
        return dataclasses.replace(found, measured=f"{found.measured}, which shows in 16 bits only")
    return found


def _casts(site: Site, wanted: NormSpec, facts: Facts) -> Case | None:
    passport, spec = facts.passports.get(site.path), site.spec
    # A norm that was found without a passport was called as a function, whose casts are torch's.
    if passport is None or not (spec.has_weight or spec.has_bias):
        return None
    # Statistics in 16 bits are another rule's.
    if spec.casts.has_narrow_statistics and not wanted.casts.has_narrow_statistics:
        return None
    is_mixed = passport.weight is not None and dtype_name(passport.weight.dtype) != site.dtype
    if spec.casts.order(has_wide_weight=is_mixed) == wanted.casts.order(has_wide_weight=is_mixed):
        return None
    severity: Severity = "warning" if site.dtype in HALF else "note"
    line = f"{site.path}: {spec.casts.words}; {facts.source_at(site.path)} says {wanted.casts.words}"
    return Case(site.path, severity, 0.0, line)


def _off_its_formula(facts: Facts) -> Outcome:
    """Sampled outputs against the formula that the norm was found to compute; and norms of no formula at all."""
    cases = []
    for site in facts.sites:
        dtype = _coarsest(site, facts)
        limit = _OFF.get(dtype, math.inf)
        in_half = site.dtype in HALF and site.spec.casts.has_narrow_statistics
        limit *= _NARROW if in_half else 1.0
        bits = site.statistics_headroom_bits
        # Other rules report overflow and numbers that are not finite.
        overflows = bits is not None and bits < _NO_SUM
        if not site.error > limit or overflows or site.output.nonfinite or site.input.nonfinite:
            continue
        share = site.error * EPS[dtype]
        line = (
            f"{site.path}: an output is {site.error:.3g} units of {dtype} off {site.spec}: "
            f"{percent(share)} of the size of its terms"
        )
        is_wrong = share > _WRONG or dtype not in HALF
        cases.append(Case(site.path, "error" if is_wrong else "warning", share, line))
    unknown = [
        Case(other.path, "error", math.inf, f"{other.path}: {facts.source_at(other.path)} says {spec}; {other.reason}")
        for other in facts.others
        if (spec := facts.intended_at(other.path)) is not None and _is_of_no_formula(other, facts)
    ]
    computed = []
    for site in facts.sites:
        made = None if (passport := facts.passports.get(site.path)) is None else passport.readings.get("affine")
        if made is not None and (spec := facts.intended(site)) is not None and not facts.is_stock(site.path):
            line = f"{site.path}: {made.value}; {facts.source_at(site.path)} says {spec}"
            computed.append(Case(site.path, "error", 1.0, line))
    scaled = [case for site in facts.sites if (case := _other_factor(site, facts)) is not None]
    told = {case.path for case in scaled}
    unknown += [
        Case(site.path, "warning", 0.0, f"{site.path}: {facts.source_at(site.path)} says {spec}; its gain is no such")
        for site in facts.sites
        if site.path not in told
        and facts.is_gain_open(site)
        and (spec := facts.intended(site)) is not None
        and spec.gain.offset != site.spec.gain.offset
        and not facts.is_stock(site.path)
    ]
    hooked = [
        Case(
            hook.path,
            "warning",
            hook.change,
            f"{hook.path}: a hook changes the input by up to {percent(hook.change)} of its largest element: "
            f"{'; '.join(hook.hooks)}; the formula holds for what enters, and not for what is given",
        )
        for hook in facts.input_hooks
    ]
    groups = (
        (cases, "off their own formula"),
        (unknown, "of no formula that is known"),
        (computed, "with a gain or a bias that is computed otherwise than meant"),
        (scaled, "multiplied by a number that is not meant"),
        (hooked, "of another input than is given"),
    )
    words = next((words for group, words in groups if group), "")
    everything = [*cases, *unknown, *computed, *scaled, *hooked]
    return hit(everything, f"outputs {words} at {counted(len(everything), 'norm')}")


def _other_factor(site: Site, facts: Facts) -> Case | None:
    """Gain and bias are multiplied by a number that is not meant."""
    if facts.intended(site) is None or facts.is_stock(site.path):
        return None
    declared = None if facts.baseline is None else facts.baseline.norms.get(site.path)
    meant = 1.0 if declared is None else declared.factor
    change = site.factor / meant - 1.0
    if severity_of(abs(change)) == "note":
        return None
    line = f"{site.path}: its output is {site.factor:g} times what its gain and bias make of a row, "
    line += f"{facts.source_at(site.path)} says " + ("once" if meant == 1 else f"{meant:g} times")
    return Case(site.path, severity_of(abs(change)), abs(change), line)


def _is_of_no_formula(other: OtherNorm, facts: Facts) -> bool:
    """It normalizes, as neither a spec describes nor the config's class does, and no other rule says why."""
    leaks = any(leak.path == other.path for leak in facts.leaks or ())
    told = leaks or other.passport.readings.keys() & _TOLD or over_time(other.passport) is not None
    return other.passport.verdict == "norm" and not told and not facts.is_stock(other.path)


def _coarsest(site: Site, facts: Facts) -> str:
    """The coarsest dtype among input, gain and output; "" if none was seen."""
    passport = facts.passports.get(site.path)
    weight = None if passport is None else passport.weight
    dtypes = [site.dtype, site.output_dtype, "" if weight is None else dtype_name(weight.dtype)]
    return max((dtype for dtype in dtypes if dtype in EPS), key=lambda dtype: EPS[dtype], default="")


def _dtype_changes(facts: Facts) -> Outcome:
    """The output's dtype differs from the input's and from the meant one, or would differ with a wider gain."""
    cases = []
    for site in facts.sites:
        if not site.output_dtype or not site.dtype:
            continue
        declared = None if facts.baseline is None else facts.baseline.norms.get(site.path)
        intended, meant = facts.intended(site), site.dtype
        found_in = "" if (passport := facts.passports.get(site.path)) is None else passport.dtype
        if found_in in HALF and site.dtype not in HALF:
            line = f"{site.path}: its parameters are {found_in}, and it rounds the {site.dtype} that enters to that"
            cases.append(Case(site.path, "warning", 1.0, line))
        if declared is not None and declared.dtype == site.dtype:
            meant = declared.output_dtype
        elif intended is not None:
            meant = _meant_dtype(site, intended, facts)
        if site.output_dtype != meant:
            line = f"{site.path}: {site.dtype} enters, {site.output_dtype} leaves, {meant} is expected"
            cases.append(Case(site.path, "note" if intended is None else "warning", 1.0, line))
        elif _follows_another(site, facts):
            line = f"{site.path}: its output is {site.spec.casts.output_words}, {facts.source_at(site.path)} says "
            line += intended.casts.output_words if intended else ""
            cases.append(Case(site.path, "note", 0.0, f"{line}: it shows where the two differ"))
    changes = any(case.effect for case in cases)
    where = "the dtype changes at" if changes else "the dtype would change, beside a gain of another dtype, at"
    return hit(cases, f"{where} {counted(len(cases), 'norm')}") or undecided(facts, fields_of("E6"))


def _meant_dtype(site: Site, intended: NormSpec, facts: Facts) -> str:
    """The output's dtype by the meant spec and the dtype of the norm's gain."""
    passport = facts.passports.get(site.path)
    held = (
        None
        if passport is None
        else next((part for part in (passport.weight, passport.bias) if part is not None), None)
    )
    if intended.casts.output == site.spec.casts.output:
        return site.output_dtype
    return str(intended.casts.output_dtype(getattr(torch, site.dtype), held, None)).removeprefix("torch.")


def _follows_another(site: Site, facts: Facts) -> bool:
    """The spec says so, of a norm with something whose dtype its output could follow."""
    intended = facts.intended(site)
    if intended is None or is_open(site, facts, fields_of("E6")):
        return False
    has_parameters = site.spec.has_weight or site.spec.has_bias
    return has_parameters and intended.casts.output != site.spec.casts.output


def _patched(facts: Facts) -> Outcome:
    """Code in memory that is not the library's own; what it computes is judged by the spec of the class."""
    if facts.patches is None:
        return NotChecked("the code of a library's norms is looked at by an inspection only")
    cases = []
    for patch in facts.patches:
        judged = facts.intent is not None and set(patch.sites) <= facts.intent.declared
        by = "held against the spec that is declared for the class" if judged else "no declared spec to hold it against"
        line = f"{patch.name} is {patch.now}" + (f"; {by}" if patch.sites else "")
        # A function of torch may be called by any norm.
        cases += [Case(path, "note", 0.0, line) for path in patch.sites or ("",)]
    if not cases:
        return None
    paths, lines = (tuple(dict.fromkeys(parts)) for parts in zip(*((c.path, c.line) for c in cases), strict=True))
    paths = tuple(filter(None, paths))
    measured = f"{', '.join(patch.name for patch in facts.patches[:3])} replaced"
    measured += f", which {counted(len(paths), 'norm')} would run" if paths else ""
    return Hit(severity="note", sites=paths, measured=measured, evidence=evidence_lines(lines))


RULES = (
    Rule(
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
        check=_cast_order,
    ),
    Rule(
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
        check=_off_its_formula,
        follows=("D6",),
        looks_at=("norms", "other norms"),
    ),
    Rule(
        id="E6",
        title="The dtype changes in the norm",
        severity="warning",
        threshold=(
            "another output dtype than the config's class or the baseline has (warning); a note without either, or "
            "where gain and input have one dtype here and the output would follow the other"
        ),
        source="huggingface/transformers#29402 (float32 gains beside 16-bit inputs), #33133",
        why=(
            "A float32 gain on a 16-bit row makes the output float32: what follows runs wider and slower, takes twice "
            "the memory, or fails where two dtypes meet. The reverse drops digits that the model was trained with."
        ),
        remedy=(
            "cast the output back to the input's dtype, or the parameters to the model's",
            "if it is meant, say so: nk.NormSpec(output_dtype='promote')",
        ),
        confirm="norm(x).dtype beside x.dtype",
        check=_dtype_changes,
    ),
    Rule(
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
        check=_patched,
    ),
)
"""The rules of this group, in order."""
