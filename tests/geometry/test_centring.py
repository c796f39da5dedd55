"""Centring against its three equal forms, exact arithmetic and its own derivative; angles against mpmath."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_close, assert_differentiable, normal, taylor_slopes
from normkit.errors import DtypeError, ShapeError
from normkit.geometry import (
    angle_between,
    angle_to_ones,
    centre,
    centring_matrix,
    energy_along_ones,
    project_out,
)
from normkit.geometry.centring import helmert

SIZES = [1, 2, 3, 8, 64, 257]
DEGENERATE = {
    "zero": torch.zeros(5),
    "constant": torch.full((5,), 0.1),
    "one-hot": torch.eye(5)[2],
    "one feature": torch.tensor([-3.0]),
    "two features": torch.tensor([1.0, -2.0]),
    "huge mean": 1e8 + torch.arange(5.0, dtype=torch.float64),
    "large": torch.tensor([1e300, -2e300, 5e299], dtype=torch.float64),
    "small": torch.tensor([1e-300, -2e-300, 5e-299], dtype=torch.float64),
}
FUNCTIONS = {
    "centre": centre,
    "project_out": lambda x: project_out(x, torch.arange(1.0, x.shape[-1] + 1.0)),
    "energy_along_ones": energy_along_ones,
    "angle_to_ones": angle_to_ones,
    "angle_between": lambda x: angle_between(x, torch.arange(1.0, x.shape[-1] + 1.0, dtype=x.dtype)),
}


def rows(*shape, seed=0):
    return normal(*shape, seed=seed) + 0.5


@pytest.mark.parametrize("n", SIZES)
def test_the_three_forms_of_centring_are_one(n):
    x = rows(7, n)
    ones = torch.full((n,), 1.0 / math.sqrt(n), dtype=torch.float64)
    minus_mean = x - x.mean(-1, keepdim=True)
    minus_projection = x - (x @ ones)[:, None] * ones
    size = x.abs().max()
    for form in (minus_mean, minus_projection, x @ centring_matrix(n), project_out(x, torch.ones(n))):
        assert_close(centre(x), form, length=n, terms=size)


@pytest.mark.parametrize("n", SIZES)
def test_the_centring_matrix(n):
    matrix = centring_matrix(n)
    ones = torch.ones(n, 1, dtype=torch.float64)
    assert_close(matrix, torch.eye(n) - ones @ ones.T / n)
    assert torch.equal(matrix, matrix.T)
    assert_close(matrix @ matrix, matrix, length=n, terms=torch.ones(()))
    # Eigenvalue 0 once and 1 n - 1 times; the null space is span(1).
    values, vectors = torch.linalg.eigh(matrix)
    expected = torch.ones(n, dtype=torch.float64)
    expected[0] = 0.0
    assert_close(values, expected, length=n, terms=torch.ones(()))
    assert_close(vectors[:, 0].sum().abs(), torch.tensor(math.sqrt(n), dtype=torch.float64), length=n)
    assert torch.linalg.matrix_rank(matrix) == n - 1
    assert_close(torch.func.jacrev(centre)(rows(n)), matrix)
    assert centring_matrix(n, dtype=torch.float32).dtype == torch.float32


def exactly_centred(x):
    """Every row less its mean in 50 digits, rounded once."""
    with mpmath.workdps(50):
        values = [[mpmath.mpf(value) for value in row] for row in x.double().tolist()]
        means = [mpmath.fsum(row) / len(row) for row in values]
        return torch.tensor(
            [[float(value - mean) for value in row] for row, mean in zip(values, means, strict=True)],
            dtype=torch.float64,
        )


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float64, 1e8), (torch.float64, 1e12), (torch.float32, 1e5)])
def test_a_mean_that_dwarfs_the_deviations(dtype, mean):
    x = (torch.randn(5, 257, dtype=torch.float64) + mean).to(dtype)
    expected = exactly_centred(x)
    # Each entry is one exact difference, less a second mean that is far smaller.
    bound = 2 * torch.finfo(dtype).eps * expected.abs().max()
    assert (centre(x).double() - expected).abs().max() < bound
    # One mean would not do: its own rounding is larger.
    assert ((x - x.mean(-1, keepdim=True)).double() - expected).abs().max() > 4 * bound


@pytest.mark.slow
@given(n=st.integers(1, 30), seed=st.integers(0, 999), stretch=st.floats(1e-3, 1e3))
def test_projecting_onto_any_hyperplane(n, seed, stretch):
    x, normal = rows(4, n, seed=seed), rows(n, seed=seed + 1) * stretch
    y = project_out(x, normal)
    size = x.abs().max()
    # In the plane; moved along the normal only; a second projection changes nothing.
    assert_close((y * normal).sum(-1), torch.zeros(4, dtype=torch.float64), length=n, terms=size * normal.norm())
    unit = normal / normal.norm()
    dense = torch.eye(n, dtype=torch.float64) - torch.outer(unit, unit)
    assert_close(y, x @ dense, length=n, terms=size)
    assert_close(project_out(y, normal), y, length=n, terms=size)


def test_a_part_along_the_normal_that_dwarfs_the_rest():
    normal = rows(64, seed=1)
    unit = normal / normal.norm()
    # Entries near 1e9 round to 1e-7, and one projection leaves about as much along the normal; two leave none.
    y = project_out(rows(5, 64) + 1e10 * unit, normal)
    assert (y @ unit).abs().max() < 1e-13


def test_a_hyperplane_for_each_row_and_the_zero_normal_which_leaves_everything():
    x, normals = rows(3, 4, 6), rows(4, 6, seed=1)
    assert_close(project_out(x, normals)[1, 2], project_out(x[1, 2], normals[2]))
    x.requires_grad_()
    y = project_out(x, torch.zeros(6))
    assert torch.equal(y, x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="n = 0"):
        centring_matrix(0)
    with pytest.raises(ShapeError, match=r"5 entries for rows of 3; give one of shape \(3,\)"):
        project_out(torch.zeros(2, 3), torch.ones(5))
    for function in FUNCTIONS.values():
        with pytest.raises(DtypeError, match="floating"):
            function(torch.arange(3))
        with pytest.raises(ShapeError, match="n >= 1"):
            function(torch.zeros(2, 0))


@pytest.mark.parametrize("exponent", [-300, -20, 0, 20, 300])
@pytest.mark.parametrize("tilt", [1e-12, 1e-3, 1.0, 1e6])
def test_angles_in_fifty_digits(exponent, tilt):
    # A row at a chosen tilt from the all-ones direction, in both directions.
    x = (1.0 + tilt * torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=torch.float64)) * 10.0**exponent
    for row in (x, -x):
        with mpmath.workdps(50):
            values = [mpmath.mpf(value) for value in row.tolist()]
            mean = mpmath.fsum(values) / 4
            across = mpmath.sqrt(mpmath.fsum((value - mean) ** 2 for value in values))
            angle = mpmath.atan2(across, 2 * mean)
            share = float(mpmath.cos(angle) ** 2)
        assert float(angle_to_ones(row)) == pytest.approx(float(angle), rel=1e-15)
        assert float(energy_along_ones(row)) == pytest.approx(share, rel=4e-15)
        assert float(angle_between(row, torch.ones(4))) == pytest.approx(float(angle), rel=4e-15, abs=4e-16)


@pytest.mark.slow
@given(n=st.integers(2, 20), seed=st.integers(0, 999))
def test_energy_is_the_squared_cosine(n, seed):
    x = rows(6, n, seed=seed)
    energy = n * x.mean(-1).square() / x.square().sum(-1)
    assert_close(energy_along_ones(x), energy, length=n, terms=torch.ones(()))
    assert_close(angle_to_ones(x).cos().square(), energy, length=n, terms=torch.ones(()))
    assert_close(angle_between(x, torch.ones_like(x)), angle_to_ones(x), length=n, terms=torch.ones(()))
    assert (energy_along_ones(x) <= 1).all()


@pytest.mark.parametrize("angle", [0.0, 1e-14, 1e-8, 1.0, math.pi / 2, math.pi - 1e-8, math.pi])
def test_an_angle_between_rows_that_was_chosen(angle):
    x = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)
    y = 1e200 * torch.tensor([math.cos(angle), 0.0, math.sin(angle)], dtype=torch.float64)
    assert float(angle_between(x, y)) == pytest.approx(angle, rel=1e-14, abs=1e-30)


def test_a_zero_row_has_no_direction():
    zero, row = torch.zeros(3), torch.tensor([1.0, 2.0, 4.0])
    for function in (angle_to_ones, energy_along_ones):
        # The NaN stays in its row.
        assert function(torch.stack([zero, row])).isnan().tolist() == [True, False]
    assert angle_between(zero, row).isnan()
    assert angle_between(row, zero).isnan()


@pytest.mark.parametrize(
    ("name", "row"),
    [(name, row) for name in FUNCTIONS for row in DEGENERATE if row != "zero" or name in ("centre", "project_out")],
)
def test_values_and_gradients_are_finite_where_a_direction_is(name, row):
    function, x = FUNCTIONS[name], DEGENERATE[row].double()
    assert function(x).isfinite().all()
    assert torch.func.jacrev(function)(x).isfinite().all()
    assert torch.func.jacfwd(function)(x).isfinite().all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_and_transforms(name):
    assert_differentiable(FUNCTIONS[name], rows(3, 6))
    if name not in ("centre", "project_out"):
        # Linear maps leave no remainder.
        assert (taylor_slopes(FUNCTIONS[name], rows(6), rows(6, seed=3)) - 2).abs().max() < 0.1


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_kept_and_no_rows_are_no_trouble(name, dtype):
    function, x = FUNCTIONS[name], rows(4, 8).to(dtype)
    y = function(x)
    # A handful of roundings of the input's dtype.
    assert_close(y, function(x.double()), dtype=dtype, length=8)
    assert function(x[:0]).shape == (0, *y.shape[1:])


@pytest.mark.parametrize("n", [2, 3, 4, 9])
def test_the_helmert_basis_is_orthonormal_and_has_mean_zero(n):
    basis = helmert(n)
    assert basis.shape == (n, n - 1)
    assert (basis.mT @ basis - torch.eye(n - 1)).abs().max() < 1e-14
    assert basis.sum(0).abs().max() < 1e-14
    assert basis[:, -1].tolist() == pytest.approx([1 / math.sqrt(n * (n - 1))] * (n - 1) + [-math.sqrt((n - 1) / n)])
