"""Singular values of a norm's Jacobian: all equal but two, which have closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.errors import ShapeError
from normkit.geometry.differential import jacobian, row_derivative
from normkit.geometry.rows import require_row
from normkit.geometry.scaling import length
from normkit.spec import NormSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class JacobianSpectrum:
    """The spectrum of one row's Jacobian with a gain of 1.

    The Jacobian maps span{1, centre(x)} to itself and stretches everything orthogonal to it alike.

    Example:
        >>> from normkit import NormSpec
        >>> from normkit.geometry import jacobian_spectrum
        >>> jacobian_spectrum(torch.tensor([1.0, 1.0, 3.0, 3.0]), NormSpec(eps=3.0)).singular_values(4)
        tensor([0.0000, 0.3750, 0.5000, 0.5000])
    """

    bulk: Tensor
    """k / s of shape (...), k = 1 or sqrt(n): the singular value, and eigenvalue, of multiplicity n - 2."""
    block: Tensor
    """The two singular values on span{1, centre(x)}, ascending, of shape (..., 2)."""
    eigenvalues: Tensor
    """The two eigenvalues on it, of shape (..., 2): first 0 (numerator centred) or k / s, then that of the normalized
    row. If only one of numerator and statistics is centred, the Jacobian is not normal, and these are not the singular
    values up to sign."""

    def singular_values(self, n: int) -> Tensor:
        """All n singular values in ascending order, of shape (..., n); n is the length of the rows.

        At n = 1 the span is a line: the value is |dy/dx|, 0 if the numerator is centred.

        Raises:
            ShapeError: If n is below 1.
        """
        if n < 1:
            raise ShapeError(f"a row has at least 1 feature, got n = {n}; give x.shape[-1]")
        if n == 1:
            # The first eigenvalue is 0 or the bulk: it says whether the second is there.
            return (self.eigenvalues[..., :1] / self.bulk.unsqueeze(-1) * self.eigenvalues[..., 1:]).abs()
        repeated = self.bulk.unsqueeze(-1).expand(*self.bulk.shape, n - 2)
        return torch.cat([self.block, repeated], -1).sort(-1).values


def jacobian_spectrum(x: Tensor, spec: NormSpec) -> JacobianSpectrum:
    """The singular values and eigenvalues of each row's Jacobian with a gain of 1, in closed form and O(n).

    In the orthonormal basis (1 / sqrt(n), centre(x) / |centre(x)|) the Jacobian is k / s, k = 1 or sqrt(n), times
    [[0, 0], [b, a]] if the numerator is centred, else [[1, b], [0, a]] (for RMSNorm up to a rotation), with
    a = 1 - z . t, b = 0 if numerator and statistics are both centred or both not, and else
    b = sqrt(n) mean(x) |centre(x)| / (s q (n - correction)); z, t and q as in `row_derivative`.

    LayerNorm: 0 on 1, eps / s**3 on centre(x), and 1 / s with multiplicity n - 2, so the trace is
    (n - 2) / s + eps / s**3 and the squared Frobenius norm (n - 2) / s**2 + eps**2 / s**6. RMSNorm: eps / s**3 on x,
    and 1 / s with multiplicity n - 1.

    Args:
        x: Rows of shape (..., n).
        spec: A spec of rows along the last axis; its gain is left aside.

    Raises:
        SpecError: If the spec's row is not the last axis.
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no feature.

    Example:
        >>> from normkit import specs
        >>> from normkit.geometry import jacobian_spectrum
        >>> spectrum = jacobian_spectrum(torch.tensor([3.0, 4.0]), specs.LLAMA.replace(eps=0.0))
        >>> spectrum.bulk, spectrum.block
        (tensor(0.2828), tensor([0.0000, 0.2828]))

    Source:
        Derived here.
    """
    require_row(spec)
    at = row_derivative(x, spec)
    bulk, radial, cross = at.bulk.squeeze(-1), at.remainder.squeeze(-1), torch.zeros_like(at.bulk).squeeze(-1)
    n = x.shape[-1]
    centring = spec.centring
    if centring.numerator and centring.is_half:
        mean = math.sqrt(n) * x.mean(-1)
        along = at.scale_gradient.sum(-1) / math.sqrt(n)
        # The mean adds to v, and that lets more of a scaling of the centred row through.
        radial = radial + along * mean / at.scale.squeeze(-1)
        cross = along * length(at.normalized)
    elif centring.is_half:
        cross = at.normalized.sum(-1) / math.sqrt(n) * length(at.scale_gradient)
    zero, size = torch.zeros_like(bulk), radial.abs()
    if centring.numerator:
        block = torch.stack([zero, _hypotenuse(radial, cross)], -1)
    else:
        # Sum and difference of the two have the squares 1 + a^2 + b^2 +- 2 |a|; their product is |a|.
        larger = (_hypotenuse(1 + size, cross) + _hypotenuse(1 - size, cross)) / 2
        block = torch.stack([size / larger, larger], -1)
    first = zero if centring.numerator else torch.ones_like(bulk)
    stretch = bulk.unsqueeze(-1)
    return JacobianSpectrum(bulk=bulk, block=stretch * block, eigenvalues=stretch * torch.stack([first, radial], -1))


def jacobian_norm(x: Tensor, spec: NormSpec, weight: Tensor | None = None) -> Tensor:
    """The largest stretch |J v| / |v| of each row's Jacobian: its spectral norm, exactly.

    max of k / s (n >= 3) and the block of `jacobian_spectrum`, in O(n), without a gain; 1 / s for LayerNorm.
    With a gain, the largest singular value of the dense `jacobian`, O(n**3) per row.

    Args:
        x: Rows of shape (..., n).
        spec: A spec of rows along the last axis.
        weight: Stored gain of shape (n,), or of one number; None for a gain of 1.

    Returns:
        Tensor of shape (...); NaN where the Jacobian is.

    Raises:
        SpecError: If the spec's row is not the last axis.
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no feature.

    Example:
        >>> from normkit import NormSpec
        >>> from normkit.geometry import jacobian_norm
        >>> jacobian_norm(torch.tensor([1.0, 1.0, 3.0, 3.0]), NormSpec(eps=3.0))
        tensor(0.5000)

    Source:
        Derived here.
    """
    require_row(spec)
    if weight is None:
        spectrum = jacobian_spectrum(x, spec)
        return spectrum.singular_values(x.shape[-1])[..., -1]
    matrix = jacobian(x, spec, weight)
    # The decomposition raises on NaN, which here is one row's answer and not the others', and knows no 16 bits.
    is_finite = matrix.isfinite().all(-1).all(-1)
    safe = torch.where(is_finite[..., None, None], matrix, 0.0).to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(is_finite, torch.linalg.svdvals(safe)[..., 0], torch.nan).to(x.dtype)


def jacobian_norm_bound(x: Tensor, spec: NormSpec, weight: Tensor | None = None) -> Tensor:
    """An upper bound of `jacobian_norm` in O(n): the largest |gain| times the norm without it.

    max|g| * |J_N(x)|, or max|g| * |J_N(g * x)| if the gain stands before; for LayerNorm max|g| / s. It is reached
    where a direction along which all |g| are largest moves neither mean nor scale: two equal largest gains at equal
    entries of x (LayerNorm), a largest gain at a zero entry (RMSNorm), or one gain for all.

    Args:
        x: Rows of shape (..., n).
        spec: A spec of rows along the last axis.
        weight: Stored gain of shape (n,), or of one number; None for a gain of 1.

    Returns:
        Tensor of shape (...).

    Raises:
        SpecError: If the spec's row is not the last axis.
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no feature.

    Example:
        >>> from normkit import NormSpec
        >>> from normkit.geometry import jacobian_norm_bound
        >>> x, weight = torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([1.0, 2.0, -6.0, 1.0])
        >>> jacobian_norm_bound(x, NormSpec(eps=3.0), weight)
        tensor(3.)

    Source:
        |diag(g) J| <= |diag(g)| |J|.
    """
    if weight is None:
        return jacobian_norm(x, spec)
    gain = spec.gain.effective(weight, x.dtype).to(x.dtype)
    before, _ = spec.gain.sides(gain)
    return gain.abs().amax(-1) * jacobian_norm(before * x, spec)


def _hypotenuse(a: Tensor, b: Tensor) -> Tensor:
    """sqrt(a**2 + b**2), with a finite gradient at 0."""
    return length(torch.stack([a, b], -1))
