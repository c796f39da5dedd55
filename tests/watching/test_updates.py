"""How far a parameter moved, on a sample of it."""

from __future__ import annotations

import pytest
import torch

from normkit.watching.updates import UpdateSampler

CPU = torch.device("cpu")


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


def test_what_no_optimizer_changed_is_told_apart():
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
