"""Normalization as functions: arguments checked once, here, then computed.

`layer_norm` and `rms_norm` have the signatures of `torch.nn.functional`; `normalize` takes any spec.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from normkit import reference, specs
from normkit.errors import DtypeError, ShapeError
from normkit.spec import NormSpec


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
        DtypeError: If the input is not floating point (likewise).

    Example:
        >>> layer_norm(torch.tensor([1.0, 2.0, 3.0, 6.0]), (4,))
        tensor([-1.0690, -0.5345,  0.0000,  1.6036])

    Source:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 3.
    """
    spec = specs.TORCH_LAYER_NORM.replace(
        eps=eps, axes=_trailing_axes(normalized_shape), has_weight=weight is not None, has_bias=bias is not None
    )
    _check_torch_arguments("layer_norm", input, normalized_shape, weight, bias)
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
        DtypeError: If the input is not floating point (likewise).

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), (2,), eps=0.0)
        tensor([0.8485, 1.1314])

    Source:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    spec = specs.TORCH_RMS_NORM.replace(eps=eps, axes=_trailing_axes(normalized_shape), has_weight=weight is not None)
    _check_torch_arguments("rms_norm", input, normalized_shape, weight, None)
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
        DtypeError: If x is not floating point.

    Example:
        >>> from normkit import specs
        >>> normalize(torch.tensor([3.0, 4.0]), specs.L2_NORM)
        tensor([0.6000, 0.8000])
    """
    _check_floating("normalize", x)
    for name, given, wanted in (("weight", weight, spec.has_weight), ("bias", bias, spec.has_bias)):
        if (given is not None) != wanted:
            problem = "got none" if wanted else f"got one of shape {tuple(given.shape)}"  # type: ignore[union-attr]
            raise ShapeError(f"normalize: the spec says has_{name}={wanted}, {problem}; change the spec or the call")
        if given is not None:
            _check_parameter(name, given, x, spec)
    _check_axes(x, spec)
    y = reference.forward(x, spec, weight, bias)
    if out is None:
        return y
    if out.shape != y.shape or out.dtype != y.dtype:
        raise ShapeError(
            f"normalize: out must be {y.dtype} of shape {tuple(y.shape)}, got {out.dtype} of shape {tuple(out.shape)}"
        )
    return out.copy_(y)


def _trailing_axes(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    if len(normalized_shape) < 1:
        raise ShapeError("normalized_shape must name at least one size, got an empty one")
    return tuple(range(-len(normalized_shape), 0))


def _check_torch_arguments(
    name: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> None:
    _check_floating(name, x)
    shape = tuple(normalized_shape)
    if x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape:
        raise ShapeError(
            f"{name}: the input must end in normalized_shape {shape}, got an input of shape {tuple(x.shape)}"
        )
    for label, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and tuple(parameter.shape) != shape:
            raise ShapeError(
                f"{name}: {label} must have the normalized_shape {shape}, got shape {tuple(parameter.shape)}"
            )


def _check_floating(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise DtypeError(
            f"{name}: the input must be float16, bfloat16, float32 or float64, got {x.dtype}; convert it first"
        )


def _check_axes(x: Tensor, spec: NormSpec) -> None:
    needed = 2 if spec.axes in ((1,), "all_but_batch") else len(spec.axes)
    if x.dim() < needed:
        raise ShapeError(f"normalize: axes {spec.axes} need at least {needed} dimensions, got shape {tuple(x.shape)}")
    features = x.shape[1] if spec.axes == "all_but_batch" else x.shape[-1]
    if features % spec.groups:
        raise ShapeError(f"normalize: {features} features do not divide into {spec.groups} groups")


def _check_parameter(name: str, parameter: Tensor, x: Tensor, spec: NormSpec) -> None:
    if spec.axes in ((1,), "all_but_batch"):
        fits = parameter.dim() == 1 and x.dim() > 1 and parameter.shape[0] == x.shape[1]
    else:
        sizes = zip(reversed(parameter.shape), reversed(x.shape), strict=False)
        fits = parameter.dim() <= x.dim() and all(size in (1, wanted) for size, wanted in sizes)
    if not fits:
        raise ShapeError(
            f"normalize: {name} of shape {tuple(parameter.shape)} does not fit an input of shape {tuple(x.shape)}"
        )
