"""What a norm does to the problem of the linear layer it feeds: the condition number of its Gauss-Newton matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import ShapeError
from normkit.geometry.rows import require_floating, require_row
from normkit.spec import NormSpec


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
