"""The definition: every NormSpec, forward and closed-form backward, in plain torch.

Everything else is tested against this file. Arithmetic is done in float64 and rounded only where
the spec's own cast program rounds, so a float32 or 16-bit result is that program's correctly rounded
value; with statistics in the input's own 16-bit dtype every step rounds there, as such code does.
Only differentiable out-of-place operations are used: autograd, double backward, forward-mode
and `torch.func` transforms hold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.spec import NormSpec

_HALF = (torch.float16, torch.bfloat16)


class Statistics(NamedTuple):
    """What a norm knows of each row; shapes end in (groups, 1).

    Attributes:
        mean: Mean of the row, also where the spec does not use it.
        scale: s, the number the row is divided by, with eps and without the multiplier.
    """

    mean: Tensor
    scale: Tensor


def arithmetic_dtype(x: Tensor, spec: NormSpec) -> torch.dtype:
    """float64, unless the spec keeps a 16-bit input's statistics in 16 bits."""
    if spec.statistics_dtype == "input" and x.dtype in _HALF:
        return x.dtype
    # MPS has no float64; float32 is the widest it offers.
    return torch.float32 if x.device.type == "mps" else torch.float64


def machine_eps(x: Tensor, spec: NormSpec) -> float:
    """The eps of a spec for this input: eps=None is the machine epsilon of torch's arithmetic type."""
    if spec.eps is not None:
        return spec.eps
    return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps


def unrounded(spec: NormSpec, x: Tensor) -> NormSpec:
    """The same formula with nothing rounded, for x in float64 and a gain that already holds its offset."""
    return spec.replace(
        cast="late",
        statistics_dtype="float32",
        round_rstd=False,
        output_dtype="input",
        weight_offset=0.0,
        eps=machine_eps(x, spec),
    )


