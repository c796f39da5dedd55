"""The inputs behind an output of a norm; how far a norm is from idempotence and from ignoring scale and shift."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import InputError, SpecError
from normkit.geometry.centring import split
from normkit.geometry.decomposition import divisor
from normkit.geometry.rows import require_floating, require_row, sphere_radius
from normkit.geometry.scaling import length
from normkit.spec import NormSpec

# An output this many machine epsilons below the sphere's surface or less is taken to lie on it.
_ROUNDING = 16.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Fiber:
    """All inputs that a norm takes to one output.

    They are centred + a * 1 for every number a if the norm centres, else `centred` alone; and, where `is_scaled`, all
    positive multiples of these.
    """

    centred: Tensor
    """The row that was divided by s, of shape (..., n): x - mean(x) for a LayerNorm, x for an RMSNorm (of gain * x if
    the gain stands before normalizing)."""
    depth: Tensor
    """1 - |(y - b) / g| / radius, of shape (...): 0 on the surface of the image, above 0 inside."""
    is_inside: Tensor
    """y lies strictly inside, where eps > 0 leaves every row that entered; of shape (...)."""
    is_scaled: Tensor
    """Only the direction is known, and `centred` has a root mean square of 1; of shape (...)."""


def fiber(y: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None) -> Fiber:
    """Recover the input of a norm from its output, as far as the output determines it.

    With p = (y - b) / g, k = 1 or sqrt(n), and q = (|p| / radius)**2, radius = `sphere_radius(spec, n)`:
    u = p / k * sqrt(eps / (1 - q)) for eps inside the root, p / k * eps / (1 - sqrt(q)) outside it, and p / k * eps
    below a clamp (q < 1). So with eps > 0 only the mean is lost, and without centring nothing. At eps = 0, and above a
    clamp, q = 1 and only the direction of u is left: `is_scaled`.

    Conditioning: the length of u depends on the small difference 1 - q = eps / s**2, which magnifies the relative error
    of |p| by s**2 / eps inside the root, and by s / eps outside it. At eps = 1e-5 and s = 1 float64 keeps ten digits,
    at eps = 1e-12 three; from a 16-bit y the length is lost in practice as well.

    Args:
        y: Rows that a norm returned, of shape (..., n). A row that is not in the image has no preimage, and the result
            is none: if the norm centres, sum(p) = 0 is assumed. `image_of(...).contains` tests it.
        spec: The norm; it centres above and below the bar or at neither.
        weight: Gain as stored. A zero in it loses an entry of p: one is found again from sum(p) = 0 where the norm
            centres, otherwise the whole row comes back as NaN. Unused where it stands before normalizing.
        bias: Bias, likewise.

    Returns:
        The fiber of each row. `centred` is NaN where there is no input: q >= 1 with eps > 0 in or outside the root,
        q = 0 with eps = 0. Gradients are finite wherever the value is.

    Raises:
        DtypeError: If y is not of a floating dtype.
        SpecError: If a row of the spec is not the last axis, it centres above or below the bar but not at both, or its
            eps is negative.

    Example:
        >>> from normkit.geometry import fiber
        >>> x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
        >>> fiber(reference.forward(x, NormSpec()), NormSpec()).centred
        tensor([-2.0000, -1.0000,  3.0000], dtype=torch.float64)

    Source:
        Derived here: s**2 = v + eps and q = v / s**2 give s**2 = eps / (1 - q). That the mean is lost: Gupta et al.
        2024, arXiv:2409.12951.
    """
    require_row(spec)
    n = require_floating(y).shape[-1]
    radius, eps = sphere_radius(spec, n), reference.machine_eps(y, spec)
    if eps < 0:
        raise SpecError(f"a fiber needs eps of at least 0, got {eps}; give the spec as it should be")
    p = _pulled_back(y, spec, weight, bias)
    share = length(p) / radius
    is_scaled = torch.full_like(share, eps == 0, dtype=torch.bool)
    if not spec.placement.shortens_every_row:
        is_scaled = is_scaled | (1.0 - share <= _ROUNDING * torch.finfo(y.dtype).eps)
    is_inside = (share < 1.0) & ~is_scaled
    # If only the direction is known, 1 keeps the other branch and its gradient finite.
    room = torch.where(is_scaled, 1.0, torch.where(is_inside, 1.0 - share, torch.nan))
    scale = spec.placement.scale_below(room, eps) / spec.divisor.factor(n)
    factor = torch.where(is_scaled, n**0.5 / (share * radius), scale)
    return Fiber(centred=p * factor.unsqueeze(-1), depth=1.0 - share, is_inside=is_inside, is_scaled=is_scaled)


def idempotence(x: Tensor, spec: NormSpec) -> Tensor:
    """How much a second norm, with unit gain and no bias, changes what the first returned.

    |N(N(x)) - N(x)| / |N(x)|. As N(x) is centred where it need be, the second norm only divides:
    N(N(x)) = N(x) * k / s(N(x)) with k = 1 or sqrt(n), and the quotient is computed as |k / s(N(x)) - 1|.
    0 for LayerNorm and RMSNorm at eps = 0. With eps inside the root and k = 1 it is |1 / sqrt(q + eps) - 1|,
    q = v / (v + eps).

    Args:
        x: Rows of shape (..., n).
        spec: Any norm over the last axis.

    Returns:
        Tensor of shape (...), in x's dtype. Where N(x) = 0 the limit: |1 / sqrt(eps) - 1| for eps inside the root,
        |1 / eps - 1| elsewhere (times k before 1 is subtracted); NaN at eps = 0.

    Raises:
        DtypeError: If x is not of a floating dtype.
        SpecError: If a row of the spec is not the last axis.

    Example:
        >>> from normkit.geometry import idempotence
        >>> idempotence(torch.tensor([1.0, 2.0, 6.0]), NormSpec(eps=0.1))
        tensor(0.0373)

    Source:
        Derived here.
    """
    return (1.0 / divisor(normalized(x, spec), spec).squeeze(-1) - 1.0).abs()


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleShift:
    """How far a norm N without gain and bias is from four laws, over |N(x)|; each of shape (...)."""

    scale_defect: Tensor
    """From N(c x) = N(x): 0 at eps = 0."""
    rescaled_eps_defect: Tensor
    """From N(c x) = N'(x), N' having eps / c**2 inside the root, eps / c outside or as a clamp: 0 for every eps."""
    shift_defect: Tensor
    """From N(x + a) = N(x): 0 for LayerNorm, not for RMSNorm."""
    odd_defect: Tensor
    """From N(-x) = -N(x): 0."""


def scale_shift_defects(x: Tensor, spec: NormSpec, scale: float, shift: float) -> ScaleShift:
    """Measure the scaling and shifting laws of a norm on given rows, gain and bias left out.

    |N(c x) - N(x)|, |N(c x) - N'(x)|, |N(x + a) - N(x)| and |N(-x) + N(x)|, each over |N(x)|; see `ScaleShift`.

    Args:
        x: Rows of shape (..., n).
        spec: Any norm over the last axis.
        scale: c, above 0.
        shift: a, added to every entry.

    Returns:
        The four defects. NaN or infinite for a row with N(x) = 0.

    Raises:
        DtypeError: If x is not of a floating dtype.
        InputError: If scale is not above 0.
        SpecError: If a row of the spec is not the last axis.

    Example:
        >>> from normkit.geometry import scale_shift_defects
        >>> x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
        >>> defects = scale_shift_defects(x, NormSpec(eps=0.1), scale=3.0, shift=5.0)
        >>> defects.scale_defect, bool(defects.rescaled_eps_defect < 1e-15)
        (tensor(0.0095, dtype=torch.float64), True)

    Source:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, section 5.1, at eps = 0; with eps derived here.
    """
    if not scale > 0:
        raise InputError(f"scale must be above 0, got {scale}; the odd defect measures a change of sign")
    rescaled = spec.replace(eps=spec.placement.rescaled(reference.machine_eps(x, spec), 1.0 / scale))
    plain, scaled = normalized(x, spec), normalized(x * scale, spec)
    size = length(plain)
    return ScaleShift(
        scale_defect=length(scaled - plain) / size,
        rescaled_eps_defect=length(scaled - normalized(x, rescaled)) / size,
        shift_defect=length(normalized(x + shift, spec) - plain) / size,
        odd_defect=length(normalized(-x, spec) + plain) / size,
    )


def normalized(x: Tensor, spec: NormSpec) -> Tensor:
    """The norm of x in x's dtype, with unit gain and no bias."""
    require_row(spec)
    numerator, _ = split(require_floating(x), spec.centring)
    return numerator / divisor(x, spec)


def _pulled_back(y: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(y - b) / g; one entry lost to a zero gain is put back so that the sum is 0, where the norm centres."""
    moved = y if bias is None else y - bias.to(y.dtype)
    if weight is None or spec.gain.is_before:
        return moved
    gain = spec.gain.effective(weight, y.dtype).to(y.dtype)
    is_lost = (gain == 0).expand(moved.shape)
    known = torch.where(is_lost, 0.0, moved / torch.where(gain == 0, 1.0, gain))
    found = -known.sum(-1, keepdim=True) if spec.centring.numerator else torch.nan
    return torch.where(is_lost, torch.where(is_lost.sum(-1, keepdim=True) == 1, found, torch.nan), known)
