"""What several tests share: one comparison, every preset, any valid spec, arguments that fit it, its exact value."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpmath
import pytest
import torch
from click.testing import Result
from hypothesis import strategies as st
from torch import Tensor

from normkit import NormSpec, reference, specs
from normkit.conventions.rows import CHANNELS_LAST

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection
    from normkit.rules.finding import Finding

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "normkit"

PRESETS: dict[str, NormSpec] = {name: value for name, value in vars(specs).items() if isinstance(value, NormSpec)}


def finding_of(inspection: Inspection, rule: str) -> Finding | None:
    """The finding of a rule, or None."""
    return next((found for found in inspection.findings if found.rule == rule), None)


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    dtype: torch.dtype | None = None,
    length: int = 1,
    units: float = 8,
    terms: Tensor | None = None,
) -> None:
    """Assert |actual - expected| <= units * eps * sqrt(length) * terms, element by element.

    eps is the machine epsilon of `dtype`, which `actual` must have (default: that of `expected`). An element that is
    a sum of `length` rounded terms errs by about sqrt(length) of their epsilons. `terms` is the size of what is added
    to form an element; by default the largest finite element of `expected`, since rows share their statistics.
    NaN and infinities must stand in the same places.
    """
    dtype = dtype or expected.dtype
    assert actual.dtype == dtype, f"dtype {actual.dtype}, expected {dtype}"
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    odd = ~finite
    same_odd = torch.allclose(actual[odd], expected[odd], rtol=0.0, atol=0.0, equal_nan=True)
    assert same_odd, "NaN or infinities differ"
    assert actual[finite].isfinite().all(), "not finite where a finite number was expected"
    if not finite.any():
        return
    terms = expected[finite].abs().max() if terms is None else terms.detach().double().expand_as(expected)[finite]
    bound = units * torch.finfo(dtype).eps * math.sqrt(length) * terms
    error = (actual[finite] - expected[finite]).abs()
    worst = (error - bound).argmax()
    assert (error <= bound).all(), (
        f"{int((error > bound).sum())} of {error.numel()} elements are off; "
        f"the worst by {error[worst]:.3g} where {bound.expand_as(error)[worst]:.3g} is allowed"
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64, from a seed of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_differentiable(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Assert that first and second derivatives are right, in both modes, and that vmap takes rows apart."""
    assert torch.autograd.gradcheck(function, x.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(function, x.clone().requires_grad_())
    assert_close(torch.func.vmap(function)(x), function(x))
    one_by_one = torch.stack([torch.func.jacrev(function)(row) for row in x])
    assert_close(torch.func.vmap(torch.func.jacfwd(function))(x), one_by_one)


def taylor_slopes(function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, slope: Tensor | None = None) -> Tensor:
    """With which power of a step the remainder of the first derivative along v falls: 2 for the right derivative.

    Args:
        function: Of x.
        x: The point.
        v: The direction.
        slope: The derivative along v; autograd's unless given.
    """
    value, along = torch.func.jvp(function, (x,), (v,))
    slope = along if slope is None else slope
    steps = torch.logspace(-4, -2, 5, dtype=torch.float64)
    remainder = torch.stack([(function(x + step * v) - value - step * slope).norm() for step in steps])
    return remainder.log().diff() / steps.log().diff()


@st.composite
def valid_specs(draw: st.DrawFn, eps: st.SearchStrategy[float | None] | None = None, max_groups: int = 24) -> NormSpec:
    """Any spec that the constructor accepts, or with `eps` and `max_groups` those that suit `arguments`."""
    if eps is None:
        eps = st.none() | st.floats(allow_nan=False, allow_infinity=False)
    axes = draw(st.sampled_from([(-1,), (-2, -1), (-3, -2, -1), (1,), "all_but_batch", CHANNELS_LAST]))
    grouped = axes in ((-1,), "all_but_batch", CHANNELS_LAST)
    has_weight = draw(st.booleans())
    reduction = draw(st.sampled_from(["mean", "sum"]))
    statistics_dtype = draw(st.sampled_from(["float32", "input"]))
    casts = ["early", "late", "weight", "input", *(["none"] if statistics_dtype == "input" else [])]
    return NormSpec(
        centre_numerator=draw(st.booleans()),
        centre_statistics=draw(st.booleans()),
        eps=draw(eps),
        eps_placement=draw(st.sampled_from(["inside", "outside", "clamp"])),
        correction=draw(st.sampled_from([0, 1])) if reduction == "mean" else 0,
        reduction=reduction,
        multiplier=draw(st.sampled_from(["one", "sqrt_n"])),
        axes=axes,
        groups=draw(st.integers(1, max_groups)) if grouped else 1,
        has_weight=has_weight,
        has_bias=draw(st.booleans()),
        weight_offset=draw(st.sampled_from([0.0, 1.0, -0.5])) if has_weight else 0.0,
        offset_dtype=draw(st.sampled_from(["float32", "parameter"])),
        weight_placement=draw(st.sampled_from(["after", "before"])) if has_weight else "after",
        statistics_dtype=statistics_dtype,
        round_rstd=draw(st.booleans()),
        cast=draw(st.sampled_from(casts)),
        output_dtype=draw(st.sampled_from(["input", "promote", "weight", "float32"])),
    )


def arguments(
    spec: NormSpec, *, dtype: torch.dtype = torch.float64, seed: int = 0, rows: int = 2, features: int = 12
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Random x, weight and bias that fit a spec; `features` divide into 1, 2 or 3 groups."""
    # Far from the seeds of the tests: a gradient drawn from the same stream as x would be x.
    generator = torch.Generator().manual_seed(seed + 1_000_000)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if spec.rows.are_channels:
        sizes, parameter = (rows, features, 3) if spec.rows.channel_axis == 1 else (rows, 3, features), (features,)
    else:
        parameter = (2, 3, features)[-len(spec.axes) :]
        sizes = (rows, *parameter)
    x = normal(*sizes) + 0.5
    weight = 1.0 - spec.weight_offset + 0.3 * normal(*parameter) if spec.has_weight else None
    bias = normal(*parameter) if spec.has_bias else None
    return x.to(dtype), None if weight is None else weight.to(dtype), None if bias is None else bias.to(dtype)


def exact_row(row: list[mpmath.mpf], spec: NormSpec, eps: float) -> list[mpmath.mpf]:
    """multiplier * (x - m) / s of one row, as the docstring of NormSpec says it, in mpmath."""
    n = len(row)
    mean = mpmath.fsum(row) / n
    centre = mean if spec.centre_statistics else 0
    square = mpmath.fsum((value - centre) ** 2 for value in row)
    if spec.reduction == "mean":
        square /= n - spec.correction
    scale = {
        "inside": lambda: mpmath.sqrt(square + mpmath.mpf(eps)),
        "outside": lambda: mpmath.sqrt(square) + mpmath.mpf(eps),
        "clamp": lambda: max(mpmath.sqrt(square), mpmath.mpf(eps)),
    }[spec.eps_placement]()
    multiplier = mpmath.sqrt(n) if spec.multiplier == "sqrt_n" else 1
    return [multiplier * (value - (mean if spec.centre_numerator else 0)) / scale for value in row]


def exact(
    x: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The norm of every row of x (..., n) in 50 digits, rounded once to float64; casts are not followed."""
    eps = reference.machine_eps(x, spec) if eps is None else eps
    n, out = x.shape[-1], []
    gain = [1.0] * n if weight is None else weight.expand(n).tolist()
    shift = [0.0] * n if bias is None else bias.expand(n).tolist()
    with mpmath.workdps(50):
        gain = [mpmath.mpf(g) + spec.weight_offset for g in gain]
        for row in x.double().reshape(-1, n).tolist():
            values = [mpmath.mpf(value) for value in row]
            if spec.weight_placement == "before":
                values = [g * value for g, value in zip(gain, values, strict=True)]
            size = n // spec.groups
            parts = [exact_row(values[start : start + size], spec, eps) for start in range(0, n, size)]
            normalized = [value for part in parts for value in part]
            if spec.weight_placement == "after":
                normalized = [g * value for g, value in zip(gain, normalized, strict=True)]
            out.append([float(value + b) for value, b in zip(normalized, shift, strict=True)])
    return torch.tensor(out, dtype=torch.float64).reshape(x.shape)


def diagonal(*axes: Sequence[Any]) -> list[Any]:
    """Combinations of some axes' values, as parameters, in which any two values of two axes meet.

    All are slow but those on the diagonal, where each value of each axis stands at least once: as many combinations
    as the longest axis has values.
    """
    sizes = [len(axis) for axis in axes]
    quick = [tuple(step % size for size in sizes) for step in range(max(sizes))]
    chosen, met = [], set()
    for place in [*quick, *itertools.product(*map(range, sizes))]:
        pairs = set(itertools.combinations(enumerate(place), 2))
        if not pairs <= met:
            chosen.append(place)
            met |= pairs
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, place, strict=True)),
            marks=() if place in quick else pytest.mark.slow,
        )
        for place in sorted(chosen)
    ]


def below(error: Tensor | float, bound: float) -> str:
    """Assert that the largest magnitude is below a bound, and say so: words that are the same on every machine."""
    largest = float(torch.as_tensor(error).abs().max())
    assert largest < bound, f"{largest:.3g} is not below {bound:g}"
    return f"< {bound:.0e}".replace("e-0", "e-")


def refused(result: Result) -> str:
    """The one line on stderr of a command that ended with 2."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("normkit: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("normkit: ").strip()


def files_entered(run: Callable[[], object]) -> set[str]:
    """The files of normkit in which a function is called, in any thread; the bodies of modules are no functions."""
    codes = set()

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_name != "<module>":
            codes.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {str(Path(name).relative_to(SOURCE)) for name in codes if name.startswith(f"{SOURCE}/")}
