from __future__ import annotations

import math
from collections.abc import Sequence

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normkit.errors import DtypeError, InputError, ShapeError
from normkit.geometry import axes, downdate_eigenvalues, downdate_eigenvectors

UNIT = torch.finfo(torch.float64).eps
GAINS = {
    "random": [0.3, -1.7, 0.9, 2.4, -0.05, 1.1],
    "clustered at 1e-9": [1 + 1e-9 * k for k in range(7)],
    "neighbouring floats": [1.0, 1.0 + UNIT, 1.0 + 2 * UNIT, 1.0 + 5 * UNIT],
    "two clusters": [1e-6, 1e-6 * (1 + 1e-12), 1.0, 1.0 - 1e-13, 1.0],
    "twelve decades": [10.0**k for k in range(-8, 4)],
    "ties": [2.0, -2.0, 1.0, 1.0, 2.0, -1.0, 3.0],
    "all equal": [0.7] * 5,
    "1 zero": [0.0, 1.0, 2.0, -3.0],
    "1 zero, the rest tiny and large": [0.0, 1e-9, 1.0, -3e5],
    "3 zeros": [0.0, 1.0, 0.0, 2.0, 1.0, 0.0],
    "all zero": [0.0, 0.0, 0.0],
    "one": [5.0],
    "two": [1.0, 3.0],
    "large": [1e150, 2e150, -3e150],
    "small": [1e-150, 2e-150, -3e-150],
}


