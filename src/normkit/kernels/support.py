"""Which norms any kernel computes, and in which dtype: conditions on conventions, sizes and dtypes alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.kernels import signatures
from normkit.spec import NormSpec

_MOST_AXES = 2**signatures.BITS.axes - 1


def supports_spec(spec: NormSpec) -> str | None:
    """Why no kernel computes norms of these conventions; None if a kernel does."""
    if spec.rows.no_kernel is None and len(spec.axes) > _MOST_AXES:
        return f"rows of more than {_MOST_AXES} axes"
    reasons = (each.no_kernel for each in (spec.rows, spec.centring, spec.gain, spec.casts))
    return next((reason for reason in reasons if reason is not None), None)


def supports_sizes(axes: int, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Why no kernel computes rows of the last `axes` axes of x with these parameters; None if a kernel does."""
    size = math.prod(x.shape[-axes:])
    if size == 0:
        return "empty rows"
    for parameter in (weight, bias):
        if parameter is None:
            continue
        if parameter.numel() != size or parameter.shape[-axes:] != x.shape[-axes:]:
            return "parameters that are not one number a feature"
    return None


def output_dtype(output: int, dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None) -> torch.dtype:
    """The dtype of y for an input of `dtype`; `output` as in `signatures.Conventions`."""
    if output == 2 and weight is not None:
        return weight
    if output == 1:
        for parameter in (weight, bias):
            dtype = dtype if parameter is None else torch.promote_types(dtype, parameter)
    return dtype
