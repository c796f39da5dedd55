"""The formula for rows too long to feel eps: what is subtracted, what divides, gain and bias and where they act."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.gain import NO_GAIN
from normkit.conventions.rows import CENTRINGS, Rows
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.spec import NormSpec

_SAMPLES = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Parity:
    """Outputs for inputs x and -x, taken apart."""

    fits: float
    """A smaller relative residual is rounding."""
    x: Tensor
    """The input, in float64: rows of different means and lengths, all far from eps."""
    odd: Tensor
    """(f(x) - f(-x)) / 2: the normalized part."""
    bias: Tensor
    """(f(x) + f(-x)) / 2, the same for every sample; of a sample's shape."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """A formula that explains the outputs."""

    spec: NormSpec
    """Axes, groups, centring; eps 0, neither weight nor bias."""
    gain: Tensor
    """Factor of each normalized feature, of a sample's shape, in float64."""
    residual: float
    """Relative, of the odd part."""
    fits: float
    """A smaller residual is rounding."""

    @property
    def explains(self) -> bool:
        """Whether the fit leaves nothing but rounding."""
        return self.residual < self.fits


@dataclass(frozen=True, kw_only=True)
class FitBefore:
    """A formula with the weight before the norm explains the outputs."""

    spec: NormSpec
    """Axes, groups, centring, weight_offset, weight_placement "before"; eps 0."""
    name: str
    """The parameter that is the weight."""
    scale: float
    """The length of a normalized row over that of the spec's."""
    residual: float
    """Relative, of the odd part."""


def check_kind(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> str:
    """Whether a large input grown 64-fold gives the same output, and -x that output mirrored; as one line.

    Raises:
        UnrecognisedError: If not.
    """
    precision = specimen.precision
    growth, scale = precision.growth, precision.far
    x = torch.randn(tuple(shape), generator=generator).to(specimen.device)
    near, far = specimen(scale * x), specimen(growth * scale * x)
    finite = bool(torch.isfinite(near).all() and torch.isfinite(far).all())
    if not finite or _rms(near) == 0 or _rms(far) == 0:
        seen = "its output is zero" if finite else f"its output is not finite for inputs of magnitude {scale:g}"
        if specimen.dtype == torch.float16:
            raise UnrecognisedError("undecidable", f"{seen}: in float16 the squares of its rows may overflow")
        raise UnrecognisedError("not a norm", seen)
    degree = math.log2(_rms(far) / _rms(near)) / math.log2(growth)
    if not _small(far - near, _rms(near), precision.homogeneous):
        grows = f"its output grows as the input to the power {degree:.2f}{_wrong_power(degree)}"
        turns = "its output changes direction when the input is made larger"
        raise UnrecognisedError("not a norm", grows if abs(degree) > 0.01 else turns)
    mirrored = specimen(-scale * x)
    if _small(near - mirrored, _rms(near), 1e-5):
        # Where the output shrinks as the input grows, only a bias is left of large rows.
        lengths = [_rms(specimen(small * x) - specimen(-small * x)) for small in (1.0, 4.0)]
        if min(lengths) > 0 and (degree := math.log2(lengths[1] / lengths[0]) / 2) < -0.1:
            grows = f"what it adds to a bias grows as the input to the power {degree:.2f}{_wrong_power(degree)}"
            raise UnrecognisedError("not a norm", grows)
    even = near + mirrored
    if not _small(even - even[:1], _rms(near), precision.homogeneous):
        raise UnrecognisedError("norm", "f(x) + f(-x) depends on x: it is no normalized row times a gain plus a bias")
    return f"inputs {growth:g} times as large give the same output (degree {degree + 0.0:.4f})"


def _wrong_power(degree: float) -> str:
    """In words, why the output shrinks as the input grows: more than a root of the mean square divides."""
    if degree > -0.01:
        return ""
    return f", as where the mean square or variance to the power {(1 - degree) / 2:.3g} divides, in place of its root"


def saturates(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> bool:
    """Whether the output turns between inputs of magnitude 1 and large ones: not a norm, but something that clips."""
    x = torch.randn(tuple(shape), generator=generator).to(specimen.device)
    far = specimen.precision.far * x
    return bool(torch.cosine_similarity(specimen(x).flatten().double(), specimen(far).flatten().double(), dim=0) < 0.99)


def respond(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> Parity:
    """Call the norm far from eps on random rows of different means."""
    shift = torch.linspace(-2, 2, _SAMPLES).reshape(-1, *(1,) * (len(shape) - 1))
    precision = specimen.precision
    rows = precision.far * (torch.randn(_SAMPLES, *shape[1:], generator=generator) + shift)
    x = rows.to(specimen.device, specimen.dtype)
    plus, minus = specimen(x).double(), specimen(-x).double()
    return Parity(fits=precision.fits, x=x.double(), odd=(plus - minus) / 2, bias=((plus + minus) / 2).mean(0))


def fit(parity: Parity, rows: Rows) -> Fit:
    """The centring that explains the outputs, with whatever gain that takes.

    For each of the four centrings the gain of a feature is the least-squares ratio of the odd part
    to the normalized input over the samples; the rows' means differ, so a wrong centring cannot fit.
    """
    fits, length = [], _rms(parity.odd)
    for spec in _centrings(rows):
        normalized = reference.forward(parity.x, spec)
        gain = (parity.odd * normalized).sum(0) / normalized.square().sum(0)
        residual = _rms(parity.odd - gain * normalized) / length
        fits.append(Fit(spec=spec, gain=gain, residual=residual, fits=parity.fits))
    return min(fits, key=lambda candidate: candidate.residual)


def fit_before(specimen: Specimen, parity: Parity, rows: Rows) -> FitBefore | None:
    """The formula with a weight that multiplies the row before it is normalized, or None."""
    for spec in _centrings(rows):
        for name, weight in specimen.parameters.items():
            for offset in (0.0, 1.0, 2.0):
                before = spec.replace(has_weight=True, weight_placement="before", weight_offset=offset)
                try:
                    expected = reference.forward(parity.x, before, weight.double())
                except RuntimeError:
                    continue
                scale = float((parity.odd * expected).sum() / expected.square().sum())
                residual = _rms(parity.odd - scale * expected) / _rms(parity.odd)
                if residual < parity.fits:
                    return FitBefore(spec=before, name=name, scale=scale, residual=residual)
    return None


def _centrings(rows: Rows) -> Iterator[NormSpec]:
    for both in ((True, True), (False, False), (False, True), (True, False)):
        conventions = {**rows.conventions(), **CENTRINGS[both].conventions(), **NO_GAIN.conventions()}
        yield NormSpec(eps=0.0, **conventions)


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def _small(values: Tensor, scale: float, tolerance: float) -> bool:
    return _rms(values) <= tolerance * scale
