"""The image of a norm: all its outputs, eps included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.eps import PLACEMENTS, EpsPlacement
from normkit.errors import InputError, ShapeError, SpecError
from normkit.geometry.ellipsoid import Ellipsoid
from normkit.geometry.rows import require_row, sphere_radius
from normkit.spec import NormSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """All outputs of one norm.

    - eps = 0: the `surface` itself, of dimension n - 2 (LayerNorm) or n - 1 (RMSNorm); constant (zero) rows have no
      output. Where zero gains fill it, it has its inside and its edge.
    - eps > 0, inside or outside the root: the open inside of the surface, of one dimension more, as every normalized
      row is shorter than the radius; the surface is approached by long rows. Constant rows map to the centre.
    - eps > 0 as a clamp: the inside, by rows below eps, and the surface, by all others.

    k zero gains: the inside has dimension min(n - 1, n - k) (LayerNorm) or n - k (RMSNorm); the image at eps = 0 is a
    surface, of one less, for k <= 1 (k = 0), and of the same dimension for k >= 2 (k >= 1). LayerNorm of n = 1 feature:
    no point at eps = 0 (dimension -1), else only the bias (dimension 0); of n = 2: two points, else the line between.
    """

    surface: Ellipsoid
    """The image at eps = 0."""
    eps: float
    """As a number, also where the spec has None."""
    eps_placement: EpsPlacement

    @property
    def ambient(self) -> int:
        """n: the dimension of the space it lies in."""
        return self.surface.ambient

    @property
    def dimension(self) -> int:
        """Dimension of the image: that of the surface at eps = 0, of the flat it spans with eps > 0."""
        return self.surface.rank if self.eps else self.surface.dimension

    @property
    def is_open(self) -> bool:
        """Whether no output lies on the surface: eps > 0, unless it is a clamp."""
        return self.eps > 0 and PLACEMENTS[self.eps_placement].shortens_every_row

    def depth(self, y: Tensor) -> Tensor:
        """How far an output is below the surface: 1 - |z| / radius for the shortest normalized z that maps to y.

        0 on the surface, 1 at the centre, negative outside: `Ellipsoid.depth`. If no gain is 0, it is the share of the
        row's length that eps takes: 1 - s_0 / s with the row's scale s and its scale s_0 without eps, about
        eps / (2 variance).

        Args:
            y: Of shape (..., n).

        Returns:
            Tensor of shape (...), in y's dtype.
        """
        return self.surface.depth(y)

    def contains(self, y: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether y is no further from the image than a tolerance, as bools of shape (...).

        An open image and its closure are the same here: no rounded number tells them apart. Use `depth`.

        Args:
            y: Of shape (..., n).
            tolerance: A distance; 16 sqrt(n) (radius max|g| + |b|) machine epsilons of y's dtype, unless given.
        """
        return self.surface.contains(y, tolerance, filled=True if self.eps else None)


def image_of(spec: NormSpec, n: int, weight: Tensor | None = None, bias: Tensor | None = None) -> Image:
    """The set of all outputs of a norm of rows of n features.

    With g the gain as it acts and r the length of a normalized row at eps = 0 (`sphere_radius`: sqrt(n) for LayerNorm
    and RMSNorm): {g * z + b : |z| = r} at eps = 0, |z| < r with eps > 0, and sum(z) = 0 if the norm centres. A gain
    that multiplies before the norm leaves no trace: it only moves rows about, and g = 1.

    Args:
        spec: The conventions.
        n: Features of a row.
        weight: Stored gain, of shape (n,), or one number; the spec's offset is added.
        bias: Bias, of shape (n,), or one number.

    Returns:
        The image; its numbers are in the dtype of the gain (else of the bias, else float64).

    Raises:
        SpecError: If a row is not the last axis; if the mean counts on one side of the fraction bar only; if eps < 0;
            if n - correction is 0.
        ShapeError: If a parameter does not fit n features.
        DtypeError: If a parameter is not of a floating dtype.
        InputError: If a gain that multiplies before the norm has zeros: rows then lie in a flat across the features.

    Example:
        >>> from normkit.geometry import image_of
        >>> image_of(NormSpec(eps=0.0), 768).dimension, image_of(NormSpec(eps=1e-5), 768).dimension
        (766, 767)

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582, and Riechers 2024, arXiv:2405.04134, at eps = 0; eps and zero
        gains derived here.
    """
    require_row(spec)
    radius = sphere_radius(spec, n)
    if not radius:
        raise SpecError(f"at least 2 features are needed for a correction of 1, got {n}: 0 / 0 has no image")
    gain = _gain(spec, n, weight, bias)
    eps = reference.machine_eps(gain, spec)
    if eps < 0:
        raise SpecError(f"the image of a norm with eps >= 0 is needed, got eps = {eps}")
    shift = None if bias is None else _of_features(bias, n)
    surface = Ellipsoid(gain, shift, is_centred=spec.centring.numerator, radius=radius)
    return Image(surface=surface, eps=eps, eps_placement=spec.placement.name)


def _gain(spec: NormSpec, n: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The gain of the ellipsoid, shape (n,)."""
    if weight is None:
        return torch.ones(n, dtype=torch.float64) if bias is None else torch.ones(n).to(bias)
    wide = torch.promote_types(torch.float32, weight.dtype)
    gain = _of_features(spec.gain.effective(weight, wide), n)
    if not spec.gain.is_before:
        return gain
    if bool((gain == 0).any()):
        raise InputError("a gain before the norm is needed without zeros for its image, got some; leave them out of n")
    return torch.ones_like(gain)


def _of_features(parameter: Tensor, n: int) -> Tensor:
    """A parameter of shape (n,), (1,) or () as one of shape (n,)."""
    if parameter.shape not in ((n,), (1,), ()):
        raise ShapeError(f"a parameter for {n} features is needed, got shape {tuple(parameter.shape)}")
    return parameter.expand(n)
