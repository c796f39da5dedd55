"""The operators computed in Python by the reference, so that what calls them is tested where nothing is compiled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from normkit import NormSpec, reference
from normkit.ops import calls, plans


def spec_of(
    conventions: int, eps: float, weight_offset: float, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> NormSpec:
    """The spec that a plan turned into conventions, for rows like x."""
    has_parameters = {"has_weight": weight is not None, "has_bias": bias is not None}
    found = plans.spec_of(conventions, eps, weight_offset, **has_parameters)
    return found.replace(eps=reference.machine_eps(x, found))


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


def count_rows(
    x, counted, enters_norm, is_centred, eps_placement, divisor, unit, limit_99, limit_90, place, sums, bins, peaks
):
    rows, features = x.double().reshape(-1, x.shape[-1]), x.shape[-1]
    of_narrow = x.dtype != torch.float64
    mean, absmax = rows.mean(-1), rows.abs().amax(-1)
    deviation = rows - mean[:, None] if enters_norm else rows
    second, fourth = deviation.square().mean(-1), deviation.square().square().mean(-1)
    std = second.sqrt()
    if of_narrow:
        std = torch.where(std > 1e-6 * mean.abs(), std, 0.0)
    square = mean.square() + std.square() if enters_norm else second
    is_counted = torch.ones(len(rows), dtype=torch.bool) if counted is None else counted
    kept = is_counted & (square <= torch.finfo(torch.float32 if of_narrow else torch.float64).max)
    length = square.sqrt()
    present = kept & (length > 0)
    length, std, mean = length[present], std[present], mean[present]
    cosine = mean / length
    angle = torch.atan2(std, mean) if enters_norm else cosine.clamp(-1, 1).acos()
    counts = [1, kept.sum(), (kept & ~present).sum(), (is_counted & ~kept).sum(), cosine.square().sum(), angle.sum()]
    sums[place, :6] += torch.tensor([float(count) for count in counts], dtype=torch.float64)
    bins[place, 0] += _histogram(length, bins.shape[-1])
    largest = {0: absmax[kept], 1: square[kept].sqrt(), 2: -square[kept].sqrt()}
    if enters_norm:
        varying = (std > 1e-8) & (std < 1e8) & fourth[present].isfinite()
        sums[place, 6] += (fourth[present] / second[present].square())[varying].sum()
        sums[place, 7] += varying.sum()
    if enters_norm and divisor > 0:
        root = (std if is_centred else length) * (features / divisor) ** 0.5
        largest[4] = torch.cat([root, torch.zeros(1, dtype=torch.float64)]).amax()[None].square() * divisor
        if unit:
            ratio = root[root > 0] / unit
            smallest = torch.cat([ratio, torch.full((1,), 1e30, dtype=torch.float64)]).amin()[None]
            shortened = [
                smallest / torch.hypot(smallest, torch.ones(())),
                smallest / (smallest + 1),
                smallest.clamp(max=1),
            ]
            largest[3] = -shortened[eps_placement]
            bins[place, 1] += _histogram(ratio, bins.shape[-1])
            sums[place, 8] += (ratio < limit_99).sum()
            sums[place, 9] += (ratio < limit_90).sum()
    for column, values in largest.items():
        if len(values):
            peaks[place, column] = torch.maximum(peaks[place, column], values.amax())


def _histogram(values: Tensor, bins: int) -> Tensor:
    """In eighths of octaves from 2 ** -64 on."""
    return torch.bincount((values.log2() * 8 + 512).clamp(0, bins - 1).long(), minlength=bins).double()


def mark_seen(x, place, sentinel):
    nothing = 0.0 if x.isfinite().all() else float("nan")
    sentinel[place] += torch.tensor([nothing, 1 + nothing])


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
    count_rows,
    mark_seen,
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
