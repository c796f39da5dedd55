"""Norms of gradients against torch's, for all that a model may hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normkit.watching.gradients import squares

CPU = torch.device("cpu")


def truth(tensor: Tensor) -> float:
    dense = tensor.to_dense()
    return float((torch.view_as_real(dense) if dense.is_complex() else dense).double().square().sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_sums_of_squares_are_those_of_float64(dtype: torch.dtype):
    tensors = [torch.randn(shape).to(dtype) for shape in ((3, 5), (7,), (), (0,), (4, 3, 2))]
    tensors.append(torch.randn(6, 4).to(dtype).t())
    assert squares(tensors, CPU).tolist() == pytest.approx([truth(each) for each in tensors], rel=1e-6)


def test_dtypes_and_gaps_keep_their_places():
    odd = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.randn(3, 4), (5, 4), check_invariants=True)
    tensors = [torch.randn(3).double() * 1e200, None, torch.randn(3, 3), odd, torch.randn(2).bfloat16(), None]
    found = squares(tensors, CPU)
    expected = [-1.0 if each is None else truth(each) for each in tensors]
    assert found.dtype == torch.float64
    # A square of 1e200 is no float64; what float32 cannot hold is not lost before.
    expected[0] = float("inf")
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert squares([torch.full((2,), 1e100, dtype=torch.float64)], CPU).tolist() == pytest.approx([2e200])


def test_without_tensors_there_is_nothing():
    assert squares([], CPU).shape == (0,)
    assert squares([None, None], CPU).tolist() == [-1.0, -1.0]


def test_what_is_not_finite_stays_so():
    assert not squares([torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf")])], CPU).isfinite().any()
