"""The numbers in a model's parameters: entries of gains and biases, rows of matrices, running statistics."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from normkit.geometry.features import outlier_indices, recurring_indices
from normkit.identification.sites import OtherNorm
from normkit.measurement.quantities import Spectrum

_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

# Enough for a spread, and little beside a forward pass.
_ROWS, _MATRICES = 256, 64
_FEWEST = 32


def spectrum(values: Tensor, neutral: float) -> Spectrum:
    """Describe the entries of one gain or bias.

    Outliers are those of `normkit.geometry.outlier_indices`. NaN and infinite entries are counted, and left out of
    everything else but `size`.

    Args:
        values: The entries as they act, of any shape; indices count them flattened.
        neutral: The value at initialisation: 1.0 for a gain, 0.0 for a bias.
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


def row_scatter(model: nn.Module) -> float:
    """Variation of the row lengths of a model's matrices over the variation for independent entries.

    The variance of the mean squares s_i of a matrix's rows, over (m4 - s^2) / n, its value if all n entries are
    independent and of one distribution with second and fourth moments s and m4: 1 in fresh weights, whatever they were
    drawn from, and 0 where the rows are orthogonal by construction. The median over up to 64 matrices, of up to 256 of
    their rows each; rows of zeros, such as those of padding tokens, are left out.

    Args:
        model: The model; it is not changed.

    Returns:
        The median; NaN without a matrix of 32 rows and columns.
    """
    matrices = [one for one in model.parameters() if one.dim() == 2 and min(one.shape) >= _FEWEST]
    chosen = matrices[:: math.ceil(len(matrices) / _MATRICES) or 1]
    found = [scatter for one in chosen if math.isfinite(scatter := _scatter(one.detach()))]
    return statistics.median(found) if found else math.nan


def _scatter(matrix: Tensor) -> float:
    if matrix.is_meta or not matrix.is_floating_point():
        return math.nan
    rows = matrix[:: math.ceil(len(matrix) / _ROWS)].to("cpu", torch.float64)
    squares = rows[rows.any(-1)].square()
    if len(squares) < _FEWEST:
        return math.nan
    expected = squares.var() / squares.shape[-1]
    return float(squares.mean(-1).var() / expected)


def ungathered(model: nn.Module, others: Iterable[OtherNorm]) -> tuple[str, ...]:
    """Paths of batch norms with a trained gain or bias and untouched statistics: mean 0, variance 1 in every channel.

    Args:
        model: The model with these norms.
        others: Norms that no spec describes; norms without running statistics are ignored.
    """
    return tuple(other.path for other in others if _is_ungathered(model.get_submodule(other.path)))


def _is_ungathered(module: nn.Module) -> bool:
    mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    if not (isinstance(mean, Tensor) and isinstance(variance, Tensor)):
        return False
    if bool((mean != 0).any()) or bool((variance != 1).any()):
        return False
    starts = (("weight", 1.0), ("bias", 0.0))
    return any(
        isinstance(part := getattr(module, name, None), Tensor) and bool((part.detach() != start).any())
        for name, start in starts
    )
