"""The operators computed in Python by the reference, so that what calls them is tested where nothing is compiled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from normkit import NormSpec, reference
from normkit.kernels.signatures import unpacked
from normkit.ops import calls


def spec_of(
    conventions: int, eps: float, weight_offset: float, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> NormSpec:
    """The spec that a plan turned into conventions, for rows like x."""
    found = unpacked(conventions)
    return NormSpec(
        centre_numerator=bool(found.centre),
        centre_statistics=bool(found.centre),
        eps=torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if found.machine_eps else eps,
        eps_placement=("inside", "outside", "clamp")[found.eps_placement],
        correction=1 if found.divisor == 1 else 0,
        reduction="sum" if found.divisor == 2 else "mean",
        multiplier=("one", "sqrt_n")[found.sqrt_n],
        axes=tuple(range(-found.axes, 0)),
        has_weight=weight is not None,
        has_bias=bias is not None,
        weight_offset=weight_offset if weight is not None else 0.0,
        offset_dtype="parameter" if found.offset_in_parameter_dtype else "float32",
        round_rstd=bool(found.round_rstd),
        cast=("late", "early", "weight")[found.cast],
        output_dtype=("input", "promote", "weight")[found.output],
    )


def _statistics(x: Tensor, spec: NormSpec) -> Tensor:
    rows = x.double().reshape(*x.shape[: -len(spec.axes)], -1)
    mean, scale = reference.statistics(rows, spec.replace(axes=(-1,)), spec.eps)
    parts = [mean, 1 / scale] if x.dtype != torch.float64 else [mean, torch.zeros_like(mean), 1 / scale]
    return torch.cat(parts, -1).reshape(-1, len(parts))


def normalize_forward(x, weight, bias, conventions, eps, weight_offset):
    spec = spec_of(conventions, eps, weight_offset, x, weight, bias)
    check(spec, x, weight, bias)
    return reference.forward(x, spec, weight, bias).contiguous(), _statistics(x, spec)


def normalize_rows(*arguments):
    return normalize_forward(*arguments)[0]


def normalize_rows_out(x, weight, bias, conventions, eps, weight_offset, out):
    assert out.is_contiguous() or out.stride(-1) == 1
    y = normalize_rows(x, weight, bias, conventions, eps, weight_offset)
    assert y.dtype == out.dtype
    out.copy_(y)


def add_normalize_forward(x, residual, weight, bias, conventions, eps, weight_offset):
    spec = spec_of(conventions, eps, weight_offset, residual, weight, bias)
    check(spec, x, weight, bias)
    check(spec, residual, weight, bias)
    y, new_residual = reference.add_forward(x, residual, spec, weight, bias)
    return y.contiguous(), new_residual.contiguous(), _statistics(new_residual, spec)


def add_normalize_rows_out(x, residual, weight, bias, conventions, eps, weight_offset, out, new_residual):
    assert all(target.is_contiguous() or target.stride(-1) == 1 for target in (out, new_residual))
    y, total, _ = add_normalize_forward(x, residual, weight, bias, conventions, eps, weight_offset)
    assert y.dtype == out.dtype
    out.copy_(y)
    new_residual.copy_(total)


def normalize_backward(
    dy, x, statistics, weight, bias, conventions, eps, weight_offset, addend, needs_x, needs_weight, needs_bias
):
    spec = spec_of(conventions, eps, weight_offset, x, weight, bias)
    check(spec, x, weight, bias)
    assert torch.equal(statistics, _statistics(x, spec)), "the statistics are not those of x"
    gain = None if weight is None else reference.effective_weight(weight, spec, torch.float64).double()
    exact = spec.replace(weight_offset=0.0, output_dtype="input")
    shift = None if bias is None else bias.double()
    gradients = reference.backward(
        dy.double(), x.double(), exact, gain, shift, addend=None if addend is None else addend.double()
    )
    return tuple(
        value.to(given.dtype).clone(memory_format=torch.contiguous_format) if is_needed else x.new_empty(0)
        for value, given, is_needed in zip(
            gradients, (x, weight, bias), (needs_x, needs_weight, needs_bias), strict=True
        )
    )


def check(spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """What the compiled kernels refuse."""
    for parameter in (weight, bias):
        if parameter is not None and parameter.dtype == torch.float64 != x.dtype:
            raise RuntimeError("a parameter that is too wide")
        if parameter is not None and parameter.numel() != x.shape[-len(spec.axes) :].numel():
            raise RuntimeError("a parameter of another size")


_IMPLEMENTATIONS = (
    normalize_rows,
    normalize_rows_out,
    normalize_forward,
    add_normalize_forward,
    add_normalize_rows_out,
    normalize_backward,
)


@contextlib.contextmanager
def python_kernels() -> Iterator[list[str]]:
    """Have the operators computed by this file; gives the list of the names of those that are called."""
    called: list[str] = []

    def recorded(function):
        def call(*arguments):
            called.append(function.__name__)
            return function(*arguments)

        return call

    missing = calls._kernels_missing
    library = torch.library.Library("normkit", "IMPL")
    with warnings.catch_warnings():
        # Torch warns, once, of what is wanted here: the compiled implementations stand back while these are there.
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        for function in _IMPLEMENTATIONS:
            library.impl(function.__name__, recorded(function), "CPU", allow_override=True)
    calls._kernels_missing = None
    try:
        yield called
    finally:
        calls._kernels_missing = missing
        library._destroy()
