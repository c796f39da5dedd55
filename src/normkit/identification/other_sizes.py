"""Whether the length of a normalized row depends on the sizes of axes that are no part of the row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from normkit import reference
from normkit.errors import NormkitError, ShapeError
from normkit.identification.gain_and_bias import Affine
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.spec import NormSpec

_SIZES = (3, 5, 7, 11, 13, 17)
"""Other sizes of the axes that are no part of a row: primes, so that a ratio of sizes tells the axis."""


def refuse(specimen: Specimen, shape: Sequence[int], spec: NormSpec | None, affine: Affine) -> None:
    """Refuse a norm with a spec whose rows have other lengths in inputs of other sizes.

    One call shows that a norm is right: its outputs in other sizes are those of the spec.

    Raises:
        UnrecognisedError: With the reading of `other_sizes`.
    """
    if spec is None:
        return
    dim = len(shape)
    row = tuple(range(1, dim)) if isinstance(spec.axes, str) else tuple(axis % dim for axis in spec.axes)
    x = torch.randn(next(_others(tuple(shape), row)), generator=torch.Generator().manual_seed(0))
    try:
        x = (specimen.precision.far * x).to(specimen.device, specimen.dtype)
        expected = reference.forward(x.double(), spec, *affine.of(specimen.module))
        if float((specimen(x) - expected).norm() / expected.norm()) <= specimen.precision.agrees:
            return
    except (NormkitError, UnrecognisedError, RuntimeError):  # parameters may span the other axes
        pass
    if found := other_sizes(specimen, shape, row):
        line = f"in inputs of shape {tuple(shape)} it is {spec}, in others it is not"
        raise UnrecognisedError("norm", line, found)


def other_sizes(specimen: Specimen, shape: Sequence[int], row: Sequence[int]) -> dict[str, Reading]:
    """Reading "other sizes" of a norm whose rows have other lengths where axes beside the row have other sizes.

    The same two rows are normalized in an input of this shape and in one in which all other axes have other sizes;
    where an input is rows and no more, an axis is put between them. The difference of two outputs has no bias.

    Args:
        specimen: The norm.
        shape: Of an input, of two samples or more.
        row: The axes that a row spans, counted from 0.
    """
    precision, n = specimen.precision, math.prod(shape[axis] for axis in row)
    x = precision.far * torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)).to(specimen.device)
    for sizes in _others(tuple(shape), row):
        other = x.new_ones(sizes)
        beside = (0,) * (len(sizes) - len(shape))
        corner = tuple(slice(size) if axis in row else 0 for axis, size in enumerate(shape[1:], start=1))
        other[slice(2), *beside, *corner] = x[slice(2), *corner]
        try:
            rows, others = specimen(x)[slice(2), *corner], specimen(other)[slice(2), *beside, *corner]
        except (ShapeError, UnrecognisedError):
            continue
        before, after = (each[0].double() - each[1].double() for each in (rows, others))
        factor = float((after * before).sum() / before.square().sum())
        left = float((after - factor * before).norm() / after.norm())
        # Other directions are no question of length: rank may decide what a row is.
        if not left < precision.homogeneous or abs(factor - 1) < precision.homogeneous:
            return {}
        line = f"the same rows leave {factor:.4g} times as long in an input of shape {sizes}"
        line += f" as in one of {tuple(shape)}"
        for axis in (*range(len(shape)), *range(-len(shape), 0)):
            if math.isclose(factor**2, sizes[axis] / shape[axis], rel_tol=2 * precision.homogeneous):
                divided = f"the sum of squares is divided by shape[{axis}], not by n = {n}"
                line = f"{divided}: {line}, the root of {sizes[axis]} / {shape[axis]}"
                return {"other sizes": Reading(value=divided, evidence=(line,))}
        return {"other sizes": Reading(value="the length of a row depends on them", evidence=(line,))}
    return {}


def _others(shape: tuple[int, ...], row: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Shapes with the same rows and other sizes, the one that shows most first."""
    free = [size for size in _SIZES if size not in shape]
    sizes = tuple(size if axis in row else free[axis] for axis, size in enumerate(shape))
    if len(shape) == 2:
        yield free[0], free[1], shape[1]
    else:
        yield sizes
    yield free[0], *shape[1:]
