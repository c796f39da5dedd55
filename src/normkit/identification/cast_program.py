"""The compute program: where a norm rounds to 16 bits, from comparing its outputs bit for bit with each candidate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from normkit.conventions.casts import PROGRAMS, OutputDtype
from normkit.conventions.eps import EPS
from normkit.identification import half_precision_calls
from normkit.identification.gain_and_bias import Affine
from normkit.identification.half_precision_calls import DEFINITION, Rate, Run
from normkit.identification.passport import Reading
from normkit.identification.spec_readings import value_of
from normkit.identification.specimen import Specimen
from normkit.reference import HALF
from normkit.spec import NormSpec
from normkit.text import dtype_name

MATCHED = 0.999
"""A norm's own program gives this share of its outputs or more; a wrong one misses 4 % or more."""
FLIPS = 0.0005
"""Rates this near are of programs that do the same here: float32 in place of float64 flips a few in ten thousand."""

_MACHINE_EPS = EPS["float32"]
NO_PARAMETER = "gain or bias is no parameter that can be set"


@dataclass(frozen=True, kw_only=True)
class Program:
    """The casts of a norm, and how well they explain its outputs."""

    spec: NormSpec
    """The spec with these casts."""
    rate: float
    """Share of the outputs of one call that it gives bit for bit; 1.0 where nothing was compared."""
    readings: dict[str, Reading]
    """Under "casts" and "output dtype"; "offset dtype" where there is an offset; "eps" where the bits show another one
    than float32 outputs do."""
    is_matched: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """A program, and how well it explains the runs in each 16-bit dtype; they are compared when that is asked."""

    spec: NormSpec
    compared: Mapping[torch.dtype, Sequence[Run]]
    has_own_eps: bool
    _rates: dict[torch.dtype, Rate] = field(default_factory=dict)

    def rate(self, dtype: torch.dtype) -> Rate:
        if dtype not in self._rates:
            spec = self.spec.replace(eps=torch.finfo(dtype).eps) if self.has_own_eps else self.spec
            self._rates[dtype] = half_precision_calls.rate(self.compared[dtype], spec)
        return self._rates[dtype]

    @property
    def rates(self) -> dict[torch.dtype, Rate]:
        return {dtype: self.rate(dtype) for dtype in self.compared}

    @property
    def worst(self) -> float:
        return min(rate.share for rate in self.rates.values())

    def is_as_good_as(self, shares: dict[torch.dtype, float]) -> bool:
        return all(self.rate(dtype).share >= share - FLIPS for dtype, share in shares.items())

    def figures(self) -> str:
        # With as many digits as tell them from 100 %.
        shares = {dtype_name(dtype): rate.share for dtype, rate in self.rates.items()}
        return " and ".join(
            f"{'100%' if share == 1 else f'{share:.2%}' if share > 0.99 else f'{share:.1%}'} in {name}"
            for name, share in shares.items()
        )


def recover(
    specimen: Specimen, spec: NormSpec, affine: Affine, shape: Sequence[int], generator: torch.Generator
) -> Program:
    """Find the casts of a norm whose formula is known."""
    overflows = half_precision_calls.overflows(specimen, shape, generator)
    if not affine.parameters_reached:
        known = spec.replace(statistics_dtype="input") if overflows else spec
        return Program(spec=known, rate=1.0, readings=open_readings(known, NO_PARAMETER))
    runs = half_precision_calls.make_runs(specimen, spec, affine, shape, generator)
    in_dtypes = {dtype: [run for run in runs if run.y is not None and run.x.dtype == dtype] for dtype in HALF}
    compared = {dtype: some for dtype, some in in_dtypes.items() if some}
    if not compared:
        return Program(spec=spec, rate=1.0, readings=open_readings(spec, "it does not run in bfloat16 or float16"))
    first = next(iter(compared))
    first_dtype = [run for run in runs if first in (run.x.dtype, run.parameter_dtype)]
    output, reading = _output_dtype(first_dtype, first, specimen)
    programs = [each for each in programs_of(spec, output) if not overflows or each.statistics_dtype == "input"]
    candidates = _candidates(programs, compared)
    eps: dict[str, Reading] = {}
    if _best(candidates).worst < MATCHED and spec.eps in (None, _MACHINE_EPS):
        of_its_own = _candidates(programs, compared, own_eps=True)
        if _best(of_its_own).worst >= MATCHED:
            reason = "eps is the machine epsilon of the input's own dtype, which no spec describes: "
            reason += " and ".join(f"{torch.finfo(dtype).eps:g} in {dtype_name(dtype)}" for dtype in compared)
            by_dtype = {dtype_name(dtype): torch.finfo(dtype).eps for dtype in compared}
            candidates = of_its_own
            eps = {"eps": Reading.open(reason), "eps by dtype": Reading(value=by_dtype)}
    shares = {dtype: rate.share for dtype, rate in _best(candidates).rates.items()}
    # Programs that tie do the same here. The simplest of them is reported.
    found = next(candidate for candidate in candidates if candidate.is_as_good_as(shares))
    readings = {**_readings(found, candidates, sum(run.x.numel() for run in compared[first])), **eps}
    if found.worst < MATCHED and (rounded := _rounded_scale(programs, compared)):
        readings["casts"] = Reading.open(rounded, *readings["casts"].evidence)
    if overflows:
        line = "rows of magnitude 1000 overflow in float16: statistics in the input's dtype"
        casts = readings["casts"]
        value = {"statistics_dtype": "input"} if casts.value is None else casts.value
        readings["casts"] = replace(casts, value=value, evidence=(*casts.evidence, line))
    readings["output dtype"] = reading
    return Program(
        spec=found.spec.replace(eps=_MACHINE_EPS) if eps else found.spec,
        rate=half_precision_calls.rate(compared[first][:1], found.spec).share,
        readings=readings,
        is_matched=found.worst >= MATCHED,
    )


