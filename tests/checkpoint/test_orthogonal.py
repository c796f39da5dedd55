"""Orthogonal matrices of a file: what is taken, and products whose bits do not depend on an order of sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from normkit.checkpoint.orthogonal import asked_matrices, times_transposed
from normkit.errors import InputError
from planned_models import model_of, plan_of


def turn(size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0].to(dtype)


@pytest.mark.parametrize("size", [1, 6, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_product_is_as_near_as_float64_allows_whatever_stands_beside_a_column(size, dtype):
    matrix, generator = turn(size, dtype), torch.Generator().manual_seed(1)
    columns = torch.randn(size, 7, generator=generator, dtype=torch.float64)
    # Columns of very different sizes, and numbers of very different sizes in a column.
    columns *= torch.exp2(torch.arange(7, dtype=torch.float64) * 40 - 120)
    columns[::2] *= 2.0**-30
    found = times_transposed(matrix, columns)
    exact = matrix.numpy().astype(np.longdouble).T @ columns.numpy().astype(np.longdouble)
    # Three parts of 21 bits or more reach below the last place of float64; adding five products rounds five times.
    error = np.abs(found.numpy() - exact).max(0) / np.abs(columns.numpy()).max(0)
    assert error.max() <= 6 * 2.0**-53 * math.sqrt(size)
    for place in range(7):
        assert torch.equal(times_transposed(matrix, columns[:, place : place + 1].contiguous())[:, 0], found[:, place])
    backwards = torch.arange(size - 1, -1, -1)
    assert torch.equal(times_transposed(matrix[backwards], columns[backwards].contiguous()), found)


def test_matrices_that_are_not_orthogonal_or_do_not_fit_are_one_line():
    good = turn(32)
    slightly = good.clone()
    slightly[0, 0] += 1e-9
    model = model_of("llama", hidden_size=32, num_attention_heads=4, head_dim=8, num_key_value_heads=2)
    for given, words in (
        (
            {"R1": slightly},
            r"'R1' of the rotations is not orthogonal: R\^T R - 1 reaches .*e-10, 3.55e-15 may be left by rounding",
        ),
        ({"R1": good[:, :5]}, "expected a square matrix in 'R1' of the rotations, got 32 x 5"),
        ({"R1": good.half()}, "expected a matrix of F32, F64 in 'R1' of the rotations, got F16"),
        ({"R1": good[0]}, r"expected a matrix of F32, F64 in 'R1' of the rotations, got F64 of shape \(32,\)"),
        ({"R1": good * torch.nan}, "'R1' of the rotations holds NaN or infinity"),
        ({"R1": good, "R3": good}, "expected rotations called R1, or PATH.R2 for an attention, got 'R3'"),
        ({"R1": turn(30)}, "expected R1 of 32 x 32 in the rotations, got 30 x 30"),
        ({"model.layers.0.self_attn.R2": good}, "expected model.layers.0.self_attn.R2 of 8 x 8"),
        ({"model.layers.9.self_attn.R2": good}, "is for no attention of the model, such as model.layers.0.self_attn"),
    ):
        with pytest.raises(InputError, match=words):
            plan_of(model, "rotate", matrix=asked_matrices(given))
    with pytest.raises(InputError, match="a matrix is for rotate, in place of a seed"):
        plan_of(model, "rotate", matrix=asked_matrices(good), seed=3)
    with pytest.raises(InputError, match="a matrix is for rotate, in place of a seed"):
        plan_of(model, "gain", matrix=asked_matrices(good))
    # A float32 matrix is orthogonal as far as float32 goes, and the plan says how far.
    found = asked_matrices(turn(32, torch.float32))
    assert 1e-9 < found.deviation < 32 * 2.0**-24
    assert "the rotations of the file are orthogonal to" in plan_of(model, "rotate", matrix=found).remarks[-1]
