"""Hadamard matrices: orthogonal exactly, the same bits for any number of columns, and rotations of known vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normkit.checkpoint.hadamard import ROWS, construction, paley, rotate_columns, signs, williamson


@pytest.mark.parametrize("size", [1, 2, 4, 12, 16, 20, 28, 32, 36, 44, 52, 60, 64, 80, 92, 96, 104, 128, 180, 200, 576])
def test_the_matrix_of_an_order_is_orthogonal_and_has_entries_of_one_size(size):
    found = rotate_columns(np.eye(size), "seed")
    assert np.abs(found @ found.T - np.eye(size)).max() < 1e-14
    assert np.abs(np.abs(found) - size**-0.5).max() < 2e-16
    assert not np.array_equal(found, rotate_columns(np.eye(size), "other")) or size < 3


@pytest.mark.parametrize(("order", "kind"), [(4, 1), (12, 1), (12, 2), (20, 1), (28, 2), (36, 2), (60, 1), (284, 1)])
def test_paleys_matrices_are_exact(order, kind):
    found = paley(order, kind).astype(np.int64)
    assert set(np.unique(found)) == {-1, 1}
    assert np.array_equal(found @ found.T, order * np.eye(order, dtype=np.int64))


@pytest.mark.parametrize("order", ROWS)
def test_williamsons_matrices_are_exact_and_of_orders_that_paley_lacks(order):
    found = williamson(order).astype(np.int64)
    assert set(np.unique(found)) == {-1, 1}
    assert np.array_equal(found @ found.T, order * np.eye(order, dtype=np.int64))
    assert str(construction(2 * order)) == f"sylvester 2 x williamson {order}"


def test_the_widths_of_models_are_known_and_odd_ones_are_not():
    widths = [
        576,
        640,
        768,
        896,
        960,
        1152,
        1408,
        1536,
        2304,
        2560,
        2880,
        3072,
        3584,
        3840,
        4096,
        4544,
        5120,
        7168,
        8192,
    ]
    for width in (*widths, 64, 72, 80, 96, 112, 128, 192, 256):
        made = construction(width)
        assert made is not None
        assert made.sylvester * made.order == width
    assert [str(construction(width)) for width in (64, 576)] == ["sylvester 64", "sylvester 16 x paley-2 36"]
    for width in (0, 3, 6, 10, 18, 54, 2 * 4097):
        assert construction(width) is None


def test_bits_do_not_depend_on_how_many_columns_are_rotated_together():
    draw = np.random.default_rng(0)
    columns = draw.standard_normal((576, 40)) * np.exp(8 * draw.standard_normal((1, 40)))
    whole = rotate_columns(columns.copy(), "seed")
    parts = [rotate_columns(np.ascontiguousarray(columns[:, at : at + 7]), "seed") for at in range(0, 40, 7)]
    assert np.array_equal(whole, np.concatenate(parts, axis=1))


def test_sums_are_as_exact_as_float64_is():
    mpmath = pytest.importorskip("mpmath")
    columns = np.random.default_rng(1).standard_normal((36, 2))
    found = rotate_columns(columns.copy(), "seed")
    matrix, scale = paley(36, 2), mpmath.sqrt(36)
    for row in range(36):
        exact = mpmath.fsum(
            mpmath.mpf(matrix[row, at]) * signs("seed", 36)[at] * mpmath.mpf(columns[at, 0]) for at in range(36)
        )
        assert abs(found[row, 0] - exact / scale) <= 4e-16 * abs(exact / scale)


def test_signs_are_those_of_sha_256_whatever_the_versions_of_libraries():
    assert "".join("-" if sign < 0 else "+" for sign in signs("0/stream", 16)) == "++++--+++++-+--+"
    assert abs(float(signs("0/stream", 4096).mean())) < 0.1
    assert torch.equal(torch.from_numpy(signs("0/stream", 300))[:16], torch.from_numpy(signs("0/stream", 16)))
