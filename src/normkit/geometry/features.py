"""Features that stand out: in the gains of many norms at the same place, and in the cosine of every two rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.errors import ShapeError
from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import length, over

_MOST_OUTLIERS = 16
# Six standard deviations, read off the median absolute deviation of a normal distribution.
_DEVIATIONS = 6 * 1.4826
# Where more than half of a 16-bit gain's entries agree, the deviation is 0 and the next number would stand out.
_RESOLUTION = 2**-7


@dataclass(frozen=True, kw_only=True, eq=False)
class Rogue:
    """How much each dimension adds to the mean cosine of two rows."""

    mean_cosine: Tensor
    """Mean over pairs of different rows of their cosine, a 0-d tensor: 0 for directions without a preference, near 1
    for a narrow cone."""
    contribution: Tensor
    """The part that each dimension adds to it, (n,); they sum to `mean_cosine`."""
    standardised_mean_cosine: Tensor
    """The same after standardising each dimension over the rows: near 0."""
    standardised_contribution: Tensor
    """The part that each dimension adds to that, (n,)."""

    @property
    def share(self) -> Tensor:
        """contribution / mean_cosine, (n,): 1 in all. Means little where the mean cosine is near 0."""
        return self.contribution / self.mean_cosine


def rogue_dimensions(x: Tensor) -> Rogue:
    """How much each dimension adds to the mean cosine of two rows, as they are and standardised.

    With u_a = x_a / |x_a|, dimension i adds the mean over pairs a != b of u_ai * u_bi, which is
    ((sum_a u_ai)**2 - sum_a u_ai**2) / (N (N - 1)): all pairs in one pass. Standardised rows have each dimension's mean
    over the rows subtracted and are divided by its standard deviation. A row of zeros has no direction and adds
    nothing; neither does a dimension without deviation once it is standardised.

    Args:
        x: Rows of shape (N, n) with N >= 2.

    Returns:
        The contributions, in x's dtype.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x is no matrix of two rows or more.

    Example:
        >>> from normkit.geometry import rogue_dimensions
        >>> found = rogue_dimensions(torch.tensor([[9.0, 1.0], [9.0, -1.0], [9.0, 0.0]]))
        >>> found.mean_cosine, found.share
        (tensor(0.9878), tensor([ 1.0041, -0.0041]))

    Source:
        Timkey and van Schijndel 2021, arXiv:2109.04404.
    """
    if require_floating(x).dim() != 2 or len(x) < 2:
        raise ShapeError(f"rows of shape (N, n) with N >= 2 are needed, got {tuple(x.shape)}; pairs are compared")
    deviation = x - x.mean(0)
    deviation = deviation - deviation.mean(0)
    standardised = over(deviation, length(deviation, 0)) * math.sqrt(len(x))
    before, after = _contribution(x), _contribution(standardised)
    return Rogue(
        mean_cosine=before.sum(),
        contribution=before,
        standardised_mean_cosine=after.sum(),
        standardised_contribution=after,
    )


def outlier_indices(values: Tensor) -> Tensor:
    """The entries that lie far from the median, the farthest first; at most 16.

    Entry i is one if |v_i - median| > max(6 * 1.4826 * MAD, 2**-7 * |median|), MAD the median of |v - median|: six
    standard deviations, were the entries normal, and more than what neighbouring 16-bit numbers differ by. NaN and
    infinite entries are left out.

    Args:
        values: Entries such as a gain's, of any shape, looked at in float64; indices count them flattened.

    Returns:
        Whole numbers of shape (k,), k <= 16, on the CPU. Not for `vmap`.

    Example:
        >>> from normkit.geometry import outlier_indices
        >>> outlier_indices(torch.tensor([1.0, 1.1, 0.9, -7.0, 1.0, 1.2, 9.5]))
        tensor([6, 3])

    Source:
        Median absolute deviation; the two limits are stated here.
    """
    entries = values.detach().flatten().to("cpu", torch.float64)
    finite = entries.isfinite()
    if not finite.any():
        return torch.empty(0, dtype=torch.long)
    # torch.median takes the lower of two middles; quantile takes their mean.
    median = torch.quantile(entries[finite], 0.5)
    deviation = torch.where(finite, (entries - median).abs(), 0.0)
    limit = torch.maximum(_DEVIATIONS * torch.quantile(deviation[finite], 0.5), _RESOLUTION * median.abs())
    farthest = deviation.argsort(descending=True, stable=True)[:_MOST_OUTLIERS]
    return farthest[deviation[farthest] > limit]


def recurring_indices(
    indices: Mapping[str, Iterable[int]], sizes: Mapping[str, int]
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The indices that three tensors of one size or more name, and a quarter of these or more.

    Args:
        indices: The indices of each tensor, such as its `outlier_indices`, by the tensor's name.
        sizes: How many entries each has; tensors of different sizes have no index in common.

    Returns:
        Pairs (index, names), the most frequent first; names in the order of `indices`.

    Example:
        >>> from normkit.geometry import recurring_indices
        >>> recurring_indices({"a": [5], "b": [5, 7], "c": [5]}, {"a": 64, "b": 64, "c": 64})
        ((5, ('a', 'b', 'c')),)

    Source:
        Kovaleva et al. 2021, arXiv:2105.06990, for the observation; the limits are stated here.
    """
    alike: dict[int, int] = {}
    seen: dict[tuple[int, int], list[str]] = {}
    for name, named in indices.items():
        alike[sizes[name]] = alike.get(sizes[name], 0) + 1
        for index in named:
            seen.setdefault((sizes[name], int(index)), []).append(name)
    recurring = [
        (index, tuple(names))
        for (size, index), names in seen.items()
        if len(names) >= 3 and 4 * len(names) >= alike[size]
    ]
    return tuple(sorted(recurring, key=lambda pair: (-len(pair[1]), pair[0])))


def _contribution(x: Tensor) -> Tensor:
    """Mean over pairs of different rows of the product of their unit rows, by dimension."""
    unit = over(x, length(x, keepdim=True))
    return (unit.sum(0).square() - unit.square().sum(0)) / (len(x) * (len(x) - 1))
