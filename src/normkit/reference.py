"""The definition: every NormSpec, forward and closed-form backward, in plain torch.

Everything else is tested against this file. Arithmetic is done in float64 and rounded only where
the spec's own cast program rounds, so a float32 or 16-bit result is that program's correctly rounded
value; with statistics in the input's own 16-bit dtype every step rounds there, as such code does.
Only differentiable out-of-place operations are used: autograd, double backward, forward-mode
and `torch.func` transforms hold.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.conventions.eps import eps_in
from normkit.spec import NormSpec

HALF = (torch.bfloat16, torch.float16)
"""The 16-bit dtypes of norms."""


class Statistics(NamedTuple):
    """The statistics of each row; shapes end in (groups, 1)."""

    mean: Tensor
    """The mean of the row, also if the spec does not use it."""
    scale: Tensor
    """s, the number the row is divided by, with eps and without the factor sqrt(n)."""


def machine_eps(x: Tensor, spec: NormSpec) -> float:
    """The eps of a spec for this input: eps=None is the machine epsilon of torch's arithmetic type."""
    return eps_in(x.dtype, spec.eps)


def unrounded(spec: NormSpec, x: Tensor) -> NormSpec:
    """The same formula with nothing rounded, for x in float64 and a gain that already holds its offset."""
    return spec.replace(
        cast="late",
        statistics_dtype="float32",
        round_rstd=False,
        output_dtype="input",
        eps=machine_eps(x, spec),
        **dataclasses.replace(spec.gain, offset=0.0).conventions(),
    )


def to_rows(x: Tensor, spec: NormSpec) -> Tensor:
    """x as rows of shape (..., groups, m): one row is what shares one set of statistics."""
    return spec.rows.split(x)


def from_rows(rows: Tensor, x: Tensor, spec: NormSpec) -> Tensor:
    """The inverse of `to_rows`: rows in the layout of x."""
    return spec.rows.joined(rows, x)


def statistics(rows: Tensor, spec: NormSpec, eps: float | Tensor) -> Statistics:
    """Mean and scale of rows of shape (..., m), in the rows' dtype.

    scale = sqrt(v + eps), sqrt(v) + eps or max(sqrt(v), eps) for eps inside, outside or as a clamp;
    v = sum(d**2) / (m - correction), d = x - mean(x) or x.
    """
    _, deviation = spec.centring.split(rows)
    return Statistics(rows.mean(-1, keepdim=True), _scale(rows, deviation, spec, eps))


def _root(deviation: Tensor, spec: NormSpec) -> Tensor:
    """sqrt(v), with the gradient 0 where v = 0: there the root has a kink and the norm itself is smooth."""
    square = spec.divisor.of_squares(deviation.square())
    is_zero = square == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, square).sqrt())


def _scale(rows: Tensor, deviation: Tensor, spec: NormSpec, eps: float | Tensor) -> Tensor:
    """s, the number each row is divided by."""
    takes_root = spec.placement.power == 1
    if rows.dtype in HALF and (spec.centre_statistics or takes_root):
        # Code that stays in 16 bits calls `Tensor.var`, `std` or `norm`, which round once.
        _, wide = spec.centring.split(rows.float())
        value = (_root(wide, spec) if takes_root else spec.divisor.of_squares(wide.square())).to(rows.dtype)
    else:
        value = _root(deviation, spec) if takes_root else spec.divisor.of_squares(deviation.square())
    return spec.placement.scale(value, eps)


