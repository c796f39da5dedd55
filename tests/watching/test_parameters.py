"""What each parameter is, its sum of squares against torch's, and how far a sample of it moved."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from normkit.watching.parameters import UpdateSampler, WatchedParameter, sums_of_squares, watched_parameters
from normkit.watching.startup import surveyed
from small_training import Transformer

CPU = torch.device("cpu")


def watched(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, WatchedParameter]:
    structure = surveyed(model, {0: torch.zeros(2, 9, dtype=torch.long)})
    return {each.path: each for each in watched_parameters(model, structure, optimizers)}


@pytest.mark.slow
def test_gains_and_biases_belong_to_their_norms():
    found = watched(Transformer())
    assert {path: (each.kind, each.site, each.block) for path, each in found.items() if "norm" in path} == {
        "blocks.0.norm_1.weight": ("gain", "blocks.0.norm_1", 0),
        "blocks.0.norm_1.bias": ("bias of a norm", "blocks.0.norm_1", 0),
        "blocks.0.norm_2.weight": ("gain", "blocks.0.norm_2", 0),
        "blocks.1.norm_1.weight": ("gain", "blocks.1.norm_1", 1),
        "blocks.1.norm_1.bias": ("bias of a norm", "blocks.1.norm_1", 1),
        "blocks.1.norm_2.weight": ("gain", "blocks.1.norm_2", 1),
        "norm.weight": ("gain", "norm", None),
        "norm.bias": ("bias of a norm", "norm", None),
    }
    kinds = {path: found[path].kind for path in ("embedding.weight", "head.weight", "head.bias")}
    assert kinds == {"embedding.weight": "embedding", "head.weight": "weight", "head.bias": "bias"}


def test_a_tied_parameter_is_there_once_and_packed_integers_are_not():
    model = Transformer()
    model.head.weight = model.embedding.weight
    model.packed = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    found = watched(model)
    assert "embedding.weight" in found
    assert not {"head.weight", "packed"} & found.keys()


def test_settings_are_those_of_the_group_as_it_is_now():
    model = Transformer()
    optimizer = torch.optim.SGD([model.norm.weight], lr=0.5)
    found = watched(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    assert found["norm.weight"].setting("lr") == 0.125
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    assert found["norm.weight"].setting("lr") == 0.25
    for odd in (None, (1e-30, 1e-3)):
        optimizer.param_groups[0]["lr"] = odd
        assert math.isnan(found["norm.weight"].setting("lr"))
    assert math.isnan(found["norm.bias"].setting("lr"))
    assert (found["norm.weight"].group_index, found["norm.bias"].group_index) == (0, -1)
    assert found["norm.bias"].optimizer is None


def truth(tensor: Tensor) -> float:
    dense = tensor.to_dense()
    return float((torch.view_as_real(dense) if dense.is_complex() else dense).double().square().sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_sums_of_squares_are_those_of_float64(dtype: torch.dtype):
    tensors = [torch.randn(shape).to(dtype) for shape in ((3, 5), (7,), (), (0,), (4, 3, 2))]
    tensors.append(torch.randn(6, 4).to(dtype).t())
    assert sums_of_squares(tensors, CPU).tolist() == pytest.approx([truth(each) for each in tensors], rel=1e-6)


def test_dtypes_and_gaps_keep_their_places():
    odd = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.randn(3, 4), (5, 4), check_invariants=True)
    tensors = [torch.randn(3).double() * 1e200, None, torch.randn(3, 3), odd, torch.randn(2).bfloat16(), None]
    found = sums_of_squares(tensors, CPU)
    expected = [-1.0 if each is None else truth(each) for each in tensors]
    assert found.dtype == torch.float64
    # A square of 1e200 is no float64; what float32 cannot hold is not lost before.
    expected[0] = float("inf")
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert sums_of_squares([torch.full((2,), 1e100, dtype=torch.float64)], CPU).tolist() == pytest.approx([2e200])


def test_sums_of_no_tensors():
    assert sums_of_squares([], CPU).shape == (0,)
    assert sums_of_squares([None, None], CPU).tolist() == [-1.0, -1.0]


def test_values_that_are_not_finite_stay_so():
    assert not sums_of_squares([torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf")])], CPU).isfinite().any()


def squared(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def test_a_small_parameter_is_compared_whole():
    parameters = [torch.randn(3, 5), torch.randn(4).bfloat16(), torch.zeros(0), torch.randn(6, 2).t()]
    before = [each.clone() for each in parameters]
    sampler = UpdateSampler(parameters, CPU)
    assert not sampler.moved().any()
    assert not sampler.begin().any()
    for each in parameters:
        each.add_(0.25)
    for line, old, new in zip(sampler.moved().tolist(), before, parameters, strict=True):
        assert line == pytest.approx([squared(new.double() - old.double()), squared(old)], rel=1e-5)


def test_changes_by_no_optimizer_are_told_apart():
    parameter, other = torch.ones(4), torch.full((9,), 2.0, dtype=torch.float64)
    sampler = UpdateSampler([parameter, other], CPU)
    sampler.begin()
    parameter.add_(1.0)
    sampler.stepped()
    other.mul_(3.0)
    # Of the step only what the optimizer did, and of what follows only what came after it.
    assert sampler.moved().tolist() == [[4.0, 4.0], [0.0, 36.0]]
    assert sampler.begin().tolist() == [[0.0, 16.0], [144.0, 36.0]]
    assert sampler.moved().tolist() == [[0.0, 16.0], [0.0, 324.0]]


@pytest.mark.parametrize("size", [1023, 1025, 2047, 5000, 1_000_000])
def test_a_large_one_is_sampled_evenly_to_its_end(size: int):
    parameter = torch.ones(size)
    sampler = UpdateSampler([parameter], CPU)
    sampler.begin()
    parameter[size // 2 :] += 1
    ((moved, before),) = sampler.moved().tolist()
    assert 500 <= before <= 1024
    assert moved / before == pytest.approx(0.5, abs=0.01)


def test_a_parameter_whose_storage_is_another_is_read_anew():
    parameter = torch.nn.Parameter(torch.ones(4))
    sampler = UpdateSampler([parameter], CPU)
    sampler.begin()
    parameter.data = torch.full((4,), 3.0)
    assert sampler.moved().tolist() == [[16.0, 4.0]]
    parameter.data = torch.ones(5)
    assert not sampler.moved().any()
    assert not sampler.begin().any()
    assert sampler.moved().tolist() == [[0.0, 5.0]]
