"""Normalization as functions: arguments checked once, here, then computed.

`layer_norm` and `rms_norm` have the signatures of `torch.nn.functional`; `normalize` takes any spec.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from normkit import reference, specs
from normkit.errors import DtypeError, KindError, ShapeError
from normkit.spec import NormSpec

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def layer_norm(
    input: Tensor,  # torch's own name, so that keyword calls keep working
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Centre each row, divide it by its standard deviation, apply gain and bias.

    y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, var with the divisor n.

    Args:
        input: Tensor of shape (..., *normalized_shape), any floating dtype.
        normalized_shape: The trailing sizes that make up one row.
        weight: Gain of shape `normalized_shape`, or None.
        bias: Bias of shape `normalized_shape`, or None.
        eps: Added to the variance, in units of x squared.

    Returns:
        Tensor of the input's shape and dtype.

    Raises:
        ShapeError: If the shapes do not fit (a RuntimeError, as in torch).
        DtypeError: If a tensor is not floating point (likewise).
        KindError: If an argument is no tensor, shape or number at all (a TypeError, as in torch).
        SpecError: If eps is not finite.

    Example:
        >>> layer_norm(torch.tensor([1.0, 2.0, 3.0, 6.0]), (4,))
        tensor([-1.0690, -0.5345,  0.0000,  1.6036])

    Source:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 3.
    """
    _check_number("layer_norm", eps)
    _check_torch_arguments("layer_norm", input, normalized_shape, weight, bias)
    spec = specs.TORCH_LAYER_NORM.replace(
        eps=eps,
        axes=tuple(range(-len(normalized_shape), 0)),
        has_weight=weight is not None,
        has_bias=bias is not None,
    )
    return reference.forward(input, spec, weight, bias)


def rms_norm(
    input: Tensor,  # torch's own name, so that keyword calls keep working
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Divide each row by its root mean square and apply a gain.

    y = weight * x / sqrt(mean(x**2) + eps).

    Args:
        input: Tensor of shape (..., *normalized_shape), any floating dtype.
        normalized_shape: The trailing sizes that make up one row.
        weight: Gain of shape `normalized_shape`, or None.
        eps: Added to the mean square, in units of x squared; None is 2**-23 (2**-52 for float64 input).

    Returns:
        Tensor of the input's shape and dtype.

    Raises:
        ShapeError: If the shapes do not fit (a RuntimeError, as in torch).
        DtypeError: If a tensor is not floating point (likewise).
        KindError: If an argument is no tensor, shape or number at all (a TypeError, as in torch).
        SpecError: If eps is not finite.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), (2,), eps=0.0)
        tensor([0.8485, 1.1314])

    Source:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    if eps is not None:
        _check_number("rms_norm", eps)
    _check_torch_arguments("rms_norm", input, normalized_shape, weight, None)
    spec = specs.TORCH_RMS_NORM.replace(
        eps=eps, axes=tuple(range(-len(normalized_shape), 0)), has_weight=weight is not None
    )
    return reference.forward(input, spec, weight)


def normalize(
    x: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Normalize by any convention.

    y = multiplier * (x - m) / s * (weight + weight_offset) + bias; `NormSpec` defines m and s, and
    `print(spec)` shows the formula of one.

    Args:
        x: Tensor of shape (..., n); (N, C, ...) if the spec's axes are the channels.
        spec: The conventions.
        weight: Gain, broadcast on the right against x (of shape (C,) for channel axes); required if
            and only if `spec.has_weight`.
        bias: Bias, likewise with `spec.has_bias`.
        out: Written to and returned, if given; of the result's shape and dtype.

    Returns:
        Tensor of x's shape, in the spec's output dtype.

    Raises:
        ShapeError: If sizes do not fit, or a parameter is missing or superfluous.
        DtypeError: If a tensor is not floating point, or out is not of the result's dtype.
        KindError: If x, weight or bias is no tensor, or spec no NormSpec.

    Example:
        >>> from normkit import specs
        >>> normalize(torch.tensor([3.0, 4.0]), specs.L2_NORM)
        tensor([0.6000, 0.8000])
    """
    _check_floating("normalize", "x", x)
    if not isinstance(spec, NormSpec):
        raise KindError(f"normalize: spec must be a NormSpec such as normkit.specs.LLAMA, got {spec!r}")
    _check_axes(x, spec)
    for name, given, wanted in (("weight", weight, spec.has_weight), ("bias", bias, spec.has_bias)):
        if (given is not None) != wanted:
            problem = "got none" if given is None else "got one"
            raise ShapeError(f"normalize: the spec says has_{name}={wanted}, {problem}; change the spec or the call")
        if given is not None:
            _check_floating("normalize", name, given)
            _check_fits(name, given, x, spec)
    y = reference.forward(x, spec, weight, bias)
    if out is None:
        return y
    if out.shape != y.shape:
        raise ShapeError(f"normalize: out must have the result's shape {tuple(y.shape)}, got {tuple(out.shape)}")
    if out.dtype != y.dtype:
        raise DtypeError(f"normalize: out must have the result's dtype {y.dtype}, got {out.dtype}")
    return out.copy_(y)


def _check_torch_arguments(
    name: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> None:
    _check_floating(name, "input", x)
    is_sequence = isinstance(normalized_shape, (tuple, list))
    if not is_sequence or not all(isinstance(size, (int, torch.SymInt)) for size in normalized_shape):
        raise KindError(f"{name}: normalized_shape must be a tuple of whole numbers, got {normalized_shape!r}")
    shape = tuple(normalized_shape)
    if not shape:
        raise ShapeError(f"{name}: normalized_shape must name at least one size, got an empty one")
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(f"{name}: the input must end in normalized_shape {shape}, got shape {tuple(x.shape)}")
    for label, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        _check_floating(name, label, parameter)
        if tuple(parameter.shape) != shape:
            raise ShapeError(f"{name}: {label} must have normalized_shape {shape}, got shape {tuple(parameter.shape)}")


def _check_number(name: str, eps: object) -> None:
    if not isinstance(eps, numbers.Real):
        raise KindError(f"{name}: eps must be a number, got {eps!r}")


def _check_floating(name: str, label: str, given: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise KindError(f"{name}: {label} must be a tensor, got {type(given).__name__}")
    if given.dtype not in _FLOATING:
        raise DtypeError(
            f"{name}: {label} must be float16, bfloat16, float32 or float64, got {given.dtype}; convert it first"
        )


def _check_axes(x: Tensor, spec: NormSpec) -> None:
    needed = 2 if spec.axes in ((1,), "all_but_batch") else len(spec.axes)
    if x.dim() < needed:
        raise ShapeError(f"normalize: axes {spec.axes} need at least {needed} dimensions, got shape {tuple(x.shape)}")
    features = x.shape[1] if spec.axes == "all_but_batch" else x.shape[-1]
    if features % spec.groups:
        raise ShapeError(f"normalize: {features} features do not divide into {spec.groups} groups")


def _check_fits(name: str, parameter: Tensor, x: Tensor, spec: NormSpec) -> None:
    if spec.axes in ((1,), "all_but_batch"):
        fits = parameter.dim() == 1 and x.dim() > 1 and parameter.shape[0] == x.shape[1]
    else:
        sizes = zip(reversed(parameter.shape), reversed(x.shape), strict=False)
        fits = parameter.dim() <= x.dim() and all(size in (1, wanted) for size, wanted in sizes)
    if not fits:
        raise ShapeError(
            f"normalize: {name} of shape {tuple(parameter.shape)} does not fit an input of shape {tuple(x.shape)}"
        )
