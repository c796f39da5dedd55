"""Calls of a norm in 16 bits, and how many of their outputs a compute program gives bit for bit.

A program is run in each usual order of operations, in float32 or in 16 bits, as code would run it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit import reference
from normkit.conventions.divisor import Divisor
from normkit.identification.gain_and_bias import Affine
from normkit.identification.specimen import Specimen
from normkit.spec import NormSpec

_FUSED = "by torch's kernel, gain and bias in it"
DEFINITION = "in float64, rounded where the program rounds"
ROUNDED_SCALE = "x / s with s rounded"
"""An order that no spec describes: `round_rstd` rounds 1/s."""
_ELEMENTS = 8192
_ENTRIES = 64
_SHORT = 8
_SMALL_WEIGHT = 0.08
"""1 + w loses the last four bits of a w of 0.04 to 0.12 where it is added in w's own 16-bit dtype."""
_LARGE = 1000.0
"""A magnitude whose square overflows float16."""
_PERFECT = 0.9998
_NEAR = 0.98
"""In float32 the order of operations moves a few in ten thousand; below this, no order makes a program match."""


class Scale(NamedTuple):
    """One way to compute the divisor of a row and the factor in its place."""

    words: str
    divisor: Tensor
    factor: Tensor


def outputs(
    x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, only: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """The outputs of the spec's program for a 16-bit x in each usual order, each with the name of that order.

    The order decides the last bit of a float32, and with it one 16-bit rounding in some thousands; it decides many
    more where every step is kept in 16 bits.

    Args:
        x: Input.
        spec: The program.
        weight: Its gain.
        bias: Its bias.
        only: How the names begin of orders that are wanted.
    """
    to = spec.casts.output_dtype(x.dtype, weight, bias)
    work = x.dtype if spec.statistics_dtype == "input" else torch.float32
    gain, shift = (None if part is None else spec.rows.aligned(part, x) for part in (weight, bias))
    if gain is not None and spec.gain.is_before:
        x, gain = (x.to(work) * spec.gain.effective(gain, work).to(work)).to(x.dtype), None
    early = spec.casts.early(x.dtype, weight)
    if gain is not None:
        gain = spec.gain.effective(gain, early or torch.promote_types(torch.float32, gain.dtype))
    gain, shift = (
        None if part is None else spec.casts.parameter(part, x.dtype, work if early is None else None)
        for part in (gain, shift)
    )
    rows = spec.rows.split(x.to(work).contiguous())
    # One number stays one, for it promotes no other dtype.
    gain, shift = (
        part if part is None or part.dim() == 0 else spec.rows.split(part.expand(x.shape)) for part in (gain, shift)
    )
    steps = () if only == _FUSED else _steps(x, rows, spec, None if early not in (None, work) else gain)
    for words, step, has_gain in steps:
        if not words.startswith(only):
            continue
        y = step()
        y = spec.divisor.multiplied(y.to(torch.promote_types(y.dtype, work)))
        y = y if early is None or has_gain else y.to(early)
        if gain is not None and not has_gain:
            y = gain * y
        y = y if shift is None else y + shift
        yield words, spec.rows.joined(y, x).to(to)
    if early is None and not spec.gain.is_before and _FUSED.startswith(only):
        fused = _fused(x, spec, weight, bias)
        if fused is not None:
            yield _FUSED, fused.to(to)


def _steps(
    x: Tensor, rows: Tensor, spec: NormSpec, gain: Tensor | None
) -> Iterator[tuple[str, Callable[[], Tensor], bool]]:
    """The last step to the normalized rows in each order; with a gain that may go first, also times the gain (True)."""
    dtype, wide = x.dtype, rows.dtype == torch.float32
    centred = spec.centring.projected(rows)
    gained = None if gain is None else gain * centred
    for words, divisor, factor in _scales(rows, spec, reference.machine_eps(x, spec)):
        if spec.round_rstd and wide:
            narrow = centred.to(dtype)
            yield f"x * (1 / s), {words}", partial(torch.mul, narrow, factor.to(dtype)), False
            yield f"{ROUNDED_SCALE}, {words}", partial(torch.div, narrow, divisor.to(dtype)), False
            continue
        if not spec.round_rstd:
            yield f"x / s, {words}", partial(torch.div, centred, divisor), False
            if gained is not None:
                yield f"(gain * x) / s, {words}", partial(torch.div, gained, divisor), True
        # In 16 bits the factor is a rounded rstd.
        if spec.round_rstd or wide:
            yield f"x * (1 / s), {words}", partial(torch.mul, centred, factor), False
            if gain is not None and gained is not None:
                yield f"(gain * x) * (1 / s), {words}", partial(torch.mul, gained, factor), True
                yield f"x * (gain / s), {words}", partial(torch.mul, centred, gain * factor), True
    if wide and not spec.round_rstd and _has_kernel(spec):
        kernel = partial(F.layer_norm if spec.centring.numerator else F.rms_norm, rows, rows.shape[-1:])
        yield "by torch's kernel", partial(kernel, eps=reference.machine_eps(x, spec)), False


def _scales(rows: Tensor, spec: NormSpec, eps: float) -> Iterator[Scale]:
    """s in each usual way."""
    placement, divisor, is_centred = spec.placement, spec.divisor, spec.centring.statistics
    deviation = rows - rows.mean(-1, keepdim=True) if is_centred else rows
    ways = [("v as a mean of squares", divisor.of_squares(deviation.square()))]
    roots: list[tuple[str, Tensor]] = []
    if rows.dtype in reference.HALF:
        # torch's own var, std and norm are wide inside and round once.
        if is_centred and not divisor.is_sum:
            ways.append(("v by torch.var", rows.var(-1, keepdim=True, correction=divisor.correction)))
            roots.append(("sqrt(v) by torch.std", rows.std(-1, keepdim=True, correction=divisor.correction)))
        else:
            norm = torch.linalg.vector_norm(deviation, dim=-1, keepdim=True)
            count = divisor.count(rows.shape[-1])
            precise = deviation.float().square().sum(-1, keepdim=True) / count
            ways.append(("v rounded once", precise.to(rows.dtype)))
            roots.append(("sqrt(v) by torch.norm", norm if divisor.is_sum else norm / math.sqrt(count)))
    if placement.power == 2:
        for words, v in ways:
            s = placement.scale(v, eps)
            yield Scale(words, s, (v + eps).rsqrt())
            if rows.dtype in reference.HALF:
                yield Scale(f"{words}, s rounded", s, s.reciprocal())
        return
    for words, root in [*((words, v.sqrt()) for words, v in ways), *roots]:
        s = placement.scale(root, eps)
        yield Scale(words, s, s.reciprocal())


def _has_kernel(spec: NormSpec) -> bool:
    """Whether torch has a function for this formula."""
    return spec.placement.power == 2 and spec.divisor == Divisor() and not spec.centring.is_half


def _fused(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The output of torch's own norm in float32 with gain and bias; None if torch has no such norm."""
    rows = spec.rows
    if not _has_kernel(spec) or rows.are_places or rows.channel_axis == -1:
        return None
    wide, eps = x.float(), reference.machine_eps(x, spec)
    gain = None if weight is None else spec.gain.effective(weight, torch.float32).float()
    shift = None if bias is None else bias.float()
    sizes = rows.parameter_sizes(x.shape)
    if any(part is not None and part.shape != sizes for part in (gain, shift)):
        return None
    if rows.are_samples:
        return F.group_norm(wide, spec.groups, gain, shift, eps) if spec.centring.numerator else None
    if spec.groups > 1:
        return None
    if spec.centring.numerator:
        return F.layer_norm(wide, sizes, gain, shift, eps)
    return None if shift is not None else F.rms_norm(wide, sizes, gain, eps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One call of a norm in 16 bits."""

    x: Tensor
    y: Tensor | None
    """None where the norm does not run in these dtypes."""
    weight: Tensor | None
    """In the dtype of the run's parameters."""
    bias: Tensor | None
    """In the dtype of the run's parameters."""

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """The dtype of weight and bias; None where there is neither."""
        return next((part.dtype for part in (self.weight, self.bias) if part is not None), None)

    @functools.cached_property
    def _normalized(self) -> Callable[[NormSpec], Tensor]:
        """The normalized rows of a program; with two kept, programs that round them in other ways share them."""
        x, weight = self.x, self.weight
        return functools.lru_cache(maxsize=2)(lambda spec: reference.normalized(x, spec, weight, x.dtype))

    def defined(self, spec: NormSpec) -> Tensor:
        """The outputs of the spec's program by its definition."""
        offset_dtype = spec.offset_dtype if spec.gain.is_before else "float32"
        rows = spec.replace(cast="late", output_dtype="input", offset_dtype=offset_dtype)
        if self.x.dtype not in reference.HALF:
            rows = rows.replace(statistics_dtype="float32", round_rstd=False)
        return reference.finished(self._normalized(rows), self.x.dtype, spec, self.weight, self.bias)

    @functools.cached_property
    def _has_nan(self) -> bool:
        return self.y is not None and bool(self.y.isnan().any())

    def match(self, expected: Tensor) -> float:
        """Share of the outputs that are as expected: the same 16-bit number, or in float32 equal to within 8 roundings.

        A rounding is measured on the terms of an output, because a bias may cancel nearly all of it.
        """
        assert self.y is not None
        if self.y.dtype == torch.float32:
            size = self.y.abs() + self.y.square().nanmean().sqrt()
            close = (self.y - expected).abs_() <= 8 * torch.finfo(torch.float32).eps * size
        else:
            close = self.y == expected
        same = int(close.count_nonzero())
        if same < close.numel() and self._has_nan:
            same += int((self.y.isnan() & expected.isnan()).count_nonzero())
        return same / close.numel()


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How well the casts of a spec explain some runs."""

    share: float
    """Share of the outputs that are equal bit for bit, in the order of operations that explains most."""
    order: str
    """The order of operations that explains most."""


def make_runs(
    specimen: Specimen, spec: NormSpec, affine: Affine, shape: Sequence[int], generator: torch.Generator
) -> list[Run]:
    """Calls in bfloat16 and in float16: parameters and input, then one of the two in float32; under several draws."""
    entries = sum(parameter.numel() for parameter in specimen.parameters.values()) or _ENTRIES
    # One entry may happen to need no rounding: a short weight is drawn again.
    draws = max(1, min(4, _ENTRIES // entries))
    runs = []
    for half in reference.HALF:
        pairs = [(half, half)]
        if affine.weight is not None or affine.bias is not None:
            pairs += [(torch.float32, half), (half, torch.float32)]
        for _ in range(draws):
            specimen.draw(generator)
            if spec.gain.offset and isinstance(affine.weight, str):
                specimen.parameters[affine.weight].mul_(_SMALL_WEIGHT)
            runs += [
                make_run(specimen, spec, affine, shape, generator, parameters, x, _ELEMENTS // draws)
                for parameters, x in pairs
            ]
    return runs


def make_run(
    specimen: Specimen,
    spec: NormSpec,
    affine: Affine,
    shape: Sequence[int],
    generator: torch.Generator,
    parameters: torch.dtype,
    dtype: torch.dtype,
    elements: int = _ELEMENTS,
) -> Run:
    """One call with parameters and input of these dtypes, on about this number of elements."""
    samples = max(2, elements // math.prod(shape[1:]))
    x = torch.randn(samples, *shape[1:], generator=generator)
    eps = reference.machine_eps(x, spec)
    felt = spec.placement.length(eps)
    if spec.rows.split(x).shape[-1] <= _SHORT and felt > 2.0**-10:
        # Two features are +-1 whatever they were, and exact in any dtype, unless eps shortens them.
        x[::2] *= 2 * felt
    x = x.to(specimen.device, dtype)
    weight, bias = (
        None if part is None else part.detach().to(parameters, copy=True) for part in affine.of(specimen.module)
    )
    return Run(x=x, y=specimen.call_in(parameters, x), weight=weight, bias=bias)


def rate(runs: Sequence[Run], spec: NormSpec) -> Rate:
    """How well a program explains runs, of as many outputs each."""
    first, *rest = runs
    found = {DEFINITION: first.match(first.defined(spec))}
    is_narrow = spec.statistics_dtype == "input"
    if not is_narrow or found[DEFINITION] >= _NEAR:
        share = sum([found[DEFINITION], *(run.match(run.defined(spec)) for run in rest)]) / len(runs)
        if share >= _PERFECT or (share < _NEAR and not is_narrow):
            return Rate(share=share, order=DEFINITION)
    for order, expected in outputs(first.x, spec, first.weight, first.bias):
        found[order] = first.match(expected)
    order = max(found, key=lambda each: found[each])
    shares = [found[order]]
    for run in rest:
        in_order = outputs(run.x, spec, run.weight, run.bias, order)
        shares.append(run.match(run.defined(spec) if order == DEFINITION else next(in_order)[1]))
    return Rate(share=sum(shares) / len(runs), order=order)


def share_with_rounded_scale(runs: Sequence[Run], spec: NormSpec) -> float:
    """Share of the outputs that the spec's program gives where it divides by s, rounded, and not by 1/s."""
    rounded = spec.replace(round_rstd=True)
    shares = [
        max(run.match(expected) for _, expected in outputs(run.x, rounded, run.weight, run.bias, ROUNDED_SCALE))
        for run in runs
    ]
    return sum(shares) / len(runs)


def overflows(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> bool:
    """Whether float16 rows of magnitude 1000 come out not finite, or as if they were zero."""
    samples = (16, *shape[1:])
    signs = torch.randn(samples, generator=generator).sign()
    x = (_LARGE * signs * (1 + 0.5 * torch.rand(samples, generator=generator))).to(specimen.device, torch.float16)
    plus, minus = (specimen.call_in(torch.float16, sign * x) for sign in (1, -1))
    if plus is None or minus is None:
        return False
    # A short row may by chance have one sign only, and then little variance.
    return bool((~torch.isfinite(plus)).any() or (plus == minus).double().mean() > 0.5)
