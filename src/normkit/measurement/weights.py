"""The numbers in a model's parameters: gains, biases, matrices, running statistics; errors of norms' gradients."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit import units
from normkit.errors import NormkitError
from normkit.geometry.features import outlier_indices, recurring_indices
from normkit.identification.finder import likeness
from normkit.identification.offloading import in_memory, parameters
from normkit.identification.sites import NormSite
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import undisturbed
from normkit.measurement.facts import Spectrum
from normkit.reference import HALF

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

    The gains come by the path of their norm, in forward order.

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

    Returns:
        The median; NaN without a matrix of 32 rows and columns.
    """
    matrices = [(one, values) for _, one, values in parameters(model) if one.dim() == 2 and min(one.shape) >= _FEWEST]
    found = []
    for one, values in matrices[:: math.ceil(len(matrices) / _MATRICES) or 1]:
        if not one.is_floating_point() or (matrix := values()).is_meta:
            continue
        rows = matrix[:: math.ceil(len(matrix) / _ROWS)].to("cpu", torch.float64)
        squares = rows[rows.any(-1)].square()
        if len(squares) >= _FEWEST:
            expected = squares.var() / squares.shape[-1]
            found.append(float(squares.mean(-1).var() / expected))
    known = [scatter for scatter in found if math.isfinite(scatter)]
    return statistics.median(known) if known else math.nan


# Sums in 16 bits stop growing after some hundred rows; real batches have many thousand.
_GRADIENT_ROWS = 4096
_ELEMENTS = 1 << 20
# The gradient of the input is that of each row alone.
_FEW_ELEMENTS = 1 << 16
# With output gradients of this size, a sum over the rows stays far below the largest float16.
_SMALL = 2.0**-6
_SEED = 0


class GradientErrors(NamedTuple):
    """Relative errors |g - g64| / |g64| of a norm's gradients, g64 in float64 from the same rows."""

    of_input: float = math.nan
    """NaN where the norm has no gradient at all."""
    of_gain: float = math.nan
    """NaN where neither input nor gain has 16 bits, or no gradient can be had."""


def gradient_errors(sites: Sequence[NormSite], dtypes: Mapping[str, str]) -> dict[str, GradientErrors]:
    """The errors of the gradients of each norm's input and gain, by path.

    Norms of one code, shape and formula are tried once. Up to 4096 rows enter, about a million elements, and where
    nothing has 16 bits a sixteenth of that: x is normal, its output gradient is 0.5 + x + noise, so that the sum of a
    gain grows with every row as that of a loss does, and a part of it is along each row.

    Args:
        sites: The norms; they are left as they are.
        dtypes: Dtype of each norm's input, as in "bfloat16", by path.
    """
    known: dict[object, GradientErrors] = {}
    errors = {}
    for site in sites:
        weight, dtype = site.passport.weight, getattr(torch, dtypes[site.path] or "float32")
        numbers = None if weight is None else (weight.shape, weight.dtype)
        code = site.function if site.module is None else likeness(site.module)
        kind = (code, site.spec, site.passport.shape[1:], numbers, dtype)
        if kind not in known:
            known[kind] = _errors(site, weight, dtype)
        errors[site.path] = known[kind]
    return errors


def _errors(site: NormSite, weight: Tensor | None, dtype: torch.dtype) -> GradientErrors:
    generator = torch.Generator().manual_seed(_SEED)
    sample = site.passport.shape[1:]
    is_half = not {dtype, dtype if weight is None else weight.dtype}.isdisjoint(HALF)
    elements = min(_GRADIENT_ROWS * site.shape[0], _ELEMENTS if is_half else _FEW_ELEMENTS)
    rows = max(2, elements // math.prod(sample))
    x = torch.randn(rows, *sample, generator=generator).to(dtype)
    dy = _SMALL * (0.5 + x.float() + torch.randn(x.shape, generator=generator))
    device = x.device if weight is None else weight.device
    try:
        with undisturbed():
            by_input, by_gain, dy = _gradients(site, weight, x.to(device), dy.to(device))
    # A foreign module runs here: it may refuse the rows, or have no gradient.
    except (NormkitError, UnrecognisedError, RuntimeError):
        return GradientErrors()
    of_input, of_gain, _ = units.gradients(x, dy.cpu(), site.spec, None if weight is None else weight.cpu())
    return GradientErrors(
        # Where the output depends on the gain alone, the input has a gradient of 0.
        of_input=1.0 if by_input is None else of_input.relative(by_input),
        of_gain=math.nan if of_gain is None or by_gain is None or not is_half else of_gain.relative(by_gain),
    )


def _gradients(
    site: NormSite, weight: Tensor | None, x: Tensor, dy: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The gradients of input and gain, and that of the output as it was given: in the output's dtype."""
    with torch.enable_grad():
        entering, gain = x.detach().requires_grad_(), None
        if site.module is not None:
            with in_memory(site.module):
                specimen = Specimen(site.module, dtype=x.dtype if weight is None else weight.dtype)
            assert specimen.module is not None
            held: dict[str, Tensor] = dict(specimen.module.named_parameters())
            if site.passport.weight_name in held:
                gain = held[site.passport.weight_name].requires_grad_()
            # Some norms write over their input.
            y = specimen.overwriting(entering.clone())
        else:
            gain = None if weight is None else weight.detach().clone().requires_grad_()
            eps, bias, sizes = site.spec.eps, site.passport.bias, site.spec.rows.parameter_sizes(x.shape)
            match site.function:
                case "rms_norm":
                    y = F.rms_norm(entering, sizes, gain, eps)
                case "group_norm":
                    y = F.group_norm(entering, site.spec.rows.groups, gain, bias, eps or 0.0)
                case _:
                    y = F.layer_norm(entering, sizes, gain, bias, eps or 0.0)
        dy = dy.to(y.dtype)
        sources = [entering] if gain is None else [entering, gain]
        found: list[Tensor | None] = [*torch.autograd.grad(y, sources, dy, allow_unused=True), None]
    return found[0], found[1], dy
