import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit import specs
from normkit.errors import InputError
from normkit.study.model_parts import BatchNorm
from normkit.study.small_nets import (
    MLP,
    Convolutional,
    ConvolutionalConfig,
    MLPConfig,
    OverChannels,
    Recurrent,
    RecurrentConfig,
)


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


@pytest.mark.parametrize(
    "build",
    [
        lambda norm, seed: MLP(MLPConfig(norm=norm), seed),
        lambda norm, seed: Recurrent(RecurrentConfig(norm=norm), seed),
        lambda norm, seed: Convolutional(ConvolutionalConfig(norm=norm and over_channels), seed),
    ],
)
def test_nets_of_one_seed_share_their_weights_whatever_their_norms(build):
    nets = [build(norm, 3) for norm in (None, specs.TORCH_RMS_NORM, BatchNorm)]
    for path, weight in nets[0].named_parameters():
        assert all(torch.equal(weight, dict(net.named_parameters())[path]) for net in nets[1:])
    assert not torch.equal(nets[0].output.weight, build(None, 4).output.weight)


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


def test_it_is_the_recurrence_of_its_docstring():
    model = Recurrent(RecurrentConfig(inputs=3, width=5, outputs=2), seed=1)
    x, state = torch.randn(4, 6, 3), torch.zeros(4, 5)
    states = []
    for time in range(6):
        summed = F.linear(x[:, time], model.incoming.weight, model.incoming.bias) + state @ model.recurrent.weight.T
        state = torch.tanh(F.layer_norm(summed, (5,)))
        states.append(state)
    torch.testing.assert_close(model.states(x), torch.stack(states, 1))
    torch.testing.assert_close(model(x), model.output(state))


def test_a_state_knows_nothing_of_later_inputs():
    model = Recurrent(RecurrentConfig(inputs=3))
    x = torch.randn(2, 6, 3)
    changed = torch.cat([x[:, :4], torch.randn(2, 2, 3)], 1)
    assert torch.equal(model.states(x)[:, :4], model.states(changed)[:, :4])
    assert not torch.equal(model.states(x)[:, 4], model.states(changed)[:, 4])


def test_norms_of_single_times_see_their_time_and_the_last_serves_all_later_ones():
    model = Recurrent(RecurrentConfig(inputs=3, width=5, norm=BatchNorm, norms=3))
    model(torch.randn(8, 6, 3))
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [1, 1, 4]
    one = Recurrent(RecurrentConfig(inputs=3, width=5, norm=BatchNorm))
    one(torch.randn(8, 6, 3))
    assert [int(norm.num_batches_tracked) for norm in one.norms] == [6]


def over_channels(channels):
    return OverChannels(BatchNorm(channels))


def test_batch_norm_over_channels_is_that_of_images():
    x = torch.randn(4, 3, 5, 6)
    ours, torchs = OverChannels(BatchNorm(3)), nn.BatchNorm2d(3)
    torch.testing.assert_close(ours(x), torchs(x))
    torch.testing.assert_close(ours.norm.running_var, torchs.running_var)
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x))


@pytest.mark.parametrize(
    ("norm", "apply"),
    [
        (specs.POOLFORMER, lambda x: F.group_norm(x, 1)),
        (None, lambda x: x),
        (over_channels, lambda x: F.batch_norm(x, None, None, training=True)),
    ],
)
def test_it_is_convolution_norm_relu(norm, apply):
    model = Convolutional(ConvolutionalConfig(channels=4, layers=2, norm=norm), seed=1)
    images = torch.randn(3, 8, 8)
    first, second = model.convolutions
    x = F.relu(apply(F.conv2d(images.unsqueeze(1), first.weight, first.bias, padding=1)))
    x = F.relu(apply(F.conv2d(x, second.weight, second.bias, stride=2, padding=1)))
    assert x.shape == (3, 8, 4, 4)
    torch.testing.assert_close(model(images), model.output(x.mean((-2, -1))))


def test_kernels_have_the_variance_of_their_docstring():
    model = Convolutional(ConvolutionalConfig(channels=32, layers=2, norm=None))
    # 18,432 draws: the variance is off by 1 %, one standard deviation.
    assert model.convolutions[1].weight.var().item() == pytest.approx(4 / (9 * 96), rel=0.05)