def rate_of(
    specimen: Specimen, spec: NormSpec, affine: Affine, shape: Sequence[int], generator: torch.Generator
) -> float:
    """Share of the outputs in 16 bits that are bit for bit the spec's; 1.0 where that cannot be compared."""
    if not affine.parameters_reached:
        return 1.0
    for dtype in HALF:
        run = half_precision_calls.make_run(specimen, spec, affine, shape, generator, dtype, dtype)
        if run.y is not None:
            return half_precision_calls.rate([run], spec).share
    return 1.0


def _candidates(
    programs: Sequence[NormSpec], compared: Mapping[torch.dtype, Sequence[Run]], own_eps: bool = False
) -> list[_Candidate]:
    """The programs as candidates; `own_eps` gives each the machine epsilon of the run's own dtype."""
    return [_Candidate(spec=spec, compared=compared, has_own_eps=own_eps) for spec in programs]


def _best(candidates: Sequence[_Candidate]) -> _Candidate:
    """The first whose worst rate is the best; of the others, no more rates are computed than show that they are not."""
    best, *others = candidates
    for each in others:
        if all(each.rate(dtype).share > best.worst for dtype in each.compared):
            best = each
    return best


def _readings(found: _Candidate, candidates: Sequence[_Candidate], outputs: int) -> dict[str, Reading]:
    """The reading of the casts, from the rates of all programs."""
    shares = {dtype: rate.share for dtype, rate in found.rates.items()}
    others = [candidate for candidate in candidates if not candidate.is_as_good_as(shares)]
    seen = f"the program ({in_words(found.spec)}) gives {found.figures()} of {outputs} outputs bit for bit"
    orders = sorted({rate.order for rate in found.rates.values()} - {DEFINITION})
    if orders:
        seen += f", computed as {' or '.join(orders)}"
    if others:
        runner_up = _best(others)
        seen += f"; next best program ({in_words(runner_up.spec)}): {runner_up.figures()}"
    evidence = [seen]
    if len(found.rates) < len(HALF):
        (only,) = found.rates
        evidence.append(f"the norm runs in {dtype_name(only)}, not in the other 16-bit dtype")
    if found.worst < MATCHED:
        reason = f"no program gives its bits; the nearest ({in_words(found.spec)}) gives {found.figures()}"
        own = {dtype: max(candidates, key=lambda candidate: candidate.rate(dtype).share) for dtype in found.rates}
        if all(candidate.rate(dtype).share >= MATCHED for dtype, candidate in own.items()):
            words = "; ".join(f"in {dtype_name(dtype)} {in_words(candidate.spec)}" for dtype, candidate in own.items())
            reason = f"its program depends on the input's dtype: {words}"
        return open_readings(found.spec, reason, *evidence)
    readings = {"casts": Reading(value=value_of(found.spec, "casts"), evidence=tuple(evidence))}
    if found.spec.gain.offset:
        readings["offset dtype"] = _offset_reading(found, candidates)
    return readings


