"""A compute program as code runs it: in float32 or 16 bits, in each of the usual orders of operation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit import reference
from normkit.spec import NormSpec

DEFINITION = "in float64, rounded where the program rounds"
_HALF = (torch.float16, torch.bfloat16)


class Scale(NamedTuple):
    """One way to come by what divides a row, or multiplies it."""

    words: str
    divisor: Tensor
    factor: Tensor


def outputs(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """The outputs of the spec's program for a 16-bit x, each with a name: by its definition, then in each usual order.

    The order decides the last bit of a float32, and with it one 16-bit rounding in some thousands; it decides many
    more where every step is kept in 16 bits.
    """
    yield DEFINITION, reference.forward(x, spec, weight, bias)
    to = reference.output_dtype(x.dtype, spec, weight, bias)
    work = x.dtype if spec.statistics_dtype == "input" else torch.float32
    gain, shift = _spread(weight, x, spec), _spread(bias, x, spec)
    if gain is not None and spec.weight_placement == "before":
        acting = reference.effective_weight(gain, spec, work)
        x, gain = (x.to(work) * acting.to(work)).to(x.dtype), None
    early = _early(x.dtype, spec, weight)
    if gain is not None:
        gain = reference.effective_weight(gain, spec, early or torch.promote_types(torch.float32, gain.dtype))
    gain, shift = (
        None if part is None else reference.in_affine(part, x.dtype, spec, work if early is None else None)
        for part in (gain, shift)
    )
    rows = reference.to_rows(x.to(work).contiguous(), spec)
    gain, shift = (None if part is None else _rows(part, x, spec) for part in (gain, shift))
    for words, normalized, has_gain in _normalized(x, rows, spec, None if early not in (None, work) else gain):
        y = normalized if early is None or has_gain else normalized.to(early)
        if gain is not None and not has_gain:
            y = gain * y
        y = y if shift is None else y + shift
        yield words, reference.from_rows(y, x, spec).to(to)
    if early is None and spec.weight_placement == "after" and (fused := _fused(x, spec, weight, bias)) is not None:
        yield "by torch's kernel, gain and bias in it", fused.to(to)


def _early(dtype: torch.dtype, spec: NormSpec, weight: Tensor | None) -> torch.dtype | None:
    """The dtype that the normalized row is rounded to before gain and bias, or None."""
    if spec.cast == "weight":
        return weight.dtype if weight is not None and weight.dtype in _HALF else None
    return None if spec.cast == "late" else dtype


def _spread(parameter: Tensor | None, x: Tensor, spec: NormSpec) -> Tensor | None:
    """Gain or bias in the shape that broadcasts against x."""
    if parameter is None or (spec.axes != (1,) and spec.axes != "all_but_batch"):
        return parameter
    return parameter.reshape(-1, *(1,) * (x.dim() - 2))


def _rows(parameter: Tensor, x: Tensor, spec: NormSpec) -> Tensor:
    """Gain or bias in the layout of rows; one number stays one, for it promotes no other dtype."""
    return parameter if parameter.dim() == 0 else reference.to_rows(parameter.expand(x.shape), spec)


def _normalized(x: Tensor, rows: Tensor, spec: NormSpec, gain: Tensor | None) -> Iterator[tuple[str, Tensor, bool]]:
    """The normalized rows in each order; with a gain that may go first, also times the gain (then True)."""
    root_n = math.sqrt(rows.shape[-1]) if spec.multiplier == "sqrt_n" else None
    dtype, wide = x.dtype, rows.dtype == torch.float32

    def finished(values: Tensor) -> Tensor:
        return values if root_n is None else values * root_n

    centred = rows - rows.mean(-1, keepdim=True) if spec.centre_numerator else rows
    for words, divisor, factor in _scales(rows, spec, reference.machine_eps(x, spec)):
        if spec.round_rstd and wide:
            yield f"x * (1 / s), {words}", finished((centred.to(dtype) * factor.to(dtype)).float()), False
            continue
        if not spec.round_rstd:
            yield f"x / s, {words}", finished(centred / divisor), False
            if gain is not None:
                yield f"(gain * x) / s, {words}", finished(gain * centred / divisor), True
        # In 16 bits the factor is a rounded rstd.
        if spec.round_rstd or wide:
            yield f"x * (1 / s), {words}", finished(centred * factor), False
            if gain is not None:
                yield f"(gain * x) * (1 / s), {words}", finished(gain * centred * factor), True
                yield f"x * (gain / s), {words}", finished(centred * (gain * factor)), True
    if wide and not spec.round_rstd and _has_kernel(spec):
        sizes, eps = rows.shape[-1:], reference.machine_eps(x, spec)
        kernel = F.layer_norm(rows, sizes, eps=eps) if spec.centre_numerator else F.rms_norm(rows, sizes, eps=eps)
        yield "by torch's kernel", kernel, False


def _scales(rows: Tensor, spec: NormSpec, eps: float) -> Iterator[Scale]:
    """s in each usual way."""
    deviation = rows - rows.mean(-1, keepdim=True) if spec.centre_statistics else rows
    squares = deviation.square()
    correction = spec.correction
    if spec.reduction == "sum":
        square = squares.sum(-1, keepdim=True)
    elif correction:
        square = squares.sum(-1, keepdim=True) / (rows.shape[-1] - correction)
    else:
        square = squares.mean(-1, keepdim=True)
    ways = [("v as a mean of squares", square)]
    roots: list[tuple[str, Tensor]] = []
    if rows.dtype in _HALF:
        # torch's own var, std and norm are wide inside and round once.
        if spec.centre_statistics and spec.reduction == "mean":
            ways.append(("v by torch.var", rows.var(-1, keepdim=True, correction=correction)))
            roots.append(("sqrt(v) by torch.std", rows.std(-1, keepdim=True, correction=correction)))
        else:
            norm = torch.linalg.vector_norm(deviation, dim=-1, keepdim=True)
            divisor = 1 if spec.reduction == "sum" else rows.shape[-1] - correction
            precise = deviation.float().square().sum(-1, keepdim=True) / divisor
            ways.append(("v rounded once", precise.to(rows.dtype)))
            roots.append(("sqrt(v) by torch.norm", norm if spec.reduction == "sum" else norm / math.sqrt(divisor)))
    if spec.eps_placement == "inside":
        for words, v in ways:
            s = (v + eps).sqrt()
            yield Scale(words, s, (v + eps).rsqrt())
            if rows.dtype in _HALF:
                yield Scale(f"{words}, s rounded", s, s.reciprocal())
        return
    for words, root in [*((words, v.sqrt()) for words, v in ways), *roots]:
        s = root + eps if spec.eps_placement == "outside" else root.clamp_min(eps)
        yield Scale(words, s, s.reciprocal())


def _has_kernel(spec: NormSpec) -> bool:
    """torch has a function for this formula."""
    plain = (spec.eps_placement, spec.correction, spec.reduction, spec.multiplier) == ("inside", 0, "mean", "one")
    return plain and spec.centre_numerator == spec.centre_statistics


def _fused(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The output of torch's own norm in float32 with gain and bias; None if torch has no such norm."""
    if not _has_kernel(spec) or spec.axes == (1,):
        return None
    wide, eps = x.float(), reference.machine_eps(x, spec)
    gain = None if weight is None else reference.effective_weight(weight, spec, torch.float32).float()
    shift = None if bias is None else bias.float()
    over_channels = spec.axes == "all_but_batch"
    sizes = x.shape[1:2] if over_channels else x.shape[-len(spec.axes) :]
    if any(part is not None and part.shape != sizes for part in (gain, shift)):
        return None
    if over_channels:
        return F.group_norm(wide, spec.groups, gain, shift, eps) if spec.centre_numerator else None
    if spec.groups > 1:
        return None
    if spec.centre_numerator:
        return F.layer_norm(wide, sizes, gain, shift, eps)
    return None if shift is not None else F.rms_norm(wide, sizes, gain, eps)
