import math

import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

from normkit.errors import InputError
from normkit.study.hyperplane_norm import HyperplaneNorm, random_hyperplanes

N = 8


def test_along_all_ones_it_is_layer_norm():
    x = torch.randn(5, N, dtype=torch.float64) + 2
    norm = HyperplaneNorm(torch.full((N, 1), 1 / math.sqrt(N), dtype=torch.float64), eps=1e-3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, N))
        norm.bias.copy_(torch.linspace(-1, 1, N))
    expected = F.layer_norm(x, (N,), norm.weight, norm.bias, 1e-3)
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_without_a_direction_it_is_rms_norm():
    x = torch.randn(5, N, dtype=torch.float64)
    norm = HyperplaneNorm(torch.zeros(N, 0, dtype=torch.float64)).double()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (N,), eps=1e-5), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_leave_orthogonal_to_every_direction_and_of_rms_1(count):
    norm = random_hyperplanes(count, seed=0)(N)
    torch.testing.assert_close(norm.directions.mT @ norm.directions, torch.eye(count), rtol=0, atol=1e-6)
    y = norm(torch.randn(5, N))
    torch.testing.assert_close(y @ norm.directions, torch.zeros(5, count), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(5), rtol=1e-3, atol=0)


def test_what_is_shared_is_the_same_for_every_norm_and_own_directions_differ():
    shared, own = random_hyperplanes(seed=1), random_hyperplanes(seed=1, is_shared=False)
    assert torch.equal(shared(N).directions, shared(N).directions)
    assert not torch.equal(own(N).directions, own(N).directions)
    assert not torch.equal(shared(N).directions, random_hyperplanes(seed=2)(N).directions)


def test_directions_that_leave_nothing_are_refused():
    with pytest.raises(InputError, match="8 directions leave nothing of a row of 8 features"):
        HyperplaneNorm(torch.eye(N))


def test_its_state_can_be_saved_and_read_again():
    # safetensors refuses what is not contiguous, as the Q of a QR decomposition is not.
    norm = random_hyperplanes(3, seed=0)(N)
    again = random_hyperplanes(3, seed=1)(N)
    again.load_state_dict(safetensors.torch.load(safetensors.torch.save(norm.state_dict())))
    assert torch.equal(again.directions, norm.directions)
