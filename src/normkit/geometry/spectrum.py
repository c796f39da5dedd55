"""Singular values of a norm's Jacobian, and the condition number of the linear layer that a norm feeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import ShapeError
from normkit.geometry.differential import jacobian, row_derivative
from normkit.geometry.rows import require_floating, require_row
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Preconditioning:
    """Condition numbers of a linear layer's Gauss-Newton matrix, fed x and fed norm(x); scalar tensors.

    Example:
        >>> from normkit import specs
        >>> from normkit.geometry import preconditioning
        >>> x = torch.tensor([[100.0, 0.0], [0.0, 1.0]])  # rows of unequal lengths
        >>> found = preconditioning(x, specs.LLAMA.replace(eps=0.0))
        >>> found.raw, found.normalized
        (tensor(10000.), tensor(1.))
    """

    raw: Tensor
    """Condition number with the rows as they are."""
    normalized: Tensor
    """Condition number with the normalized rows."""
    raw_rank: Tensor
    """Number of directions that the rows span; the condition number is over these."""
    normalized_rank: Tensor
    """Likewise for the normalized rows: n - 1 at most after LayerNorm with no bias."""

    @property
    def ratio(self) -> Tensor:
        """raw / normalized: above 1 the norm preconditions, below 1 it makes the problem worse."""
        return self.raw / self.normalized


def gauss_newton_condition(features: Tensor) -> tuple[Tensor, Tensor]:
    """The condition number of X^T X / N on the directions that the rows of X span, and how many these are.

    X^T X / N is each output's block of the Gauss-Newton matrix of a linear layer under squared error, and its Hessian:
    gradient descent needs a number of steps in proportion to this condition number. It is
    (largest / smallest non-zero singular value of X)**2; those below max(N, n) * machine epsilon times the largest
    count as zero, as in `torch.linalg.matrix_rank`: along them the loss is flat and nothing is learnt.

    Args:
        features: The input of the layer, of shape (..., N, n): N samples of n features.

    Returns:
        The condition number in the dtype of the features, and the rank in int64, both of shape (...). NaN and rank 0
        where the features are all zero or not all finite.

    Raises:
        DtypeError: If the features are not of a floating dtype.
        ShapeError: If they are not a matrix with at least one sample and one feature.

    Example:
        >>> from normkit.geometry import gauss_newton_condition
        >>> gauss_newton_condition(torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
        (tensor(9.), tensor(2))

    Source:
        LeCun, Kanter and Solla 1991, "Eigenvalues of covariance matrices: application to neural-network learning".
    """
    if require_floating(features).dim() < 2 or features.shape[-2] == 0:
        raise ShapeError(f"features of shape (N, n) with N >= 1 are needed, got shape {tuple(features.shape)}")
    # The decomposition raises on NaN and knows no 16 bits.
    is_finite = features.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    safe = torch.where(is_finite, features, 0.0).to(torch.promote_types(features.dtype, torch.float32))
    singular = torch.linalg.svdvals(safe)
    largest = singular[..., :1]
    is_spanned = singular > max(features.shape[-2:]) * torch.finfo(features.dtype).eps * largest
    smallest = torch.where(is_spanned, singular, largest).amin(-1)
    is_zero = largest[..., 0] == 0
    ratio = largest[..., 0] / torch.where(is_zero, 1.0, smallest)
    return torch.where(is_zero, torch.nan, ratio.square()).to(features.dtype), is_spanned.sum(-1)


def preconditioning(
    x: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None
) -> Preconditioning:
    """How a norm changes the conditioning of the linear layer behind it, on given rows.

    `gauss_newton_condition` of the rows of x and of the rows of norm(x). A norm makes rows equally long. That helps
    if a few long rows would otherwise decide alone. LayerNorm also removes the offset that all rows share along 1, and
    RMSNorm does not; neither removes another common offset. If all rows are about equally long, little changes. If the
    rows along a rare direction are long, the norm hurts: k rows e_1 and one row sqrt(k) e_2 have condition number 1
    before RMSNorm and k after it.

    After LayerNorm the rows span one direction less. If x is small along 1, that alone lowers the number:
    `gauss_newton_condition(centre(x))` tells that part of the ratio from the rest. With gain g, a bias fills the
    direction again: along 1 / g all rows have the same (b . 1/g) / |1/g|, and if that is tiny, the number is huge.

    Args:
        x: Rows of shape (..., n), all taken together.
        spec: A spec of rows along the last axis.
        weight: Stored gain, as in `reference.forward`.
        bias: Bias, likewise.

    Returns:
        Both condition numbers and ranks; `ratio` compares them.

    Raises:
        SpecError: If the spec's row is not the last axis.
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no row or no feature.

    Example:
        >>> from normkit import specs
        >>> from normkit.geometry import preconditioning
        >>> x = torch.tensor([[1.0, 0.0]] * 4 + [[0.0, 2.0]])
        >>> preconditioning(x, specs.LLAMA.replace(eps=0.0)).ratio  # the norm made it worse
        tensor(0.2500)

    Source:
        Derived here.
    """
    require_row(spec)
    rows = require_floating(x).reshape(-1, x.shape[-1])
    raw, raw_rank = gauss_newton_condition(rows)
    normalized, normalized_rank = gauss_newton_condition(reference.forward(rows, spec, weight, bias).to(x.dtype))
    return Preconditioning(raw=raw, normalized=normalized, raw_rank=raw_rank, normalized_rank=normalized_rank)
