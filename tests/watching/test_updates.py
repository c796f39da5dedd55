"""How far a parameter moved, on a sample of it."""

from __future__ import annotations

import pytest
import torch

from normkit.watching.updates import UpdateSampler

CPU = torch.device("cpu")


def test_a_small_parameter_is_compared_whole():
    parameters = [torch.randn(3, 5), torch.randn(4).bfloat16(), torch.zeros(0), torch.randn(6, 2).t()]
    before = [each.clone() for each in parameters]
    sampler = UpdateSampler(parameters, CPU)
    assert not sampler.is_waiting
    sampler.before()
    assert sampler.is_waiting
    for each in parameters:
        each.add_(0.25)
    moved = sampler.after()
    for line, old, new in zip(moved.tolist(), before, parameters, strict=True):
        change = (new.double() - old.double()).square().sum()
        assert line == pytest.approx([float(change), float(old.double().square().sum())], rel=1e-5)
    assert not sampler.is_waiting


@pytest.mark.parametrize("size", [1023, 1025, 2047, 5000, 1_000_000])
def test_a_large_one_is_sampled_evenly_to_its_end(size: int):
    parameter = torch.ones(size)
    sampler = UpdateSampler([parameter], CPU)
    sampler.before()
    parameter[size // 2 :] += 1
    ((moved, before),) = sampler.after().tolist()
    assert 500 <= before <= 1024
    assert moved / before == pytest.approx(0.5, abs=0.01)


def test_a_parameter_whose_storage_is_another_is_read_anew():
    parameter = torch.nn.Parameter(torch.ones(4))
    sampler = UpdateSampler([parameter], CPU)
    sampler.before()
    parameter.data = torch.full((4,), 3.0)
    assert sampler.after().tolist() == [[16.0, 4.0]]
