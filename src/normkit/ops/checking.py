"""The self-check of the GPU kernels: before the first call of a kind, a few rows are compared with the reference."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from normkit import reference, units
from normkit.ops import devices
from normkit.ops.plans import KernelPlan, spec_of
from normkit.spec import NormSpec
from normkit.units import Exact

_ROWS = 5


class Kind(NamedTuple):
    """The conditions that a kernel is compiled for; each kind is checked once."""

    gpu: int | None
    """Index of the GPU; None for the CPU, where Triton's interpreter runs."""
    conventions: int
    """As the operators take them, like the next two."""
    eps: float
    offset: float
    sizes: tuple[int, ...]
    """Sizes of the axes that form one row."""
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype | None, torch.dtype | None]
    """Dtypes of x, residual, gain and bias; None for a tensor that is absent."""
    has_gradient: bool
    """Backward is checked too."""


_passed: set[Kind] = set()
_failed: set[int | None] = set()


def passes(
    plan: KernelPlan,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    has_gradient: bool,
) -> bool:
    """Whether the kernels of a GPU may compute a call. The first call of each kind runs the check.

    The first failure on a GPU gives one warning, and no later call on it takes the kernels.
    """
    # A compiler takes `index`, unlike `int`, to ask for the number itself.
    sizes = tuple(operator.index(size) for size in x.shape[x.dim() - len(plan.spec.axes) :])
    dtypes = (x.dtype, _dtype(residual), _dtype(weight), _dtype(bias))
    kind = Kind(x.device.index, plan.conventions, plan.eps, plan.offset, sizes, dtypes, has_gradient)
    if not torch.compiler.is_compiling() and kind in _passed:
        return True
    return _passes(*kind)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _passes(
    gpu: int | None,
    conventions: int,
    eps: float,
    offset: float,
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype | None, torch.dtype | None],
    has_gradient: bool,
) -> bool:
    """`passes` for plain values: with these a compiler calls it while it traces."""
    kind = Kind(gpu, conventions, eps, offset, sizes, dtypes, has_gradient)
    if kind in _passed:
        return True
    # While a CUDA graph is captured nothing can be read back; the next call checks this kind.
    if gpu in _failed or (gpu is not None and torch.cuda.is_current_stream_capturing()):
        return False
    _, _, weight_dtype, bias_dtype = dtypes
    spec = spec_of(conventions, eps, offset, has_weight=weight_dtype is not None, has_bias=bias_dtype is not None)
    try:
        with torch.no_grad():
            wrong = next(_differences(kind, spec), None)
    except Exception as error:  # Triton's and CUDA's own, of any class
        wrong = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if wrong is None:
        _passed.add(kind)
        return True
    _failed.add(gpu)
    _passed.difference_update([earlier for earlier in _passed if earlier.gpu == gpu])
    warnings.warn(
        f"the Triton kernels failed their self-check on GPU {gpu} ({spec}, rows of {sizes}, {dtypes[0]}): {wrong}; "
        "norms on this GPU take plain torch from here on",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


# What `torch.compiler.assume_constant_result` does, without importing the compiler.
_passes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _differences(kind: Kind, spec: NormSpec) -> Iterator[str]:
    """The differences of the kernels from the reference on a few rows, one line for each."""
    numbers = torch.Generator().manual_seed(0)
    device = torch.device("cpu" if kind.gpu is None else f"cuda:{kind.gpu}")

    def drawn(*sizes: int, dtype: torch.dtype | None, around: float = 0.0, spread: float = 1.0) -> Tensor | None:
        if dtype is None:
            return None
        values = torch.randn(sizes, generator=numbers, device="cpu") * spread + around
        return values.to(device, dtype)

    x_dtype, residual_dtype, weight_dtype, bias_dtype = kind.dtypes
    x = drawn(_ROWS, *kind.sizes, dtype=x_dtype, around=0.5, spread=2.0)
    assert x is not None
    residual = drawn(_ROWS, *kind.sizes, dtype=residual_dtype, spread=2.0)
    weight = drawn(*kind.sizes, dtype=weight_dtype, around=spec.gain.neutral, spread=0.25)
    bias = drawn(*kind.sizes, dtype=bias_dtype)
    operators, rest = devices.operators(), (kind.conventions, kind.eps, kind.offset)
    if residual is None:
        y, statistics = operators.normalize_forward(x, weight, bias, *rest)
        rows, expected = x, reference.forward(x, spec, weight, bias)
    else:
        y, rows, statistics = operators.add_normalize_forward(x, residual, weight, bias, *rest)
        expected, new = reference.add_forward(x, residual, spec, weight, bias)
        yield from _difference("the new residual", rows, Exact(new.double(), new.double().abs()))
    # The right output holds the roundings of the cast program. A near-tie may fall to the other side.
    size = units.output(rows, spec, weight, bias).size
    casts = spec.casts.narrow_dtypes(x_dtype, weight_dtype, y.dtype)
    yield from _difference("y", y, Exact(expected.double(), size), units.coarsest({*casts, y.dtype}))
    if not kind.has_gradient:
        return
    dy = drawn(_ROWS, *kind.sizes, dtype=expected.dtype)
    assert dy is not None
    needs = (True, weight is not None, bias is not None)
    found = operators.normalize_backward(dy, rows, statistics, weight, bias, *rest, None, *needs)
    exact = units.gradients(rows, dy, spec, weight, bias)
    for name, gradient, right in zip(("dx", "dweight", "dbias"), found, exact, strict=True):
        if right is not None:
            yield from _difference(name, gradient, right)


def _difference(name: str, found: Tensor, exact: Exact, dtype: torch.dtype | None = None) -> Iterator[str]:
    """A line if a number is off by more than 16 units of the dtype, found's own if None: a spec rounds four times."""
    # A division by zero that the spec asks for (n = 1, divisor n - 1) is left out.
    error = exact.units(found, dtype)
    worst = int(error.argmax())
    if float(error.flatten()[worst]) > 16:
        off = float((found.double() - exact.value).abs().flatten()[worst])
        yield f"{name} is off by {off:.2g}, {float(error.flatten()[worst]):.2g} units of rounding"