def _rounded_scale(programs: Sequence[NormSpec], compared: Mapping[torch.dtype, Sequence[Run]]) -> str | None:
    """The one program that is met and that no spec describes: x divided by s, rounded to the input's dtype."""
    for spec in programs:
        if spec.statistics_dtype == "float32" and spec.cast != "late" and not spec.round_rstd:
            shares = {
                dtype: half_precision_calls.share_with_rounded_scale(runs, spec) for dtype, runs in compared.items()
            }
            if min(shares.values()) >= MATCHED:
                figures = " and ".join(f"{share:.2%} in {dtype_name(dtype)}" for dtype, share in shares.items())
                return f"it divides by s rounded to the input's dtype, and no spec has that; so computed: {figures}"
    return None


def _offset_reading(found: _Candidate, candidates: Sequence[_Candidate]) -> Reading:
    """The dtype in which the offset is added, unless it made no difference."""
    other = {"float32": "parameter", "parameter": "float32"}[found.spec.offset_dtype]
    twin = next(each for each in candidates if each.spec == found.spec.replace(offset_dtype=other))
    figures = f"{found.spec.gain.offset_words}: {found.figures()}; {twin.spec.gain.offset_words}: {twin.figures()}"
    if twin.is_as_good_as({dtype: rate.share for dtype, rate in found.rates.items()}):
        return Reading.open("the offset gives the same bits in either dtype", figures)
    return Reading(value=value_of(found.spec, "offset dtype"), evidence=(figures,))


def open_readings(spec: NormSpec, reason: str, *evidence: str) -> dict[str, Reading]:
    """Nothing about the casts could be decided."""
    names = ("casts", "offset dtype") if spec.gain.offset else ("casts",)
    return {name: Reading.open(reason, *evidence) for name in (*names, "output dtype")}


def _output_dtype(runs: Sequence[Run], half: torch.dtype, specimen: Specimen) -> tuple[OutputDtype, Reading]:
    """The rule for the output's dtype: that of the input, the weight, the widest, or float32."""
    dtypes = [None if run.y is None else run.y.dtype for run in runs]
    name = dtype_name(half)
    if runs[0].weight is None and runs[0].bias is None:
        if dtypes[0] in (half, torch.float32):
            output: OutputDtype = "input" if dtypes[0] == half else "float32"
            return output, _decided(output, f"its output is {dtype_name(dtypes[0])} for {name} inputs")
        output = "promote" if specimen.module is None else "input"
        return output, Reading.open(f"its output is {dtypes[0]} for {name} inputs, and there is no other to vary")
    seen = f"with float32 parameters and {name} input, then the reverse, the output is "
    seen += " and ".join("none" if dtype is None else dtype_name(dtype) for dtype in dtypes[1:3])
    if dtypes[0] == torch.float32 and set(dtypes[1:3]) <= {torch.float32, None}:
        return "float32", _decided("float32", f"with {name} parameters and input the output is float32")
    match dtypes[1:3]:
        case [torch.bfloat16 | torch.float16, _]:
            return "input", _decided("input", seen)
        case [torch.float32, torch.float32]:
            return "promote", _decided("promote", seen)
        case [torch.float32, torch.bfloat16 | torch.float16]:
            return "weight", _decided("weight", seen)
        case [torch.float32, None]:
            return "promote", Reading.open("it may be the weight's or the wider one of all", seen)
    return "input", Reading.open("it does not run with parameters and input in different dtypes")


def _decided(output: OutputDtype, evidence: str) -> Reading:
    return Reading(value={"output_dtype": output}, evidence=(evidence,))


def programs_of(spec: NormSpec, output: OutputDtype) -> Iterator[NormSpec]:
    """Programs of a formula, simplest first."""
    affine = spec.has_weight or spec.has_bias
    offsets = ("float32", "parameter") if spec.gain.offset else ("float32",)
    for (cast, statistics), rounded, offset in itertools.product(PROGRAMS, (False, True), offsets):
        # Without an affine part early and late are one, and only a weight has a dtype to cast to.
        if (cast in ("early", "input") and not affine) or (cast == "weight" and not spec.has_weight):
            continue
        yield spec.replace(
            cast=cast,
            statistics_dtype=statistics,
            round_rstd=rounded,
            offset_dtype=offset,
            output_dtype=output,
        )


def in_words(spec: NormSpec) -> str:
    """The casts of a spec."""
    offset = (f"offset {spec.gain.offset_words}",) if spec.gain.offset else ()
    return ", ".join((*spec.casts.parts, *offset))
