"""Gains and biases: how their entries spread, and the features that stand out at many sites."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from normkit.geometry.features import outlier_indices, recurring_indices
from normkit.inspection.result import Spectrum

_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def spectrum(values: Tensor, neutral: float) -> Spectrum:
    """Describe the entries of one gain or bias.

    Outliers are those of `normkit.geometry.outlier_indices`. NaN and infinite entries are counted, and left out of
    everything else but `size`.

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
        outliers=tuple((index, float(entries[index])) for index in outlier_indices(entries).tolist()),
        digest=_digest(entries),
        members=_digest(entries.abs().sort().values),
        distinct=torch.unique(known).numel(),
    )


def _digest(entries: Tensor) -> str:
    # Adding 0 makes -0 into 0.
    return hashlib.sha256((entries.float() + 0.0).numpy().tobytes()).hexdigest()[:16]


def recurring_outliers(spectra: Mapping[str, Spectrum]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Features that are outliers at many sites of one size, as `normkit.geometry.recurring_indices` counts them.

    Args:
        spectra: The gains by site path, in forward order.

    Returns:
        Pairs (feature index, paths), the most frequent first.
    """
    return recurring_indices(
        {path: [index for index, _ in found.outliers] for path, found in spectra.items()},
        {path: found.size for path, found in spectra.items()},
    )
