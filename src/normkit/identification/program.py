"""The compute program: where a norm rounds to 16 bits, from comparing its outputs bit for bit with each candidate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.identification.affine import Affine
from normkit.identification.specimen import Specimen
from normkit.spec import Cast, NormSpec, OutputDtype, StatisticsDtype

_ELEMENTS = 8192
_ENTRIES = 64
_TIE = 0.01
"""Rates this near are never told apart: a wrong cast moves 4 % of the outputs or more."""
_FLIPS = 0.0005
"""Where a program gives all the bits, no other is as good; float32 in place of float64 flips up to 0.5 %."""
_MATCHED = 0.98
"""Below this, no program is the norm's own."""
_LARGE = 1000.0
"""Its square overflows float16."""

_SIMPLEST_FIRST: tuple[tuple[Cast, StatisticsDtype], ...] = (
    ("late", "float32"),
    ("early", "float32"),
    ("weight", "float32"),
    ("none", "input"),
    ("late", "input"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One call in 16 bits.

    Attributes:
        x: The input.
        y: The output, or None where the norm does not run so.
        weight: The weight in the dtype of the run, or None.
        bias: The bias, likewise.
    """

    x: Tensor
    y: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def match(self, spec: NormSpec) -> Tensor:
        """Which outputs are those of the spec: the same 16-bit number, or the same to 8 ulp of float32."""
        assert self.y is not None
        expected = reference.forward(self.x, spec, self.weight, self.bias)
        if self.y.dtype == torch.float32:
            return (self.y - expected.float()).abs() <= 8 * torch.finfo(torch.float32).eps * self.y.abs()
        return self.y.float() == expected.float()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compute program.

    Attributes:
        spec: The spec with the program's casts.
        rate: Share of the outputs that it gives bit for bit; 1.0 where nothing was compared.
        evidence: Lines on what decided.
        doubts: Lines on what could not be decided.
    """

    spec: NormSpec
    rate: float
    evidence: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def recover(
    specimen: Specimen, spec: NormSpec, affine: Affine, shape: Sequence[int], generator: torch.Generator
) -> Program:
    """Find the casts of a norm whose formula is known."""
    overflows = _overflows(specimen, shape, generator)
    if not affine.parameters_reached:
        known = spec.replace(statistics_dtype="input") if overflows else spec
        return Program(spec=known, rate=1.0, doubts=("its casts: gain or bias is no parameter that can be set",))
    runs = _runs(specimen, affine, shape, generator)
    compared = [run for run in runs if run.y is not None and run.x.dtype == torch.bfloat16]
    if not compared:
        return Program(spec=spec, rate=1.0, doubts=("its casts: it does not run in bfloat16",))
    output, doubts = _output_dtype(runs, specimen)
    candidates = [
        candidate for candidate in _candidates(spec, output) if not overflows or candidate.statistics_dtype == "input"
    ]
    rates = [_rate(compared, candidate) for candidate in candidates]
    noise = min(_TIE, 1 - max(rates) + _FLIPS)
    best = next(index for index, rate in enumerate(rates) if rate >= max(rates) - noise)
    if rates[best] < _MATCHED:
        doubts = (*doubts, f"its casts: no program gives its bits, the nearest {rates[best]:.1%}")
    # A tie is between programs that do the same here; the runner-up is the best that does not.
    others = [rate for rate in rates if rate < rates[best] - noise]
    evidence: tuple[str, ...] = (
        f"in bfloat16 {rates[best]:.2%} of {sum(run.x.numel() for run in compared)} outputs are bit for bit those of "
        f"{_in_words(candidates[best])}" + (f" (next best program: {max(others):.1%})" if others else ""),
    )
    if overflows:
        evidence = (*evidence, "rows of magnitude 1000 overflow in float16: statistics in the input's dtype")
    return Program(spec=candidates[best], rate=_rate(compared[:1], candidates[best]), evidence=evidence, doubts=doubts)


def rate_of(
    specimen: Specimen, spec: NormSpec, affine: Affine, shape: Sequence[int], generator: torch.Generator
) -> float:
    """Share of the outputs in bfloat16 that are bit for bit the spec's; 1.0 where that cannot be compared."""
    if not affine.parameters_reached:
        return 1.0
    run = _run(specimen, affine, shape, generator, torch.bfloat16, torch.bfloat16)
    return 1.0 if run.y is None else _rate([run], spec)


def _runs(specimen: Specimen, affine: Affine, shape: Sequence[int], generator: torch.Generator) -> list[Run]:
    """Calls with parameters and input in bfloat16, then with one of the two in float32, under several draws."""
    half, full = torch.bfloat16, torch.float32
    pairs = [(half, half)]
    if affine.weight is not None or affine.bias is not None:
        pairs += [(full, half), (half, full)]
    # Where an offset is added shows in about one entry of the weight in four: a short weight is drawn again.
    entries = sum(parameter.numel() for parameter in specimen.parameters.values()) or _ENTRIES
    runs = []
    for _ in range(max(1, min(4, _ENTRIES // entries))):
        specimen.draw(generator)
        runs += [_run(specimen, affine, shape, generator, parameters, x) for parameters, x in pairs]
    return runs


def _run(
    specimen: Specimen,
    affine: Affine,
    shape: Sequence[int],
    generator: torch.Generator,
    parameters: torch.dtype,
    x: torch.dtype,
) -> Run:
    samples = max(2, min(256, _ELEMENTS // math.prod(shape[1:])))
    rows = torch.randn(samples, *shape[1:], generator=generator).to(specimen.device, x)
    copies = (None if part is None else part.detach().to(parameters, copy=True) for part in affine.of(specimen.module))
    weight, bias = copies
    return Run(x=rows, y=specimen.call_in(parameters, rows), weight=weight, bias=bias)


def _overflows(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> bool:
    """In float16, rows of magnitude 1000 come out not finite, or as if they were zero."""
    samples = (16, *shape[1:])
    signs = torch.randn(samples, generator=generator).sign()
    x = (_LARGE * signs * (1 + 0.5 * torch.rand(samples, generator=generator))).to(specimen.device, torch.float16)
    plus, minus = (specimen.call_in(torch.float16, sign * x) for sign in (1, -1))
    if plus is None or minus is None:
        return False
    # A short row may by chance have one sign only, and then little variance.
    return bool((~torch.isfinite(plus)).any() or (plus == minus).double().mean() > 0.5)


def _output_dtype(runs: Sequence[Run], specimen: Specimen) -> tuple[OutputDtype, tuple[str, ...]]:
    """What the output's dtype follows, and what of it stays open."""
    dtypes = [None if run.y is None else run.y.dtype for run in runs]
    if runs[0].weight is None and runs[0].bias is None:
        if dtypes[0] == torch.bfloat16:
            return "input", ()
        return ("promote" if specimen.module is None else "input"), (f"its output is {dtypes[0]} for bfloat16 inputs",)
    match dtypes[1:3]:
        case [torch.bfloat16, _]:
            return "input", ()
        case [torch.float32, torch.float32]:
            return "promote", ()
        case [torch.float32, torch.bfloat16]:
            return "weight", ()
        case [torch.float32, None]:
            return "promote", ("whether its output's dtype is the weight's or the wider one",)
    return "input", ("what its output's dtype follows: it does not run with parameters and input in different dtypes",)


def _candidates(spec: NormSpec, output: OutputDtype) -> Iterator[NormSpec]:
    """Programs of a formula, simplest first."""
    affine = spec.has_weight or spec.has_bias
    offsets = ("float32", "parameter") if spec.weight_offset else ("float32",)
    for (cast, statistics), rounded, offset in itertools.product(_SIMPLEST_FIRST, (False, True), offsets):
        # Without an affine part early and late are one, and only a weight has a dtype to cast to.
        if (cast == "early" and not affine) or (cast == "weight" and not spec.has_weight):
            continue
        yield spec.replace(
            cast=cast,
            statistics_dtype=statistics,
            round_rstd=rounded,
            offset_dtype=offset,
            output_dtype=output,
        )


def _rate(runs: Sequence[Run], spec: NormSpec) -> float:
    return float(torch.cat([run.match(spec).flatten() for run in runs]).double().mean())


def _in_words(spec: NormSpec) -> str:
    cast = {
        "late": "a late cast",
        "early": "an early cast",
        "weight": "a cast to the weight's dtype",
        "none": "no cast at all",
    }[spec.cast]
    words = [cast, f"statistics in {'float32' if spec.statistics_dtype == 'float32' else 'the input dtype'}"]
    if spec.round_rstd:
        words.append("rstd rounded")
    if spec.weight_offset:
        words.append(f"offset added in {'float32' if spec.offset_dtype == 'float32' else 'the weight dtype'}")
    return ", ".join(words)
