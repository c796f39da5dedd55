"""Normalization as functions: arguments checked once, here, then computed.

`layer_norm` and `rms_norm` have the signatures of `torch.nn.functional`; `normalize` takes any spec. Each has a form
that first adds its input to a residual stream, in one pass. `torch.jit.trace` and `torch.fx` see torch's own functions
in place of the first two.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit import arguments, specs
from normkit.errors import KindError, ShapeError
from normkit.ops import calls
from normkit.ops.plans import KernelPlan, plan
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
        DtypeError: If a tensor is not floating point (likewise).
        UseError: If the tensors are on different devices (likewise).
        KindError: If an argument is no tensor, shape or number at all (a TypeError, as in torch).
        SpecError: If eps is not finite.

    Example:
        >>> layer_norm(torch.tensor([1.0, 2.0, 3.0, 6.0]), (4,))
        tensor([-1.0690, -0.5345,  0.0000,  1.6036])

    Source:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 3.
    """
    y = _plain("layer_norm", input, normalized_shape, weight, bias, eps)
    if y is not None:
        return y
    if calls.is_written_down(input):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    arguments.check_torch_arguments("layer_norm", input, normalized_shape, weight, bias)
    found = _torch_plan("layer_norm", eps, len(normalized_shape), weight is not None, bias is not None)
    return calls.normalize(input, found, weight, bias)


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
        UseError: If the tensors are on different devices (likewise).
        KindError: If an argument is no tensor, shape or number at all (a TypeError, as in torch).
        SpecError: If eps is not finite.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), (2,), eps=0.0)
        tensor([0.8485, 1.1314])

    Source:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    y = _plain("rms_norm", input, normalized_shape, weight, None, eps)
    if y is not None:
        return y
    if calls.is_written_down(input):
        return F.rms_norm(input, normalized_shape, weight, eps)
    arguments.check_torch_arguments("rms_norm", input, normalized_shape, weight, None)
    found = _torch_plan("rms_norm", eps, len(normalized_shape), weight is not None, has_bias=False)
    return calls.normalize(input, found, weight, None)


def add_layer_norm(
    input: Tensor,  # named as in `layer_norm`
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Add the input to the residual stream, and `layer_norm` what the stream then holds.

    new = input + residual; y = weight * (new - mean(new)) / sqrt(var(new) + eps) + bias. The sum is taken in float32
    (float64 if one is), rounded to the residual's dtype, and normalized as rounded.

    Args:
        input: What a block adds, of shape (..., *normalized_shape), any floating dtype.
        residual: The stream, of the same shape; its dtype may differ, for instance be float32.
        normalized_shape: The trailing sizes that make up one row.
        weight: Gain of shape `normalized_shape`, or None.
        bias: Bias of shape `normalized_shape`, or None.
        eps: Added to the variance, in units of the residual squared.

    Returns:
        y in the input's dtype, and new in the residual's.

    Raises:
        ShapeError: If the shapes do not fit (a RuntimeError, as in torch).
        DtypeError: If a tensor is not floating point (likewise).
        UseError: If the tensors are on different devices (likewise).
        KindError: If an argument is no tensor, shape or number at all (a TypeError, as in torch).
        SpecError: If eps is not finite.

    Example:
        >>> add_layer_norm(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), (2,))
        (tensor([-1.0000,  1.0000]), tensor([1., 3.]))
    """
    arguments.check_torch_arguments("add_layer_norm", input, normalized_shape, weight, bias)
    arguments.check_residual("add_layer_norm", "input", input, residual)
    found = _torch_plan("add_layer_norm", eps, len(normalized_shape), weight is not None, bias is not None)
    return calls.add_normalize(input, residual, found, weight, bias)


def add_rms_norm(
    input: Tensor,  # named as in `rms_norm`
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the input to the residual stream, and `rms_norm` what the stream then holds.

    new = input + residual; y = weight * new / sqrt(mean(new**2) + eps). Arguments, results and errors are those of
    `add_layer_norm`, but that there is no bias and eps may be None, as in `rms_norm`.

    Example:
        >>> add_rms_norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), (2,), eps=0.0)
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    arguments.check_torch_arguments("add_rms_norm", input, normalized_shape, weight, None)
    arguments.check_residual("add_rms_norm", "input", input, residual)
    found = _torch_plan("add_rms_norm", eps, len(normalized_shape), weight is not None, has_bias=False)
    return calls.add_normalize(input, residual, found, weight, None)


def normalize(
    x: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Normalize by any convention.

    `NormSpec` defines the formula, and `print(spec)` shows that of one spec.

    Args:
        x: Tensor of shape (..., n); (N, C, ...) or (N, ..., C) as the spec's axes say.
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
        UseError: If the tensors are on different devices, or out is given where a gradient is wanted.
        KindError: If x, weight or bias is no tensor, or spec no NormSpec.

    Example:
        >>> from normkit import specs
        >>> normalize(torch.tensor([3.0, 4.0]), specs.L2_NORM)
        tensor([0.6000, 0.8000])
    """
    if out is None:
        y = _plain_spec(x, spec, weight, bias)
        if y is not None:
            return y
    arguments.check_spec_arguments("normalize", x, spec, weight, bias)
    if out is None:
        return calls.normalize(x, plan(spec), weight, bias)
    arguments.check_out("normalize", "out", out, x, spec.casts.output_dtype(x.dtype, weight, bias), (x, weight, bias))
    return calls.normalize_into(out, x, plan(spec), weight, bias)


