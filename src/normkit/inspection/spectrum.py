"""Gains and biases: how their entries spread, and the features that stand out at many sites."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from normkit.inspection.result import Spectrum

_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_MOST_OUTLIERS = 16
# Six standard deviations, read off the median absolute deviation of a normal distribution.
_DEVIATIONS = 6 * 1.4826
# Where more than half of a 16-bit gain's entries agree, the deviation is 0 and the next number would stand out.
_RESOLUTION = 2**-7


def spectrum(values: Tensor, neutral: float) -> Spectrum:
    """Describe the entries of one gain or bias.

    An outlier is an entry with |value - median| > 6 * 1.4826 * MAD, the median absolute deviation, and
    more than 2**-7 of the median's size; the 16 farthest are kept. NaN and infinite entries are counted,
    and left out of everything else but `size`.

    Args:
        values: The entries as they act, of any shape; indices count them flattened.
        neutral: What they are at initialisation: 1.0 for a gain, 0.0 for a bias.
    """
    entries = values.detach().flatten().to("cpu", torch.float64)
    finite = entries.isfinite()
    known = entries[finite]
    if not known.numel():
        return Spectrum(
            size=entries.numel(),
            mean=math.nan,
            quantiles=(math.nan,) * 7,
            negative=0.0,
            at_initialisation=False,
            nonfinite=entries.numel(),
            outliers=(),
        )
    low, p5, p25, median, p75, p95, high = torch.quantile(known, torch.tensor(_SHARES, dtype=torch.float64)).tolist()
    return Spectrum(
        size=entries.numel(),
        mean=float(known.mean()),
        quantiles=(low, p5, p25, median, p75, p95, high),
        negative=float((known < 0).double().mean()),
        at_initialisation=bool((entries == neutral).all()),
        nonfinite=entries.numel() - known.numel(),
        outliers=_outliers(entries, finite, median),
    )


def recurring_outliers(spectra: Mapping[str, Spectrum]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Features that are outliers at three sites of one size or more, and at a quarter of these or more.

    Args:
        spectra: The gains by site path, in forward order.

    Returns:
        Pairs (feature index, paths), the most frequent first.
    """
    sites_of_size: dict[int, int] = {}
    seen: dict[tuple[int, int], list[str]] = {}
    for path, found in spectra.items():
        sites_of_size[found.size] = sites_of_size.get(found.size, 0) + 1
        for index, _ in found.outliers:
            seen.setdefault((found.size, index), []).append(path)
    recurring = [
        (index, tuple(paths))
        for (size, index), paths in seen.items()
        if len(paths) >= 3 and 4 * len(paths) >= sites_of_size[size]
    ]
    return tuple(sorted(recurring, key=lambda pair: (-len(pair[1]), pair[0])))


def _outliers(entries: Tensor, finite: Tensor, median: float) -> tuple[tuple[int, float], ...]:
    deviation = torch.where(finite, (entries - median).abs(), 0.0)
    # torch.median takes the lower of two middles; quantile is what the spectrum's own median is.
    mad = float(torch.quantile(deviation[finite], 0.5))
    limit = max(_DEVIATIONS * mad, _RESOLUTION * abs(median))
    farthest = deviation.argsort(descending=True, stable=True)[:_MOST_OUTLIERS].tolist()
    return tuple((index, float(entries[index])) for index in farthest if float(deviation[index]) > limit)
