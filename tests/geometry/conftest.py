"""The table of sets, and the laws that each of them obeys.

A test that takes `case` and `law` runs every law on every case of the file it mirrors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from normkit.errors import DtypeError, ShapeError
from normkit.geometry import CentredSphere, Ellipsoid, Hyperplane, Sphere


@dataclass(frozen=True)
class Case:
    """A set, how it is called, its dimension, and the file that it is about."""

    file: str
    name: str
    dimension: int
    build: Callable[[], Any]


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def layer(gain: Tensor, bias: Tensor | None = None) -> Callable[[], Ellipsoid]:
    return lambda: Ellipsoid(gain, bias, is_centred=True)


def rms(gain: Tensor, bias: Tensor | None = None) -> Callable[[], Ellipsoid]:
    return lambda: Ellipsoid(gain, bias, is_centred=False)


BIAS = wide(0.3, -2.0, 1.0, 0.0, 5.0)

CASES = (
    Case("image", "all-ones", 2, lambda: Hyperplane(torch.ones(3, dtype=torch.float64))),
    Case("image", "through a point", 4, lambda: Hyperplane(wide(1, -2, 0.5, 0, 3), BIAS)),
    Case("image", "one-hot normal", 3, lambda: Hyperplane(wide(0, 0, 1e-200, 0))),
    Case("image", "a point of a line", 0, lambda: Hyperplane(wide(-3), wide(7))),
    Case("image", "two points", 0, lambda: Sphere(1)),
    Case("image", "circle", 1, lambda: Sphere(2, radius=0.5)),
    Case("image", "n = 8", 7, lambda: Sphere(8)),
    Case("image", "centred, two points", 0, lambda: CentredSphere(2)),
    Case("image", "centred circle", 1, lambda: CentredSphere(3, radius=10.0)),
    Case("image", "centred, n = 8", 6, lambda: CentredSphere(8)),
    Case("ellipsoid", "LayerNorm, mixed signs", 3, layer(wide(0.5, -1, 2, 3, 0.2), BIAS)),
    Case("ellipsoid", "LayerNorm, equal gains", 3, layer(wide(-2, 2, 2, -2, 2), BIAS)),
    Case("ellipsoid", "LayerNorm, two and two equal gains", 3, layer(wide(1, 3, 1, 3, 2))),
    Case("ellipsoid", "LayerNorm, 1 zero gain", 3, layer(wide(0.5, 0, 2, 3, 0.2), BIAS)),
    Case("ellipsoid", "LayerNorm, 2 zero gains", 3, layer(wide(0.5, 0, 2, 0, -0.2), BIAS)),
    Case("ellipsoid", "LayerNorm, 3 zero gains", 2, layer(wide(0.5, 0, 2, 0, 0))),
    Case("ellipsoid", "LayerNorm, all gains zero", 0, layer(wide(0, 0, 0, 0, 0), BIAS)),
    Case("ellipsoid", "LayerNorm, n = 2: two points", 0, layer(wide(3, -0.5), wide(1, 1))),
    Case("ellipsoid", "LayerNorm, n = 2, 1 zero gain", 0, layer(wide(0, 2))),
    Case("ellipsoid", "LayerNorm, n = 3", 1, layer(wide(1, 2, 0.1))),
    Case("ellipsoid", "RMSNorm, mixed signs", 4, rms(wide(0.5, -1, 2, 3, 0.2), BIAS)),
    Case("ellipsoid", "RMSNorm, equal gains", 4, rms(wide(-2, 2, 2, -2, 2))),
    Case("ellipsoid", "RMSNorm, 1 zero gain", 4, rms(wide(0.5, 0, 2, 3, 0.2), BIAS)),
    Case("ellipsoid", "RMSNorm, all gains zero", 0, rms(wide(0, 0))),
    Case("ellipsoid", "RMSNorm, n = 1: two points", 0, rms(wide(3), wide(-1))),
    Case("ellipsoid", "RMSNorm, n = 2", 1, rms(wide(3, -0.5), wide(1, 1))),
)


def points_around(shape: Any, count: int = 40) -> Tensor:
    """Random vectors inside, near and outside a set."""
    spread = 0.01 + 6 * torch.rand(count, 1, dtype=torch.float64)
    return shape.sample(count) + spread * torch.randn(count, shape.ambient, dtype=torch.float64)


def is_solid(shape: Any) -> bool:
    return getattr(shape, "is_filled", False)


def samples_lie_in_it(shape: Any) -> None:
    samples = shape.sample(50)
    assert samples.shape == (50, shape.ambient)
    assert shape.contains(samples).all()
    assert not torch.allclose(samples[0], samples[1:]) or shape.dimension == 0
    y = points_around(shape)
    assert not shape.contains(y).any()
    # The tolerance is of the order of rounding: a step of many roundings off the set is seen.
    projected = shape.project(y)
    step = 1e-11 * torch.nn.functional.normalize(y - projected, dim=-1)
    assert not shape.contains(projected + step).any()


def samples_follow_the_generator(shape: Any) -> None:
    first, second = (shape.sample(3, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)


def projections_lie_in_it_and_stay(shape: Any) -> None:
    projected = shape.project(points_around(shape))
    assert shape.contains(projected).all()
    assert_close(shape.project(projected), projected, length=shape.ambient, units=32)


def distance_is_to_the_projection_and_no_sample_is_nearer(shape: Any) -> None:
    y = points_around(shape)
    distance = shape.distance(y)
    assert_close(distance, (y - shape.project(y)).norm(dim=-1), length=shape.ambient, units=32)
    assert (distance[:, None] <= torch.cdist(y, shape.sample(2000)) + 1e-12).all()


def the_way_to_the_projection_is_normal_to_it(shape: Any) -> None:
    y = points_around(shape)
    projected = shape.project(y)
    way = y - projected
    if is_solid(shape):
        # The set is convex, and no part of it lies beyond the plane across the way.
        ahead = (shape.sample(500) - projected[:, None]) @ way[..., None]
        assert ahead.max() <= 1e-12 * way.norm(dim=-1).max() * y.abs().max()
    else:
        assert shape.tangent(projected, way).abs().max() <= 1e-12 * y.abs().max()


def tangent_is_the_derivative_of_project(shape: Any) -> None:
    points = shape.sample(6)
    eye = torch.eye(shape.ambient, dtype=torch.float64)
    derivative = torch.func.vmap(torch.func.jacrev(shape.project))(points)
    projector = torch.func.vmap(lambda y: torch.func.vmap(lambda v: shape.tangent(y, v))(eye))(points)
    # Points are rounded, and the derivative turns as fast as the set is curved.
    assert (derivative - projector).abs().max() < 1e-12
    assert (torch.linalg.matrix_rank(projector, atol=1e-9) == shape.dimension).all()
    assert_close(projector @ projector, projector, length=shape.ambient, terms=torch.ones(1))


def derivatives_agree(shape: Any) -> None:
    y = points_around(shape, 5)
    reverse = torch.func.vmap(torch.func.jacrev(shape.project))(y)
    forward = torch.func.vmap(torch.func.jacfwd(shape.project))(y)
    assert (reverse - forward).abs().max() <= 1e-12 * max(1.0, float(reverse.abs().max()))
    direction = torch.randn_like(y)
    slopes = (reverse @ direction[..., None]).squeeze(-1)
    errors = [(shape.project(y + h * direction) - shape.project(y) - h * slopes).norm() for h in (1e-3, 1e-4)]
    # The remainder of a first derivative is of second order: a tenth of the step leaves a hundredth of it.
    assert errors[1] <= max(errors[0] / 50, 1e-13 * y.abs().max())
    gradient = torch.func.vmap(torch.func.grad(shape.distance))(y)
    expected = torch.nn.functional.normalize(y - shape.project(y), dim=-1)
    assert (gradient - expected).abs().max() < 1e-10


def batches_are_rows(shape: Any) -> None:
    y = points_around(shape, 6)
    v = torch.randn_like(y)
    for function in (shape.project, shape.distance, lambda row: shape.tangent(row, v[0])):
        rows = torch.stack([function(row) for row in y])
        assert_close(function(y.reshape(2, 3, -1)).reshape(rows.shape), rows, length=shape.ambient)
        assert_close(torch.func.vmap(function)(y), rows, length=shape.ambient)
    assert torch.equal(torch.func.vmap(shape.contains)(shape.sample(4)), torch.ones(4, dtype=torch.bool))
    assert shape.tangent(y[0], v).shape == shape.tangent(y, v[0]).shape == y.shape


def degenerate_rows_stay_finite(shape: Any) -> None:
    n = shape.ambient
    middle = getattr(shape, "centre", torch.zeros(n, dtype=torch.float64))
    rows = torch.stack([torch.zeros(n), torch.ones(n), torch.eye(n)[-1], torch.full((n,), 1e8)]).double()
    rows = torch.cat([rows, rows + middle, 1e8 + shape.sample(1), shape.sample(1)])
    projected = shape.project(rows)
    assert shape.contains(projected, 1e-6).all()
    assert shape.distance(rows).isfinite().all()
    assert torch.func.vmap(torch.func.jacrev(shape.project))(rows).isfinite().all()
    assert torch.func.vmap(torch.func.grad(shape.distance))(rows).isfinite().all()
    assert shape.tangent(rows, torch.ones_like(rows)).isfinite().all()


def depth_tells_inside_from_outside(shape: Any) -> None:
    if not hasattr(shape, "depth") or is_solid(shape):
        return
    samples, middle = shape.sample(20), getattr(shape, "centre", torch.zeros(shape.ambient).double())
    # A component is (y - b) / g: what y and b lose in the last digit counts by the gain.
    rounding = 1e-14 * (1 + 10 * float(middle.abs().max()))
    assert shape.depth(samples).abs().max() < rounding
    for share in (0.0, 0.25, 0.75, 3.0):
        depth = shape.depth(middle + share * (samples - middle))
        assert (depth - (1 - share)).abs().max() < max(1.0, share) * rounding
    assert torch.func.vmap(torch.func.grad(shape.depth))(torch.cat([samples, middle[None]])).isfinite().all()


def dtypes_are_kept(shape: Any) -> None:
    y = points_around(shape)
    exact = shape.project(y)
    single = shape.project(y.float())
    # A point this near to where two sides are as near may change its side.
    assert single.dtype == shape.distance(y.float()).dtype == torch.float32
    assert shape.tangent(y.float(), y.float()).dtype == shape.sample(2, dtype=torch.float32).dtype == torch.float32
    assert ((single - exact).norm(dim=-1) <= 1e-3 * y.norm(dim=-1)).all()
    assert shape.contains(shape.sample(50, dtype=torch.float32)).all()
    assert shape.contains(single).all()


def what_is_no_row_is_refused(shape: Any) -> None:
    longer = torch.zeros(shape.ambient + 1)
    for function in (shape.project, shape.distance, shape.contains):
        with pytest.raises(
            ShapeError, match=rf"rows of {shape.ambient} features are needed, got shape \({len(longer)},\)"
        ):
            function(longer)
        with pytest.raises(DtypeError, match="floating dtype"):
            function(torch.zeros(shape.ambient, dtype=torch.int64))


LAWS = (
    samples_lie_in_it,
    samples_follow_the_generator,
    projections_lie_in_it_and_stay,
    distance_is_to_the_projection_and_no_sample_is_nearer,
    the_way_to_the_projection_is_normal_to_it,
    tangent_is_the_derivative_of_project,
    derivatives_agree,
    batches_are_rows,
    degenerate_rows_stay_finite,
    depth_tells_inside_from_outside,
    dtypes_are_kept,
    what_is_no_row_is_refused,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"case", "law"} <= set(metafunc.fixturenames):
        file = Path(metafunc.module.__file__).stem.removeprefix("test_")
        cases = [case for case in CASES if case.file == file]
        metafunc.parametrize("case", cases, ids=lambda case: case.name)
        metafunc.parametrize("law", LAWS, ids=lambda law: law.__name__)
