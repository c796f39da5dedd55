"""How far weights are from a form that a model could be brought into without changing what it computes.

A LayerNorm ignores the mean of a row, so the matrices that write to the residual stream may be centred. Its output has
mean 0, so the matrices that read it may be centred too. Its gain may be folded into these readers, which leaves ones.
"""

from __future__ import annotations

import math

from torch import Tensor

from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import length, over, unit


def centred_defect(writer: Tensor) -> Tensor:
    """The share of a writing matrix's energy along the all-ones direction.

    |1^T W|**2 / (n |W|**2) in Frobenius norms, n = out: the share of |W x|**2 along 1 for x without a preferred
    direction. 0 for a centred writer, 1 for one that writes constants only; a random one is near 1 / n.

    Args:
        writer: W of shape (..., out, in), as `torch.nn.Linear` holds it. A table of embeddings holds what it writes in
            rows: give it transposed. A bias b is the writer b[:, None].

    Returns:
        Tensor of shape (...) in the writer's dtype; 0 for a matrix of zeros, which writes nothing.

    Raises:
        DtypeError: If writer is not of a floating dtype.

    Example:
        >>> import torch
        >>> from normkit.geometry import centred_defect
        >>> centred_defect(torch.tensor([[1.0, 2.0], [-1.0, 2.0]]))
        tensor(0.8000)

    Source:
        Jiang et al. 2023, arXiv:2305.14858, for the centring; the measure is stated here.
    """
    return _share_along_ones(require_floating(writer).mT)


def reader_defect(reader: Tensor) -> Tensor:
    """The share of a reading matrix's energy along the all-ones direction.

    |W 1|**2 / (n |W|**2) in Frobenius norms, n = in: the output of a centred norm has no part along 1. 0 for a centred
    reader; a random one is near 1 / n. After a norm with a gain g, W * g reads the centred row.

    Args:
        reader: W of shape (..., out, in), as `torch.nn.Linear` holds it.

    Returns:
        Tensor of shape (...) in the reader's dtype; 0 for a matrix of zeros.

    Raises:
        DtypeError: If reader is not of a floating dtype.

    Example:
        >>> import torch
        >>> from normkit.geometry import reader_defect
        >>> reader_defect(torch.tensor([[1.0, -1.0], [2.0, 2.0]]))
        tensor(0.8000)

    Source:
        Stated here.
    """
    return _share_along_ones(require_floating(reader))


def weightless_defect(gain: Tensor) -> Tensor:
    """The root mean square of a gain's distance from 1.

    |g - 1| / sqrt(n): 0 for a norm without a gain, or with one that has been folded into its readers.

    Args:
        gain: g, the gain as it acts, of shape (..., n).

    Returns:
        Tensor of shape (...) in the gain's dtype.

    Raises:
        DtypeError: If gain is not of a floating dtype.

    Example:
        >>> import torch
        >>> from normkit.geometry import weightless_defect
        >>> weightless_defect(torch.tensor([1.0, 1.0, 1.0, 3.0]))
        tensor(1.)

    Source:
        Stated here.
    """
    return length(require_floating(gain) - 1) / math.sqrt(gain.shape[-1])


def _share_along_ones(matrix: Tensor) -> Tensor:
    """|W 1|**2 / (n |W|**2) over the last two axes."""
    matrix = matrix / unit(matrix, (-2, -1))
    along = matrix.sum(-1).square().sum(-1) / matrix.shape[-1]
    return over(along, matrix.square().sum((-2, -1)))
