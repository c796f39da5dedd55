"""Checks of the arguments of public functions, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.errors import DtypeError, KindError, ShapeError, UseError
from normkit.spec import NormSpec

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_torch_arguments(
    name: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> None:
    """Check the arguments of torch's functions: a tensor, the sizes of a row, gain and bias of those sizes."""
    if not isinstance(x, Tensor) or x.dtype not in _FLOATING:
        _check_floating(name, "input", x)
    if not isinstance(normalized_shape, (tuple, list)):
        raise KindError(f"{name}: normalized_shape must be a tuple of whole numbers, got {normalized_shape!r}")
    for size in normalized_shape:
        if type(size) is not int and not isinstance(size, (int, torch.SymInt)):
            raise KindError(f"{name}: normalized_shape must be a tuple of whole numbers, got {normalized_shape!r}")
    shape = normalized_shape if isinstance(normalized_shape, tuple) else tuple(normalized_shape)
    if not shape:
        raise ShapeError(f"{name}: normalized_shape must name at least one size, got an empty one")
    if x.shape[-len(shape) :] != shape:
        raise ShapeError(f"{name}: the input must end in normalized_shape {shape}, got shape {tuple(x.shape)}")
    if weight is not None:
        _check_parameter(name, "weight", weight, x, shape)
    if bias is not None:
        _check_parameter(name, "bias", bias, x, shape)


def _check_parameter(name: str, label: str, parameter: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(parameter, Tensor) or parameter.dtype not in _FLOATING:
        _check_floating(name, label, parameter)
    if parameter.shape != shape:
        raise ShapeError(f"{name}: {label} must have normalized_shape {shape}, got shape {tuple(parameter.shape)}")
    _check_device(name, label, parameter, x)


def check_spec_arguments(name: str, x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> None:
    """Check that a tensor has the axes of a spec, and that the parameters of the spec are given."""
    _check_floating(name, "x", x)
    if not isinstance(spec, NormSpec):
        raise KindError(f"{name}: spec must be a NormSpec such as normkit.specs.LLAMA, got {spec!r}")
    _check_axes(name, x, spec)
    for label, given, wanted in (("weight", weight, spec.has_weight), ("bias", bias, spec.has_bias)):
        if (given is not None) != wanted:
            problem = "got none" if given is None else "got one"
            raise ShapeError(f"{name}: the spec says has_{label}={wanted}, {problem}; change the spec or the call")
        if given is not None:
            _check_floating(name, label, given)
            _check_fits(name, label, given, x, spec)
            _check_device(name, label, given, x)


def check_residual(name: str, label: str, x: Tensor, residual: Tensor) -> None:
    """Check that the input can be added to the residual stream."""
    _check_floating(name, "residual", residual)
    if residual.shape != x.shape:
        raise ShapeError(
            f"{name}: residual must have the shape of {label}, {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    _check_device(name, "residual", residual, x)


def check_out(
    name: str, label: str, out: Tensor, x: Tensor, dtype: torch.dtype, inputs: tuple[Tensor | None, ...]
) -> None:
    """Check that the result can be written to a tensor while the inputs are read."""
    if not isinstance(out, Tensor):
        raise KindError(f"{name}: {label} must be a tensor, got {type(out).__name__}")
    if out.shape != x.shape:
        raise ShapeError(f"{name}: {label} must have the result's shape {tuple(x.shape)}, got {tuple(out.shape)}")
    if out.dtype != dtype:
        raise DtypeError(f"{name}: {label} must have the result's dtype {dtype}, got {out.dtype}")
    _check_device(name, label, out, x)
    if torch.is_grad_enabled() and any(given is not None and given.requires_grad for given in (out, *inputs)):
        raise UseError(f"{name}: there is no gradient through {label}; leave it out, or compute under torch.no_grad()")
    if torch._debug_has_internal_overlap(out) == 1:
        raise ShapeError(f"{name}: elements of {label} share memory, as after expand; clone it first")
    for given in inputs:
        if given is None or not share_memory(out, given):
            continue
        # The very same elements are read before they are written.
        same_place = out.data_ptr() == given.data_ptr() and out.stride() == given.stride()
        if not (same_place and out.shape == given.shape and out.dtype == given.dtype):
            raise ShapeError(f"{name}: {label} shares part of its memory with an input; clone one of them first")


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the memory from the first to the last element of a overlaps that of b."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (a_first, a_end), (b_first, b_end) = _extent(a), _extent(b)
    return a_first < b_end and b_first < a_end


def _extent(x: Tensor) -> tuple[int, int]:
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _check_floating(name: str, label: str, given: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise KindError(f"{name}: {label} must be a tensor, got {type(given).__name__}")
    if given.dtype not in _FLOATING:
        raise DtypeError(
            f"{name}: {label} must be float16, bfloat16, float32 or float64, got {given.dtype}; convert it first"
        )


def _check_device(name: str, label: str, given: Tensor, x: Tensor) -> None:
    if given.device != x.device:
        raise UseError(
            f"{name}: {label} must be on the input's device, {x.device}, got {given.device}; move one of them"
        )


def _check_axes(name: str, x: Tensor, spec: NormSpec) -> None:
    needed = 2 if spec.rows.are_channels else len(spec.axes)
    if x.dim() < needed:
        raise ShapeError(f"{name}: axes {spec.axes} need at least {needed} dimensions, got shape {tuple(x.shape)}")
    features = x.shape[1] if spec.axes == "all_but_batch" else x.shape[-1]
    if features % spec.groups:
        raise ShapeError(f"{name}: {features} features do not divide into {spec.groups} groups")


def _check_fits(name: str, label: str, parameter: Tensor, x: Tensor, spec: NormSpec) -> None:
    if spec.rows.are_channels:
        fits = parameter.shape == spec.rows.parameter_sizes(x.shape)
    else:
        sizes = zip(reversed(parameter.shape), reversed(x.shape), strict=False)
        fits = parameter.dim() <= x.dim() and all(size in (1, wanted) for size, wanted in sizes)
    if not fits:
        raise ShapeError(
            f"{name}: {label} of shape {tuple(parameter.shape)} does not fit an input of shape {tuple(x.shape)}"
        )
