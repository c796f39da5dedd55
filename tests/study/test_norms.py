import pytest
import torch
from torch import nn

from helpers import assert_close
from normkit import LayerNorm, Norm, specs
from normkit.errors import InputError
from normkit.study.norms import BatchNorm, norm_layer


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