def effective_weight(weight: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """weight + offset, added where the spec adds it, in `dtype` (parameter dtype if that is where)."""
    return spec.gain.effective(weight, dtype)


def forward(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    input_dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalize x as the spec says, rounding exactly where the spec rounds.

    y = f * (x - m) / s * g + bias with f = 1 or sqrt(n) and the effective gain g; see `NormSpec` for m and s.

    Args:
        x: Input of shape (..., n), or (N, C, ...) if the spec's axes are the channels.
        spec: The conventions.
        weight: Gain, broadcast on the right against x (along axis 1 for channel axes).
        bias: Bias, likewise.
        input_dtype: What the spec's casts take for the input's dtype; x's own unless given.

    Returns:
        Tensor of x's shape, in the spec's output dtype.
    """
    dtype = input_dtype or x.dtype
    return finished(normalized(x, spec, weight, dtype), dtype, spec, weight, bias)


def add_forward(
    x: Tensor, residual: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add x to a residual stream, and normalize what the stream now holds.

    new = `added(x, residual)`; y = `forward` of new, with casts to the input's dtype that go to the dtype of x.

    Returns:
        y and new, of x's shape.
    """
    new_residual = added(x, residual)
    return forward(new_residual, spec, weight, bias, input_dtype=x.dtype), new_residual


def added(x: Tensor, residual: Tensor) -> Tensor:
    """x + residual, added in float32 (or wider) and rounded to the residual's dtype."""
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    return (x.to(wide) + residual.to(wide)).to(residual.dtype)


def normalized(x: Tensor, spec: NormSpec, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The first part of `forward`: f * (x - m) / s, in the dtype of its arithmetic. Neither cast nor output count."""
    wide = spec.casts.arithmetic(x)
    if weight is not None and spec.gain.is_before:
        # Such code rounds the scaled row to the input's dtype before it normalizes.
        gain = spec.gain.effective(spec.rows.aligned(weight, x), wide)
        x = (x.to(wide) * gain.to(wide)).to(x.dtype)
    # Contiguous, so that sums are taken in the same order whatever the strides of x.
    rows = spec.rows.split(x.to(wide).contiguous())
    numerator, deviation = spec.centring.split(rows)
    scale = _scale(rows, deviation, spec, machine_eps(x, spec))
    if spec.round_rstd and dtype in HALF:
        rows = (numerator.to(dtype) * scale.reciprocal().to(dtype)).to(wide)
    else:
        rows = numerator / scale
    return spec.rows.joined(spec.divisor.multiplied(rows), x)


def finished(
    normalized: Tensor, dtype: torch.dtype, spec: NormSpec, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The second part of `forward`, for an input of this dtype: gain and bias, and the spec's casts."""
    weight = None if weight is None or spec.gain.is_before else spec.rows.aligned(weight, normalized)
    bias = None if bias is None else spec.rows.aligned(bias, normalized)
    casts = spec.casts
    early = casts.early(dtype, weight)
    y = normalized if early is None else normalized.to(early)
    # After an early cast the affine part is ordinary promoted arithmetic; before a late one it is wide.
    work = normalized.dtype if early is None else None
    if weight is not None:
        # An offset "in float32" leaves a float32 gain, whatever width the reference itself computes in.
        gain = spec.gain.effective(weight, work or torch.promote_types(torch.float32, weight.dtype))
        y = casts.parameter(gain, dtype, work) * y
    if bias is not None:
        y = y + casts.parameter(bias, dtype, work)
    return y.to(casts.output_dtype(dtype, weight, bias))


def output_dtype(input_dtype: torch.dtype, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """dtype of y for an input of this dtype and these parameters."""
    return spec.casts.output_dtype(input_dtype, weight, bias)


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

    With h = f * g * dy in the notation of `forward`, c = x - m, d the deviation under the root:
    dx = P(h / s) - d * (2 / (n - correction)) * k * sum(h * c) / s**2, where P subtracts the mean if
    the numerator is centred, and k = ds/dv is 1 / (2 s) inside, 1 / (2 sqrt(v)) outside, and that or 0 for a
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
        gain = spec.gain.effective(spec.rows.aligned(weight, x), wide).to(wide)
    before = spec.gain.is_before
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
    rows, h_rows = spec.rows.split(x), spec.divisor.multiplied(spec.rows.split(h))
    numerator, deviation = spec.centring.split(rows)
    scale, root = _scale(rows, deviation, spec, eps), _root(deviation, spec)
    quotient, is_flat = spec.placement.slope(root, scale, eps)
    slope = torch.where(is_flat, 0.0, 0.5 / quotient)
    direct = spec.centring.projected(h_rows / scale)
    through_scale = 2.0 * slope * (h_rows * numerator).sum(-1, keepdim=True) / scale.square()
    through_scale = through_scale / spec.divisor.count(rows.shape[-1])
    normalized = spec.divisor.multiplied(numerator / scale)
    return spec.rows.joined(normalized, x), spec.rows.joined(direct - deviation * through_scale, x)


def _sum_to(gradient: Tensor, parameter: Tensor, x: Tensor, spec: NormSpec) -> Tensor:
    """Sum a gradient of x's shape over everything the parameter was broadcast along."""
    aligned = spec.rows.aligned(parameter, x)
    return gradient.sum_to_size(aligned.shape).reshape(parameter.shape).to(parameter.dtype)
