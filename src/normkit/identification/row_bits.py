"""Recorded 16-bit outputs bit for bit: the casts of a norm, and conventions that its rows leave open otherwise.

A scale that is off by a thousandth changes every fifth output in bfloat16 by a unit. So a formula that gives all bits
is right in whatever other formulas do not give them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from normkit.conventions.casts import OutputDtype
from normkit.conventions.eps import PLACEMENTS
from normkit.identification import cast_program, half_precision_calls
from normkit.identification.half_precision_calls import Run
from normkit.identification.passport import Reading
from normkit.identification.row_fits import OFFSETS, Recording
from normkit.identification.spec_readings import value_of
from normkit.reference import HALF
from normkit.spec import NormSpec
from normkit.text import counted, dtype_name

USUAL_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
_NEIGHBOUR = 1.05
"""An eps is decided if this factor, up or down, loses bits."""
_ELEMENTS = 2**13
"""Outputs that are compared with every candidate; those that pass are compared with all outputs."""
SAME_BUT_FOR_EPS = "a mean of squares, and a sum of squares with a factor sqrt(n), differ in their eps alone"
_PASSES = 0.99
"""With so few outputs the right formula may miss some more."""


def compared_bit_by_bit(
    rows: Recording, spec: NormSpec, readings: Mapping[str, Reading], centrings: Sequence[tuple[bool, bool]]
) -> tuple[NormSpec, dict[str, Reading]]:
    """The spec with its casts, and what the bits of recorded outputs decide.

    Args:
        rows: The rows.
        spec: The spec as far as the sizes of the outputs show it.
        readings: Its readings; bits may decide those that are open.
        centrings: What may be subtracted: (from the numerator, in the statistics).

    Returns:
        The spec, and the readings that are new or decided now.
    """
    may_have_offset = spec.gain.offset or readings["gain"].undecidable is not None
    names = ["casts", *(["offset dtype"] if may_have_offset else [])]
    outputs: list[OutputDtype] = [
        each
        for each in get_args(OutputDtype)
        if spec.replace(output_dtype=each).casts.output_dtype(rows.x.dtype, rows.weight, rows.bias) == rows.y.dtype
    ]
    told = f"outputs are {dtype_name(rows.y.dtype)}"
    found = {
        "output dtype": Reading(value={"output_dtype": outputs[0]}, evidence=(told,))
        if len(outputs) == 1 and rows.weight is not None
        else Reading.open("rows and parameters of other dtypes tell what the output's follows", told)
    }
    spec = spec.replace(output_dtype=outputs[0] if outputs else "input")
    reason = None
    if not {rows.x.dtype, rows.y.dtype} & set(HALF):
        reason = (
            f"rows in {dtype_name(rows.x.dtype)} are not rounded to 16 bits; rows in bfloat16 show where a norm rounds"
        )
    elif (spec.has_weight and rows.weight is None) or (spec.has_bias and rows.bias is None):
        reason = "gain and bias as stored were not given"
    elif spec.has_bias and readings["bias"].undecidable:
        reason = "the bias is not known"
    elif not outputs:
        reason = f"no rule gives outputs in {dtype_name(rows.y.dtype)}"
    if reason is not None:
        return spec, {**dict.fromkeys(names, Reading.open(reason)), **found}
    weight, bias = rows.weight if spec.has_weight else None, rows.bias if spec.has_bias else None
    count = max(8, _ELEMENTS // rows.x.shape[-1])
    some = Run(x=rows.x[:count], y=rows.y[:count], weight=weight, bias=bias)
    every = Run(x=rows.x, y=rows.y, weight=weight, bias=bias)
    formulas = list(dict.fromkeys(_formulas(spec, readings, centrings)))

    def share(run: Run, candidate: NormSpec) -> float:
        return half_precision_calls.rate([run], candidate).share

    best, programs = 0.0, [spec]
    for formula in formulas:
        tried = list(cast_program.programs_of(formula, spec.output_dtype))
        shares = [share(some, each) for each in tried]
        if max(shares) > best:
            best, spec = max(shares), tried[shares.index(max(shares))]
            programs = [each for each, one in zip(tried, shares, strict=True) if one >= min(best, _PASSES)]
        if best >= _PASSES:
            break
    shares = [share(every, each) for each in programs]
    best = max(shares)
    alike = [each for each, one in zip(programs, shares, strict=True) if one >= best - cast_program.FLIPS]
    spec = alike[0]
    figure = f"{best:.2%} of the outputs are bit for bit those of {cast_program.in_words(spec)}"
    if best < cast_program.MATCHED:
        return spec, {**dict.fromkeys(names, Reading.open("no program gives these bits", figure)), **found}
    for name in names:
        values = [value_of(each, name) for each in alike]
        agreed = {key: value for key, value in values[0].items() if all(each[key] == value for each in values)}
        agreed.pop("output_dtype", None)
        if len(agreed) == len(values[0]):
            found[name] = Reading(value=values[0], evidence=(figure,))
        else:
            words = "; ".join(cast_program.in_words(each) for each in alike[1:4])
            found[name] = replace(Reading.open(f"as many are those of: {words}", figure), value=agreed or None)
    casts = value_of(spec, "casts") | value_of(spec, "offset dtype")
    rivals = [each for each in (one.replace(**casts) for one in formulas) if share(some, each) >= _PASSES]
    fits = [each for each in rivals if share(every, each) >= best - cast_program.FLIPS]
    for name in ("centring", "divisor", "eps", "gain"):
        values = [value_of(each, name) for each in fits]
        if not readings[name].undecidable or any(value != values[0] for value in values):
            continue
        others = len({str(value_of(each, name)) for each in formulas}) - 1
        if name == "eps":
            nearby = [spec.replace(eps=(spec.eps or 0) * factor) for factor in (_NEIGHBOUR, 1 / _NEIGHBOUR)]
            if not spec.eps or any(share(every, each) >= best - cast_program.FLIPS for each in nearby):
                continue
        if others:
            line = f"{figure}; {counted(others, 'other formula')} {'does' if others == 1 else 'do'} not give them"
            found[name] = Reading(value=values[0], evidence=(*readings[name].evidence, line))
    if "divisor" in found and "eps" not in found and readings["eps"].undecidable:
        value = {"correction": spec.correction}
        found["divisor"] = replace(Reading.open(SAME_BUT_FOR_EPS, *found["divisor"].evidence), value=value)
    return spec, found


def _formulas(
    spec: NormSpec, readings: Mapping[str, Reading], centrings: Sequence[tuple[bool, bool]]
) -> Iterator[NormSpec]:
    """The spec, then what it may be in each field that is open."""
    yield spec
    is_open = {name for name, reading in readings.items() if reading.undecidable is not None}
    pairs = centrings if "centring" in is_open else [(spec.centre_numerator, spec.centre_statistics)]
    corrections = (0, 1) if "divisor" in is_open and spec.reduction == "mean" else (spec.correction,)
    places = tuple(PLACEMENTS) if "eps" in is_open else (spec.eps_placement,)
    sizes = USUAL_EPS if "eps" in is_open else (spec.eps,)
    offsets = OFFSETS if "gain" in is_open and spec.has_weight else (spec.weight_offset,)
    for pair, correction, place, eps, offset in itertools.product(pairs, corrections, places, sizes, offsets):
        yield spec.replace(
            centre_numerator=pair[0],
            centre_statistics=pair[1],
            correction=correction,
            eps_placement=place if eps else "inside",
            eps=eps,
            weight_offset=offset,
        )
