"""Rows that are hard on a norm: with a mean that dwarfs their deviations, constant, zero, or with one large element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.gain import NO_GAIN
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen
from normkit.spec import NormSpec

_MEANS = (128.0, 1024.0, 8192.0)
"""In units of a row's standard deviation; powers of two, so that a float32 row is still exact after subtracting one."""
_CONSTANTS = (0.1, 3.14159, 1000.1, 12345.678)
_WORSE = 30.0
"""Two passes differ by less than this among themselves; one pass over x and x^2 is 1e3 times worse at 1024."""
_NOTICED = 1e-6
"""A share of a row's length that float32 shows."""
_ROWS = 8
RESCALED_EPS = "eps is multiplied by the square of a row's largest element: {:.3g} after a division by it"
"""Says so of a norm for which `rescaled_eps` has found a number."""


def readings(
    specimen: Specimen, spec: NormSpec, shape: Sequence[int], generator: torch.Generator
) -> dict[str, Reading]:
    """Reading "degenerate rows"; and "conditioning" where a mean is subtracted, in float32."""
    found = {"degenerate rows": _degenerate_rows(specimen, shape)}
    if spec.centring.is_full and specimen.dtype == torch.float32:
        found["conditioning"] = _conditioning(specimen, spec, shape, generator)
    return found


def rescaled_eps(specimen: Specimen, spec: NormSpec, shape: Sequence[int], generator: torch.Generator) -> float | None:
    """The eps of a norm that first divides its rows by their largest magnitude; None if it does not.

    The eps of such a norm acts at every scale. The larger one element of a row is, the more the row is shortened.

    Args:
        specimen: The norm, with gain 1 and no bias where these are parameters.
        spec: Axes, groups and centring.
        shape: Of an input.
        generator: Source of the rows.
    """
    plain = spec.replace(eps=0.0, **NO_GAIN.conventions())
    x = torch.randn(_ROWS, *shape[1:], generator=generator)
    rows = reference.to_rows(x.sign() * (1 + 0.1 * x.abs()), plain)
    rows[..., 0] *= torch.linspace(1, 1 + math.sqrt(rows.shape[-1]), _ROWS).reshape(-1, *(1,) * (rows.dim() - 2))
    x = reference.from_rows(rows, x, plain)
    sent = x.to(specimen.device)
    y = reference.to_rows((specimen(sent) - specimen(-sent)).cpu().double() / 2, plain)
    normalized = reference.to_rows(reference.forward(x.double(), plain), plain)
    shortened = (y * normalized).mean(-1).square().reciprocal().flatten()
    length = reference.statistics(rows.double(), plain, 0.0).scale.squeeze(-1)
    largest = (rows.abs().amax(-1) / length).square().flatten()
    # 1 / r^2 = 1 + eps * largest^2, but for the length of a normalized row.
    spread = largest - largest.mean()
    slope = float((spread * shortened).sum() / spread.square().sum())
    level = float(shortened.mean()) - slope * float(largest.mean())
    left = (shortened - level - slope * largest).square().mean().sqrt()
    is_line = float(left) < 0.1 * abs(slope) * float(spread.square().mean().sqrt())
    return slope / level if is_line and slope / level * float(largest.max()) > _NOTICED else None


def _conditioning(specimen: Specimen, spec: NormSpec, shape: Sequence[int], generator: torch.Generator) -> Reading:
    """How much the output changes with a row's mean, which should change none; beside float32 in two passes and one."""
    means = torch.tensor(_MEANS).reshape(-1, *(1,) * len(shape))
    drawn = torch.stack([torch.randn(tuple(shape), generator=generator) for _ in _MEANS]) + means
    x, centred = drawn.flatten(0, 1), (drawn - means).flatten(0, 1)
    rows = reference.to_rows(x, spec)
    expected = _normalized(reference.to_rows(x.double(), spec), one_pass=False)
    pairs = {
        "its own": (specimen(x.to(specimen.device)), specimen(centred.to(specimen.device))),
        "two passes": (_normalized(rows, one_pass=False), expected),
        "one pass": (_normalized(rows, one_pass=True), expected),
    }
    errors: dict[str, list[float]] = {}
    for name, (got, wanted) in pairs.items():
        off, length = (
            each.double().reshape(len(_MEANS), -1).square().mean(1).sqrt() for each in (got.double() - wanted, wanted)
        )
        errors[name] = (off / length).nan_to_num(1.0, 1.0).clamp_max(1.0).tolist()
    worse = [own > _WORSE * two and own > one / _WORSE for own, two, one in zip(*errors.values(), strict=True)]
    at = 1 if worse[1] or not any(worse) else worse.index(True)
    seen = ", ".join(f"{error:.0e} at {mean:g}" for error, mean in zip(errors["its own"], _MEANS, strict=True))
    line = f"error of a row whose mean is that many standard deviations: {seen}; float32 in two passes over the row "
    line += f"errs by {errors['two passes'][at]:.0e} at {_MEANS[at]:g}"
    if any(worse):
        line += f"; E[x^2] - E[x]^2, which this norm must compute, errs by {errors['one pass'][at]:.0e}"
    value = {"mean_over_std": _MEANS[at], "error": float(f"{errors['its own'][at]:.2g}"), "cancels": any(worse)}
    return Reading(value=value, evidence=(line,))


def _normalized(rows: Tensor, *, one_pass: bool) -> Tensor:
    """(row - mean) / standard deviation, whose square is E[x^2] - E[x]^2 in one pass."""
    mean = rows.mean(-1, keepdim=True)
    centred = rows - mean
    squares = rows.square().mean(-1, keepdim=True) - mean.square() if one_pass else centred.square().mean(-1, True)
    return centred / squares.sqrt()


def _degenerate_rows(specimen: Specimen, shape: Sequence[int]) -> Reading:
    """Whether rows of zeros, and of one number, give finite outputs; zeros also in float16, where eps may be lost."""
    zeros = torch.zeros(tuple(shape), device=specimen.device)
    constants = torch.cat([torch.full_like(zeros, constant) for constant in _CONSTANTS])
    value = {
        "zeros": _kind(specimen(zeros)),
        "constant": _kind(specimen(constants)),
    }
    half = specimen.call_in(torch.float16, zeros.half())
    if half is not None:
        value["zeros in float16"] = _kind(half)
    line = "; ".join(f"rows of {what.replace('constant', 'one number')}: {kind}" for what, kind in value.items())
    if half is not None and value["zeros"] == "finite" != value["zeros in float16"]:
        line += ": eps is lost there"
    return Reading(value=value, evidence=(line,))


def _kind(y: Tensor) -> str:
    return "NaN" if bool(y.isnan().any()) else "finite" if bool(torch.isfinite(y).all()) else "infinite"