def wide(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def downdate(gain: Tensor) -> Tensor:
    return torch.diag(gain.square()) - torch.outer(gain, gain) / len(gain)


def exact_eigenpairs(gain: list[float]) -> tuple[list[float], Tensor]:
    n = len(gain)
    with mpmath.workdps(60):
        values = [mpmath.mpf(value) for value in gain]
        matrix = mpmath.matrix(n, n)
        for i in range(n):
            for j in range(n):
                matrix[i, j] = (values[i] ** 2 if i == j else 0) - values[i] * values[j] / n
        found, vectors = mpmath.eigsy(matrix)
        return [float(value) for value in found], wide([[float(vectors[i, j]) for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("gain", GAINS.values(), ids=GAINS)
def test_eigenvalues_have_all_their_digits_and_eigenvectors_are_orthogonal_however_close_the_gains(gain):
    exact, _ = exact_eigenpairs(gain)
    zeros = max(1, gain.count(0.0))
    found, vectors = downdate_eigenvalues(wide(gain)).tolist(), downdate_eigenvectors(wide(gain))
    assert found[:zeros] == [0.0] * zeros
    # A few roundings: of the gap to the pole, of its share, of their sum.
    assert found[zeros:] == pytest.approx(exact[zeros:], rel=4 * UNIT * math.sqrt(len(gain)), abs=0)
    assert (vectors.T @ vectors - torch.eye(len(gain))).abs().max() < 4 * UNIT


@pytest.mark.parametrize("gain", [GAINS["random"], GAINS["twelve decades"], GAINS["two"]])
def test_they_solve_the_equation_of_the_docstring(gain):
    def excess(t: mpmath.mpf) -> mpmath.mpf:
        return mpmath.fsum(mpmath.mpf(g) ** 2 / (mpmath.mpf(g) ** 2 - t) for g in gain) - len(gain)

    with mpmath.workdps(60):
        assert excess(mpmath.mpf(0)) == 0
        for root in downdate_eigenvalues(wide(gain)).tolist()[1:]:
            below, above = (mpmath.mpf(root) * (1 + sign * mpmath.mpf("1e-14")) for sign in (-1, 1))
            assert excess(below) * excess(above) < 0


def test_they_are_the_critical_points_of_the_polynomial_with_roots_at_the_squares():
    gain = wide([0.5, 1.0, -2.0, 3.0])
    polynomial = torch.zeros(1, dtype=torch.float64) + 1
    for square in gain.square():
        polynomial = torch.cat([polynomial, torch.zeros(1)]) - square * torch.cat([torch.zeros(1), polynomial])
    derivative = polynomial[:-1] * torch.arange(4, 0, -1)
    roots = downdate_eigenvalues(gain)[1:]
    values = sum(coefficient * roots**power for power, coefficient in zip((3, 2, 1, 0), derivative, strict=True))
    assert (values.abs() < 1e-12 * derivative.abs().sum()).all()


@pytest.mark.parametrize("n", [2, 64, 512])
def test_dense_linear_algebra_agrees(n):
    gain = torch.randn(n, dtype=torch.float64)
    dense = torch.linalg.eigvalsh(downdate(gain))
    assert (downdate_eigenvalues(gain) - dense).abs().max() < 2 * UNIT * math.sqrt(n) * dense[-1]


def test_riechers_form_agrees():
    gain = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.2], dtype=torch.float64)
    normal = torch.nn.functional.normalize(1 / gain, dim=0)
    onto = torch.eye(5, dtype=torch.float64) - torch.outer(normal, normal)
    theirs = torch.linalg.eigvalsh(onto @ torch.diag(gain**-2) @ onto)[1:]
    assert downdate_eigenvalues(gain)[1:].tolist() == pytest.approx((1 / theirs).flip(0).tolist(), rel=1e-13)


magnitudes = st.sampled_from([0.0, 1.0, -1.0, 2.0]) | st.floats(-4, 4).filter(lambda g: g == 0 or abs(g) > 1e-6)


@pytest.mark.slow
@given(st.lists(magnitudes, min_size=1, max_size=12))
def test_any_gains_interlace_keep_the_trace_and_have_eigenvectors(values):
    gain, n = wide(values), len(values)
    squares = gain.square().sort().values
    found, vectors = downdate_eigenvalues(gain), downdate_eigenvectors(gain)
    assert found[0] == 0
    assert (found[1:] >= squares[:-1]).all()
    assert (found <= squares).all()
    assert float(found.sum()) == pytest.approx(float(squares.sum()) * (1 - 1 / n), rel=4 * UNIT * n)
    assert torch.equal(downdate_eigenvalues(-gain.flip(0)), found)
    assert (vectors.T @ vectors - torch.eye(n)).abs().max() < 16 * UNIT * math.sqrt(n)
    defect = downdate(gain) @ vectors - vectors * found
    assert defect.abs().max() <= 16 * UNIT * math.sqrt(n) * float(gain.square().max())


@pytest.mark.parametrize("name", ["random", "clustered at 1e-9", "neighbouring floats", "twelve decades", "1 zero"])
def test_eigenvectors_have_all_their_digits(name):
    _, exact = exact_eigenpairs(GAINS[name])
    vectors = downdate_eigenvectors(wide(GAINS[name]))
    signs = (exact * vectors).sum(0).sign()
    assert (vectors - exact * signs).abs().max() < 8 * UNIT


def test_the_first_eigenvector_is_the_normal():
    vectors = downdate_eigenvectors(wide([1.0, -2.0, 4.0]))
    assert torch.allclose(vectors[:, 0], torch.nn.functional.normalize(wide([1.0, -0.5, 0.25]), dim=0))
    assert downdate_eigenvectors(wide([1.0, 0.0, 4.0]))[:, 0].tolist() == [0.0, 1.0, 0.0]


def test_pieces_of_bounded_size_change_nothing(monkeypatch):
    gain = torch.randn(50, dtype=torch.float64).round(decimals=1)
    whole = downdate_eigenvalues(gain), downdate_eigenvectors(gain)
    monkeypatch.setattr(axes, "_CHUNK", 120)
    assert [step.stop - step.start for step in axes._parts(5, 50)] == [2, 2, 2]
    pieces = downdate_eigenvalues(gain), downdate_eigenvectors(gain)
    assert all(torch.allclose(one, other, rtol=1e-14, atol=1e-15) for one, other in zip(whole, pieces, strict=True))
    # float32 is kept, and rounded once.
    for function in (downdate_eigenvalues, downdate_eigenvectors):
        assert torch.equal(function(gain.float()), function(gain.float().double()).float())


@pytest.mark.parametrize("function", [downdate_eigenvalues, downdate_eigenvectors])
def test_what_is_no_gain_is_refused(function):
    with pytest.raises(ShapeError, match=r"gain of shape \(n,\) is needed, got shape \(2, 3\)"):
        function(torch.ones(2, 3))
    with pytest.raises(DtypeError, match="floating dtype"):
        function(torch.ones(3, dtype=torch.int64))
    with pytest.raises(InputError, match="finite gains are needed"):
        function(torch.tensor([1.0, torch.inf]))


@pytest.mark.parametrize(
    "gain", [torch.linspace(0.5, 2, 33).double(), torch.tensor([0.0, 0.0, 1.0, 1.0, -2.0, 3.0]).double()]
)
def test_a_few_eigenvalues_are_those_of_all(gain):
    n = len(gain)
    places = torch.tensor([n - 1, 0, n // 2, 1])
    assert torch.equal(downdate_eigenvalues(gain, places), downdate_eigenvalues(gain)[places])