def add_normalize(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalize what the stream then holds by any convention.

    new = x + residual, taken in float32 (float64 if one is) and rounded to the residual's dtype;
    y = `normalize` of new. What the spec calls the input's dtype is that of x.

    Args:
        x: What a block adds, of shape (..., n); (N, C, ...) if the spec's axes are the channels.
        residual: The stream, of the same shape; its dtype may differ, for instance be float32.
        spec: The conventions.
        weight: Gain, as in `normalize`.
        bias: Bias, as in `normalize`.
        out: Two tensors, for y and for new, which are written to and returned, if given. They may be x and the
            residual themselves.

    Returns:
        y in the spec's output dtype, and new in the residual's.

    Raises:
        ShapeError: If sizes do not fit, or a parameter is missing or superfluous.
        DtypeError: If a tensor is not floating point, or one of out is not of the result's dtype.
        UseError: If the tensors are on different devices, or out is given where a gradient is wanted.
        KindError: If x, residual, weight or bias is no tensor, or spec no NormSpec.

    Example:
        >>> from normkit import specs
        >>> add_normalize(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), specs.L2_NORM)
        (tensor([0.6000, 0.8000]), tensor([3., 4.]))
    """
    arguments.check_spec_arguments("add_normalize", x, spec, weight, bias)
    arguments.check_residual("add_normalize", "x", x, residual)
    if out is None:
        return calls.add_normalize(x, residual, plan(spec), weight, bias)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise KindError(f"add_normalize: out must be two tensors, for y and the new residual, got {out!r}")
    inputs = (x, residual, weight, bias)
    y, new_residual = out
    arguments.check_out("add_normalize", "out[0]", y, x, spec.casts.output_dtype(x.dtype, weight, bias), inputs)
    arguments.check_out("add_normalize", "out[1]", new_residual, x, residual.dtype, (*inputs, y))
    if arguments.share_memory(y, new_residual):
        raise ShapeError("add_normalize: the two tensors of out must not share memory; give each its own")
    return calls.add_normalize_into((y, new_residual), x, residual, plan(spec), weight, bias)


def _plain(
    name: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
) -> Tensor | None:
    """The usual call with the fewest checks; None for a call that needs a closer look.

    A gain has the sizes of a row, so it is compared in their place; the operator compares it with the input.
    """
    if not calls.is_plain(x, weight, bias):
        return None
    shape = x.shape[-1:] if weight is None else weight.shape
    if shape != normalized_shape or len(shape) != 1 or type(normalized_shape[0]) is not int:
        return None
    if bias is not None and bias.shape != shape:
        return None
    try:
        return calls.normalize_plain(x, _torch_plan(name, eps, 1, weight is not None, bias is not None), weight, bias)
    except RuntimeError:
        # The operator found something that does not fit, or that only the reference computes.
        return None


def _plain_spec(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Likewise for any spec."""
    if type(spec) is not NormSpec or not calls.is_plain(x, weight, bias):
        return None
    found = plan(spec)
    if not found.is_plain or (weight is not None) != spec.has_weight or (bias is not None) != spec.has_bias:
        return None
    if (weight is not None and weight.ndim != 1) or (bias is not None and bias.ndim != 1):
        return None
    try:
        return calls.normalize_plain(x, found, weight, bias)
    except RuntimeError:
        return None


# (name, eps, number of axes, has_weight, has_bias) -> the plan of torch's norm with these.
_torch_plans: dict[tuple[str, object, int, bool, bool], KernelPlan] = {}


def _torch_plan(name: str, eps: float | None, axes: int, has_weight: bool, has_bias: bool) -> KernelPlan:
    if torch.compiler.is_compiling():
        return _make_torch_plan(name, eps, axes, has_weight, has_bias)
    if type(eps) is not float and eps is not None:
        return _make_torch_plan(name, eps, axes, has_weight, has_bias)
    key = (name, eps, axes, has_weight, has_bias)
    found = _torch_plans.get(key)
    if found is None:
        found = _torch_plans[key] = _make_torch_plan(*key)
    return found


def _make_torch_plan(name: str, eps: float | None, axes: int, has_weight: bool, has_bias: bool) -> KernelPlan:
    is_rms = name.endswith("rms_norm")
    if not (isinstance(eps, numbers.Real) or (is_rms and eps is None)):
        raise KindError(f"{name}: eps must be a number, got {eps!r}")
    known = specs.TORCH_RMS_NORM if is_rms else specs.TORCH_LAYER_NORM
    return plan(known.replace(eps=eps, axes=tuple(range(-axes, 0)), has_weight=has_weight, has_bias=has_bias))
