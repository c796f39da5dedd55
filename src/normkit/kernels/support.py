"""Which norms any kernel computes, and in which dtype: what depends on conventions, sizes and dtypes alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.kernels import signatures
from normkit.spec import NormSpec

_MOST_AXES = 2**signatures.BITS.axes - 1


def supports_spec(spec: NormSpec) -> str | None:
    """Why no kernel computes norms of these conventions; None if some do."""
    if spec.axes == (1,) or spec.axes == "all_but_batch" or spec.groups > 1:
        return "rows that are not the trailing axes"
    if len(spec.axes) > _MOST_AXES:
        return f"rows of more than {_MOST_AXES} axes"
    if spec.centre_numerator != spec.centre_statistics:
        return "centring of the numerator or of the statistics alone"
    if spec.weight_placement == "before":
        return "a gain before the norm"
    if spec.cast == "input":
        return "a gain that is rounded to the input's dtype"
    if spec.output_dtype == "float32":
        return "an output that is always float32"
    return None


def supports_sizes(axes: int, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Why no kernel computes rows of the last `axes` axes of x with these parameters; None if some do."""
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
    """dtype of y for an input of `dtype`; `output` is that of `signatures.Conventions`."""
    if output == 2 and weight is not None:
        return weight
    if output == 1:
        for parameter in (weight, bias):
            dtype = dtype if parameter is None else torch.promote_types(dtype, parameter)
    return dtype
