"""Vectors and bases of the page, against torch and normkit.geometry."""

import math

import pytest
import torch

from normkit.geometry import Hyperplane

pytestmark = pytest.mark.browser


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_products_sums_and_lengths(modules):
    a, b = [1.0, -2.0, 3.5], [0.25, 4.0, -1.0]
    assert modules("linear.js", "dot", a, b) == -11.25
    assert modules("linear.js", "add", a, b) == [1.25, 2.0, 2.5]
    assert modules("linear.js", "minus", a, b) == [0.75, -6.0, 4.5]
    assert modules("linear.js", "times", a, b) == [0.25, -8.0, -3.5]
    assert modules("linear.js", "scale", a, -2) == [-2.0, 4.0, -7.0]
    assert modules("linear.js", "mean", [1, 2, 6]) == 3
    assert modules("linear.js", "cross", a, b) == torch.linalg.cross(tensor(a), tensor(b)).tolist()
    assert modules("linear.js", "matrixVector", [a, b], [1, 1, 2]) == [6.0, 2.25]
    assert modules("linear.js", "transpose", [a, b]) == [[1.0, 0.25], [-2.0, 4.0], [3.5, -1.0]]


def test_lengths_neither_overflow_nor_vanish_and_a_unit_vector_has_length_1(modules):
    rows = [[3.0, 4.0], [3e-200, 4e-200], [3e200, -4e200], [0.0, 0.0], [], [5e-324], [math.inf, 1.0], [math.nan, 1.0]]
    lengths = modules.each("linear.js", "norm", [[row] for row in rows])
    assert lengths == pytest.approx([5.0, 5e-200, 5e200, 0.0, 0.0, 5e-324, math.inf, math.nan], rel=1e-15, nan_ok=True)
    assert modules("linear.js", "unit", [3, 4]) == [0.6, 0.8]
    assert modules("linear.js", "unit", [0, 0, 0]) == [0, 0, 0]
    assert modules("linear.js", "unit", [0, -1e-200]) == [0, -1]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_helmert_rows_are_an_orthonormal_basis_of_the_zero_mean_plane(modules, n):
    basis = tensor(modules("linear.js", "helmert", n)).reshape(n - 1, n)
    torch.testing.assert_close(basis @ basis.T, torch.eye(n - 1, dtype=torch.float64), rtol=0, atol=1e-15)
    assert basis.sum(1).abs().max() <= 1e-15 if n > 1 else True


def test_a_basis_of_any_hyperplane(modules):
    ones = [1.0] * 4
    normals = [[1.0, 0.0, 0.0], [-2.0, 0.5, 1.0], [0.3, -0.3, 0.0], [1.0, 1.0, 1.0], [-5.0, -5.0, -5.0], [2.0, -7.0]]
    normals += [[1.0, -2.0, 3.0, 0.5], ones, [1e-200, 0.0, 0.0, 0.0]]
    for normal, rows in zip(normals, modules.each("linear.js", "hyperplaneBasis", [[u] for u in normals]), strict=True):
        basis = tensor(rows)
        torch.testing.assert_close(basis @ basis.T, torch.eye(len(normal) - 1, dtype=torch.float64), rtol=0, atol=2e-15)
        assert Hyperplane(tensor(normal)).contains(basis).all()


def test_the_basis_is_helmerts_turned_no_further_than_needed(modules):
    for normal in ([1, 1, 1], [-2, -2, -2], [0, 0, 0]):
        assert (
            tensor(modules("linear.js", "hyperplaneBasis", normal))
            .sub(tensor(modules("linear.js", "helmert", 3)))
            .abs()
            .max()
            <= 1e-15
        )
    # A vector orthogonal to both 1 and the normal lies on the axis of the rotation: its coordinates stay.
    normal, axis = [1.0, 2.0, 6.0], [4.0, -5.0, 1.0]
    turned, plain = (
        tensor(modules("linear.js", name, given)) @ tensor(axis)
        for name, given in [("hyperplaneBasis", normal), ("helmert", 3)]
    )
    torch.testing.assert_close(turned, plain, rtol=1e-14, atol=1e-14)


def test_eigenvectors_of_symmetric_matrices(modules):
    torch.manual_seed(0)
    squares = torch.randn(20, 3, 3, dtype=torch.float64)
    matrices = [(a @ a.T).tolist() for a in squares]
    matrices += [torch.diag(tensor([1.0, 5.0, 2.0])).tolist(), [[0.0] * 3] * 3, [[1.0] * 3] * 3]
    matrices += [[[0, 1, 0], [1, 0, 0], [0, 0, -3]], [[1, 1e-200, 0], [1e-200, 1, 0], [0, 0, 1]]]
    for matrix, found in zip(
        matrices, modules.each("linear.js", "symmetricEigen3", [[m] for m in matrices]), strict=True
    ):
        values, vectors = tensor(found["values"]), tensor(found["vectors"])
        size = float(values.abs().max()) + 1e-300
        expected = torch.linalg.eigvalsh(tensor(matrix)).flip(0)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-14 * size)
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-14)
        torch.testing.assert_close(vectors.T @ torch.diag(values) @ vectors, tensor(matrix), rtol=0, atol=1e-14 * size)