def to_rows(x: Tensor, spec: NormSpec) -> Tensor:
    """x as rows of shape (..., groups, m): one row is what shares one set of statistics."""
    if spec.axes == "all_but_batch":
        return x.reshape(x.shape[0], spec.groups, math.prod(x.shape[1:]) // spec.groups)
    if spec.axes == (1,):
        x = x.movedim(1, -1)
    kept = x.dim() - len(spec.axes)
    size = math.prod(x.shape[kept:])
    return x.reshape(*x.shape[:kept], spec.groups, size // spec.groups)


def from_rows(rows: Tensor, x: Tensor, spec: NormSpec) -> Tensor:
    """The inverse of `to_rows`: rows in the layout of x."""
    if spec.axes == (1,):
        return rows.reshape(x.movedim(1, -1).shape).movedim(-1, 1)
    return rows.reshape(x.shape)


def statistics(rows: Tensor, spec: NormSpec, eps: float | Tensor) -> Statistics:
    """Mean and scale of rows of shape (..., m), in the rows' dtype.

    scale = sqrt(v + eps), sqrt(v) + eps or max(sqrt(v), eps) for eps inside, outside or as a clamp;
    v = sum(d**2) / (m - correction), d = x - mean(x) or x.
    """
    _, deviation = _centred(rows, spec)
    return Statistics(rows.mean(-1, keepdim=True), _scale(rows, deviation, spec, eps))


def _centred(rows: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """x - m and d: what is scaled and what the scale is taken of."""
    centred = rows
    if spec.centre_numerator or spec.centre_statistics:
        centred = rows - rows.mean(-1, keepdim=True)
        if rows.dtype not in _HALF:
            # A mean is rounded in proportion to itself; where it dwarfs the deviations, what it leaves counts.
            centred = centred - centred.mean(-1, keepdim=True)
    return centred if spec.centre_numerator else rows, centred if spec.centre_statistics else rows


def _square(deviation: Tensor, spec: NormSpec) -> Tensor:
    """v: the sum of squares, or their mean."""
    squares = deviation.square()
    if spec.reduction == "mean" and spec.correction == 0:
        return squares.mean(-1, keepdim=True)
    total = squares.sum(-1, keepdim=True)
    return total if spec.reduction == "sum" else total / (deviation.shape[-1] - 1)


def _root(deviation: Tensor, spec: NormSpec) -> Tensor:
    """sqrt(v), with the gradient 0 where v = 0: there the root has a kink and the norm itself is smooth."""
    square = _square(deviation, spec)
    is_zero = square == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, square).sqrt())


def _scale(rows: Tensor, deviation: Tensor, spec: NormSpec, eps: float | Tensor) -> Tensor:
    """s, the number each row is divided by."""
    inside = spec.eps_placement == "inside"
    quantity = _square if inside else _root
    if rows.dtype in _HALF and (spec.centre_statistics or not inside):
        # Code that stays in 16 bits calls `Tensor.var`, `std` or `norm`, which round once.
        value = quantity(_centred(rows.float(), spec)[1], spec).to(rows.dtype)
    else:
        value = quantity(deviation, spec)
    if inside:
        return (value + eps).sqrt()
    return value + eps if spec.eps_placement == "outside" else value.clamp_min(eps)


def effective_weight(weight: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """weight + weight_offset, added where the spec adds it, in `dtype` (parameter dtype if that is where)."""
    if not spec.weight_offset:
        return weight
    if spec.offset_dtype == "parameter":
        return weight + spec.weight_offset
    return weight.to(dtype) + spec.weight_offset


def forward(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    input_dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalize x as the spec says, rounding exactly where the spec rounds.

    y = multiplier * (x - m) / s * (weight + weight_offset) + bias; see `NormSpec` for m and s.

    Args:
        x: Input of shape (..., n), or (N, C, ...) if the spec's axes are the channels.
        spec: The conventions.
        weight: Gain, broadcast on the right against x (along axis 1 for channel axes).
        bias: Bias, likewise.
        input_dtype: What the spec's casts take for the input's dtype; x's own unless given.

    Returns:
        Tensor of x's shape, in the spec's output dtype.
    """
    wide = arithmetic_dtype(x, spec)
    dtype = input_dtype or x.dtype
    gain = None if weight is None else _along_channels(weight, x, spec)
    shift = None if bias is None else _along_channels(bias, x, spec)
    if gain is not None and spec.weight_placement == "before":
        # Such code rounds the scaled row to the input's dtype before it normalizes.
        x = (x.to(wide) * effective_weight(gain, spec, wide).to(wide)).to(x.dtype)
        gain = None
    return _round_and_scale(_normalize(x, spec, wide, dtype), dtype, spec, gain, shift)


def add_forward(
    x: Tensor, residual: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add x to a residual stream, and normalize what the stream now holds.

    new = x + residual, added in float32 (or wider) and rounded to the residual's dtype; y = `forward` of new, with
    casts to the input's dtype that go to the dtype of x.

    Returns:
        y and new, of x's shape.
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    new_residual = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return forward(new_residual, spec, weight, bias, input_dtype=x.dtype), new_residual


def _normalize(x: Tensor, spec: NormSpec, wide: torch.dtype, dtype: torch.dtype) -> Tensor:
    """multiplier * (x - m) / s, in the wide dtype."""
    # Contiguous, so that sums are taken in the same order whatever the strides of x.
    rows = to_rows(x.to(wide).contiguous(), spec)
    numerator, deviation = _centred(rows, spec)
    scale = _scale(rows, deviation, spec, machine_eps(x, spec))
    if spec.round_rstd and dtype in _HALF:
        normalized = (numerator.to(dtype) * scale.reciprocal().to(dtype)).to(wide)
    else:
        normalized = numerator / scale
    if spec.multiplier == "sqrt_n":
        normalized = normalized * math.sqrt(rows.shape[-1])
    return from_rows(normalized, x, spec)


def _round_and_scale(
    normalized: Tensor, dtype: torch.dtype, spec: NormSpec, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The affine part and the spec's casts."""
    early = None if spec.cast in ("late", "weight") else dtype
    if spec.cast == "weight" and weight is not None and weight.dtype in _HALF:
        early = weight.dtype
    y = normalized if early is None else normalized.to(early)
    # After an early cast the affine part is ordinary promoted arithmetic; before a late one it is wide.
    work = normalized.dtype if early is None else None
    if weight is not None:
        # An offset "in float32" leaves a float32 gain, whatever width the reference itself computes in.
        gain = effective_weight(weight, spec, work or torch.promote_types(torch.float32, weight.dtype))
        y = in_affine(gain, dtype, spec, work) * y
    if bias is not None:
        y = y + in_affine(bias, dtype, spec, work)
    return y.to(output_dtype(dtype, spec, weight, bias))


def in_affine(part: Tensor, dtype: torch.dtype, spec: NormSpec, work: torch.dtype | None) -> Tensor:
    """Gain or bias in the dtype it acts in: `work`, or where the row was rounded early (None) as the spec says."""
    if work is None and spec.cast == "input":
        part = part.to(dtype)
    if work is None and spec.output_dtype == "float32":
        work = torch.promote_types(torch.float32, part.dtype)
    return part if work is None else part.to(work)


def output_dtype(input_dtype: torch.dtype, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """dtype of y for an input of this dtype and these parameters."""
    if spec.output_dtype == "weight" and weight is not None:
        return weight.dtype
    if spec.output_dtype == "float32":
        return torch.promote_types(input_dtype, torch.float32)
    dtype = input_dtype
    if spec.output_dtype == "promote":
        for parameter in (weight, bias):
            dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
    return dtype


def _along_channels(parameter: Tensor, x: Tensor, spec: NormSpec) -> Tensor:
    """Gain or bias in the shape that broadcasts against x."""
    if spec.axes != (1,) and spec.axes != "all_but_batch":
        return parameter
    return parameter.reshape(-1, *(1,) * (x.dim() - 2))


class Gradients(NamedTuple):
    """Gradients of a norm, each in the dtype of what it belongs to; None where there is no parameter."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


def backward(
    dy: Tensor,
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    addend: Tensor | None = None,
) -> Gradients:
    """The gradients of `forward` in closed form, every cast taken as the identity.

    With h = multiplier * dy * (weight + weight_offset), c = x - m, d the deviation under the root:
    dx = P(h / s) - d * (2 / (n - correction)) * k * sum(h * c) / s**2, where P subtracts the mean if
    `centre_numerator` and k = ds/dv is 1 / (2 s) inside, 1 / (2 sqrt(v)) outside, and that or 0 for a
    clamp. dweight sums dy times the unrounded normalized row; dbias sums dy.

    Args:
        dy: Gradient of the output, of x's shape.
        x: Input, as in `forward`.
        spec: The conventions.
        weight: Gain, as in `forward`.
        bias: Bias, as in `forward`; only its shape and dtype matter.
        addend: What reaches x from elsewhere, added to dx before dx is rounded; of x's shape.
    """
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    dy_wide, x_wide = dy.to(wide).contiguous(), x.to(wide).contiguous()
    gain = torch.ones((), dtype=wide, device=x.device)
    if weight is not None:
        gain = effective_weight(_along_channels(weight, x, spec), spec, wide).to(wide)
    before = spec.weight_placement == "before"
    inner, upstream = (x_wide * gain, dy_wide) if before else (x_wide, dy_wide * gain)
    normalized, d_inner = _backward_rows(upstream, inner, spec, machine_eps(x, spec))
    dx, dgain = (d_inner * gain, d_inner * x_wide) if before else (d_inner, dy_wide * normalized)
    if addend is not None:
        dx = dx + addend.to(wide)
    return Gradients(
        dx.to(x.dtype),
        None if weight is None else _sum_to(dgain, weight, x, spec),
        None if bias is None else _sum_to(dy_wide, bias, x, spec),
    )


def _backward_rows(h: Tensor, x: Tensor, spec: NormSpec, eps: float) -> tuple[Tensor, Tensor]:
    """The normalized row and the gradient through (x - m) / s, both in the layout of x."""
    rows, h_rows = to_rows(x, spec), to_rows(h, spec)
    if spec.multiplier == "sqrt_n":
        h_rows = h_rows * math.sqrt(rows.shape[-1])
    numerator, deviation = _centred(rows, spec)
    scale = _scale(rows, deviation, spec, eps)
    divisor = 1 if spec.reduction == "sum" else rows.shape[-1] - spec.correction
    root = _root(deviation, spec)
    match spec.eps_placement:
        case "inside":
            slope = 0.5 / scale
        case "outside":
            slope = torch.where(root == 0, 0.0, 0.5 / root)
        case "clamp":
            slope = torch.where(root < eps, 0.0, 0.5 / root)
    direct = h_rows / scale
    if spec.centre_numerator:
        direct = direct - direct.mean(-1, keepdim=True)
    through_scale = 2.0 * slope * (h_rows * numerator).sum(-1, keepdim=True) / scale.square() / divisor
    normalized = numerator / scale
    if spec.multiplier == "sqrt_n":
        normalized = normalized * math.sqrt(rows.shape[-1])
    return from_rows(normalized, x, spec), from_rows(direct - deviation * through_scale, x, spec)


def _sum_to(gradient: Tensor, parameter: Tensor, x: Tensor, spec: NormSpec) -> Tensor:
    """Sum a gradient of x's shape over everything the parameter was broadcast along."""
    aligned = _along_channels(parameter, x, spec)
    return gradient.sum_to_size(aligned.shape).reshape(parameter.shape).to(parameter.dtype)
