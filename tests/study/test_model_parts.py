import math

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

from helpers import assert_close
from normkit import LayerNorm, Norm, specs
from normkit.errors import InputError
from normkit.study.model_parts import BatchNorm, HyperplaneNorm, NoisyBatchNorm, norm_layer, random_hyperplanes


def test_a_spec_a_maker_and_no_norm():
    assert type(norm_layer(specs.TORCH_LAYER_NORM.replace(eps=1e-3), 8)) is LayerNorm
    assert norm_layer(specs.TORCH_LAYER_NORM.replace(eps=1e-3), 8).eps == 1e-3
    assert type(norm_layer(specs.LLAMA, 8)) is Norm
    assert isinstance(norm_layer(BatchNorm, 8), BatchNorm)
    x = torch.randn(2, 8)
    assert norm_layer(None, 8)(x) is x


def pair(**choices):
    """Ours and torch's, with the same gain and bias."""
    ours, theirs = BatchNorm(6, **choices).double(), nn.BatchNorm1d(6, **choices).double()
    if theirs.affine:
        nn.init.normal_(theirs.weight)
        nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(choices, shape, close):
    """Three steps of training, forward and backward, then evaluation."""
    ours, theirs = pair(**choices)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, slope = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
        x_ours, x_theirs = ((3 * x + 1).requires_grad_() for _ in range(2))
        y_ours, y_theirs = ours(x_ours), theirs(x_theirs.view(-1, 6)).view(shape)
        y_ours.backward(slope)
        y_theirs.backward(slope)
        close(y_ours, y_theirs)
        close(x_ours.grad, x_theirs.grad)
    gradients = [[parameter.grad for parameter in norm.parameters()] for norm in (ours, theirs)]
    states = [norm.state_dict().values() for norm in (ours, theirs)]
    for mine, own in (*zip(*gradients, strict=True), *zip(*states, strict=True)):
        close(mine, own)
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        close(ours(x), theirs(x.view(-1, 6)).view(shape))


def same(mine, own):
    assert torch.equal(mine, own)


def alike(mine, own):
    """Within the order of sums over the rows."""
    assert_close(mine.double(), own.double(), length=20)


CHOICES = [{}, {"eps": 0.1, "momentum": 0.3}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]


@pytest.mark.parametrize("shape", [(9, 6), (4, 5, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("choices", CHOICES)
def test_it_is_torch_s_over_rows(shape, choices):
    compare(choices, shape, same)


@pytest.fixture
def pooling(tmp_path, monkeypatch):
    """A group of one process that takes itself for one of several."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("pooling")
@pytest.mark.parametrize("choices", CHOICES)
def test_the_pooled_formula_is_torch_s(choices):
    compare(choices, (4, 5, 6), alike)


@pytest.mark.slow
@pytest.mark.usefixtures("pooling")
def test_the_pooled_gradient_is_the_derivative():
    norm = BatchNorm(3).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, x)
    assert torch.autograd.gradgradcheck(norm, x)


@pytest.mark.usefixtures("pooling")
def test_sixteen_bits_are_pooled_in_thirty_two():
    x = (torch.randn(40, 6) + 100).bfloat16()
    y = BatchNorm(6)(x)
    expected = nn.functional.batch_norm(x.float(), None, None, training=True)
    assert y.dtype == torch.bfloat16
    assert_close(y, expected.bfloat16(), units=1)


def test_a_single_row_is_one_line():
    with pytest.raises(InputError, match=r"^BatchNorm needs at least 2 rows in training, got 1; give a larger batch$"):
        BatchNorm(4)(torch.ones(1, 4))
    assert BatchNorm(4).eval()(torch.ones(1, 4)).shape == (1, 4)
    assert BatchNorm(4)(torch.ones(1, 2, 4)).shape == (1, 2, 4)


N = 8


def test_a_hyperplane_norm_is_layer_norm_or_rms_norm():
    x = torch.randn(5, N, dtype=torch.float64) + 2
    norm = HyperplaneNorm(torch.full((N, 1), 1 / math.sqrt(N), dtype=torch.float64), eps=1e-3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, N))
        norm.bias.copy_(torch.linspace(-1, 1, N))
    expected = F.layer_norm(x, (N,), norm.weight, norm.bias, 1e-3)
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    x = torch.randn(5, N, dtype=torch.float64)
    norm = HyperplaneNorm(torch.zeros(N, 0, dtype=torch.float64)).double()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (N,), eps=1e-5), rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match="8 directions leave nothing of a row of 8 features"):
        HyperplaneNorm(torch.eye(N))


@pytest.mark.parametrize("count", [1, 3])
def test_rows_leave_orthogonal_to_every_direction_and_of_rms_1(count):
    norm = random_hyperplanes(count, seed=0)(N)
    torch.testing.assert_close(norm.directions.mT @ norm.directions, torch.eye(count), rtol=0, atol=1e-6)
    y = norm(torch.randn(5, N))
    torch.testing.assert_close(y @ norm.directions, torch.zeros(5, count), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(5), rtol=1e-3, atol=0)


def test_directions_are_shared_or_own_and_can_be_saved():
    shared, own = random_hyperplanes(seed=1), random_hyperplanes(seed=1, is_shared=False)
    assert torch.equal(shared(N).directions, shared(N).directions)
    assert not torch.equal(own(N).directions, own(N).directions)
    assert not torch.equal(shared(N).directions, random_hyperplanes(seed=2)(N).directions)
    # safetensors refuses what is not contiguous, as the Q of a QR decomposition is not.
    norm = random_hyperplanes(3, seed=0)(N)
    again = random_hyperplanes(3, seed=1)(N)
    again.load_state_dict(safetensors.torch.load(safetensors.torch.save(norm.state_dict())))
    assert torch.equal(again.directions, norm.directions)


def test_noise_is_new_with_each_step_and_layer_the_same_in_a_continued_run_and_absent_in_evaluation():
    x = torch.randn(64, 5)
    plain = BatchNorm(5)(x)
    norm = NoisyBatchNorm(5, noise=0.5, seed=(1, 0))
    first, second = norm(x), norm(x)
    other = NoisyBatchNorm(5, noise=0.5, seed=(1, 1))(x)
    for noisy in (first, second, other):
        shift, scale = noisy.mean(0), noisy.std(0, correction=0) / plain.std(0, correction=0)
        torch.testing.assert_close(noisy, plain * scale + shift, atol=1e-5, rtol=1e-5)
        assert ((shift.abs() <= 0.5) & (scale >= 1 - 1e-5) & (scale <= 1.5 + 1e-5)).all()
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, other)
    x = torch.randn(64, 5)
    norm = NoisyBatchNorm(5, noise=1.0, seed=(0, 2))
    norm(x)
    continued = NoisyBatchNorm(5, noise=1.0, seed=(0, 2))
    continued.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), continued(x))
    plain = BatchNorm(5)
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm.eval()(x), plain.eval()(x))
