import pytest
import torch
from torch.nn import functional as F

from normkit import specs
from normkit.errors import InputError
from normkit.study.norms import BatchNorm
from normkit.study.perceptron import MLP, MLPConfig


@pytest.mark.parametrize(
    ("activation", "apply"), [("relu", torch.relu), ("tanh", torch.tanh), ("linear", torch.nn.Identity())]
)
def test_it_is_linear_norm_activation(activation, apply):
    model = MLP(MLPConfig(inputs=3, width=5, layers=2, outputs=4, activation=activation), seed=1)
    x = expected = torch.randn(7, 3)
    for linear in model.hidden:
        expected = apply(F.layer_norm(linear(expected), (5,)))
    torch.testing.assert_close(model(x), model.output(expected))


def test_without_a_norm_there_is_none():
    model = MLP(MLPConfig(inputs=3, width=5, layers=1, norm=None, activation="linear"))
    x = torch.randn(7, 3)
    torch.testing.assert_close(model(x), model.output(model.hidden[0](x)))


def test_models_of_one_seed_share_their_weights_whatever_their_norms():
    models = [MLP(MLPConfig(norm=norm), seed=3) for norm in (None, specs.TORCH_RMS_NORM, BatchNorm)]
    other = MLP(MLPConfig(norm=None), seed=4)
    for path, weight in models[0].named_parameters():
        assert all(torch.equal(weight, dict(model.named_parameters())[path]) for model in models[1:])
    assert not torch.equal(models[0].output.weight, other.output.weight)


@pytest.mark.parametrize(("activation", "variance"), [("relu", 4.0), ("tanh", 2.0)])
def test_weights_before_a_relu_have_twice_the_variance(activation, variance):
    model = MLP(MLPConfig(inputs=200, width=300, layers=1, norm=None, activation=activation))
    # 60,000 draws: the variance is off by 0.6 %, one standard deviation.
    assert model.hidden[0].weight.var().item() == pytest.approx(variance / 500, rel=0.03)
    assert model.output.weight.var().item() == pytest.approx(2 / 310, rel=0.1)


@pytest.mark.parametrize("choice", [{"activation": "sine"}, {"layers": 0}])
def test_what_cannot_be_built_is_refused(choice):
    with pytest.raises(InputError, match=r"sine|hidden layer"):
        MLPConfig(**choice)
