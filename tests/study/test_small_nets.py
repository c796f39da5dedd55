import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit import specs
from normkit.errors import InputError
from normkit.study.model_parts import BatchNorm, NoisyBatchNorm
from normkit.study.small_nets import (
    MLP,
    Convolutional,
    ConvolutionalConfig,
    MLPConfig,
    OverChannels,
    Recurrent,
    RecurrentConfig,
    step_changes,
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


def test_a_small_net_may_have_no_norm_and_sees_nothing_later():
    model = MLP(MLPConfig(inputs=3, width=5, layers=1, norm=None, activation="linear"))
    x = torch.randn(7, 3)
    torch.testing.assert_close(model(x), model.output(model.hidden[0](x)))
    model = Recurrent(RecurrentConfig(inputs=3))
    x = torch.randn(2, 6, 3)
    changed = torch.cat([x[:, :4], torch.randn(2, 2, 3)], 1)
    assert torch.equal(model.states(x)[:, :4], model.states(changed)[:, :4])
    assert not torch.equal(model.states(x)[:, 4], model.states(changed)[:, 4])


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


def squared_loss(model, batch):
    x, goal = batch
    return 0.5 * (model(x) - goal).square().mean(0).sum()


def linear_model(layers=1, width=3):
    config = MLPConfig(inputs=3, width=width, layers=layers, outputs=2, norm=None, activation="linear")
    return MLP(config, seed=0).double()


def batch_of(rows=6):
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    return torch.randn(rows, 3, **draw), torch.randn(rows, 2, **draw)


def test_a_step_changes_a_linear_net_as_theory_says():
    model, batch, rate = linear_model(), batch_of(), 0.1
    before = copy.deepcopy(model)
    squared_loss(before, batch).backward()
    measured = step_changes(model, batch, squared_loss, rate)
    x, goal = batch
    weight, bias = before.hidden[0].weight.detach(), before.hidden[0].bias.detach()
    hidden = F.linear(x, weight, bias)
    new_hidden = F.linear(x, weight - rate * before.hidden[0].weight.grad, bias - rate * before.hidden[0].bias.grad)
    moved = (new_hidden.mean(0) - hidden.mean(0)).square() + (
        new_hidden.std(0, correction=0) - hidden.std(0, correction=0)
    ).square()
    expected = math.sqrt(moved.mean() / hidden.var(0, correction=0).mean())
    assert measured["shift"] == pytest.approx(expected)

    def output_gradient(rows):
        return (model.output(rows) - goal).T @ rows / len(rows)

    gradient = output_gradient(hidden)
    change = (output_gradient(new_hidden) - gradient).norm() / gradient.norm()
    assert measured["gradient_change"] == pytest.approx(change.item())
    assert measured["loss"] == pytest.approx(squared_loss(model, batch).item())


def test_each_layers_gradient_is_compared_after_the_steps_of_those_before_it_alone():
    model, batch, rate = linear_model(layers=2), batch_of(), 0.1
    weights = [*(layer.weight for layer in model.hidden), model.output.weight]
    gradients = torch.autograd.grad(squared_loss(model, batch), list(model.parameters()))
    by_parameter = dict(zip(model.parameters(), gradients, strict=True))
    changes = []
    for number in (1, 2):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for layer, moved in zip(model.hidden[:number], twin.hidden[:number], strict=True):
                moved.weight.sub_(by_parameter[layer.weight], alpha=rate)
                moved.bias.sub_(by_parameter[layer.bias], alpha=rate)
        weight = twin.output.weight if number == 2 else twin.hidden[number].weight
        (new,) = torch.autograd.grad(squared_loss(twin, batch), [weight])
        old = by_parameter[weights[number]]
        changes.append(((new - old).norm() / old.norm()).item())
    measured = step_changes(model, batch, squared_loss, rate)
    assert measured["gradient_change"] == pytest.approx(sum(changes) / 2)


def test_the_smoothness_of_a_quadratic_loss_is_its_curvature_along_the_gradient():
    class Quadratic(nn.Module):
        """0.5 sum_i c_i w_i^2, with an MLP's names."""

        def __init__(self):
            super().__init__()
            self.hidden = nn.ModuleList([nn.Linear(2, 2, bias=False)])
            self.output = nn.Linear(2, 1, bias=False)

        def forward(self, x):
            return self.output(self.hidden[0](x))

    curvature = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def loss_of(model, _batch):
        weights = torch.cat([model.hidden[0].weight.flatten(), model.output.weight.flatten()])
        return 0.5 * (curvature * weights.square()).sum()

    model = Quadratic()
    gradient = curvature * torch.cat([model.hidden[0].weight.flatten(), model.output.weight.flatten()]).detach()
    expected = (curvature * gradient).norm() / gradient.norm()
    measured = step_changes(model, (torch.randn(4, 2),), loss_of, 0.01)
    assert measured["smoothness"] == pytest.approx(expected.item(), rel=1e-3)


def test_a_layer_without_layers_before_it_is_left_out_and_the_model_as_it_was():
    wide = step_changes(linear_model(layers=3), batch_of(), squared_loss, 0.1)
    # With a rate that moves nothing there is no shift and no change of gradients.
    still = step_changes(linear_model(layers=3), batch_of(), squared_loss, 1e-12)
    assert still["shift"] < 1e-10 < wide["shift"]
    assert still["gradient_change"] < 1e-10 < wide["gradient_change"]
    model = MLP(MLPConfig(inputs=3, width=4, outputs=2, norm=BatchNorm), seed=0).double()
    before = copy.deepcopy(model.state_dict())
    step_changes(model, batch_of(), squared_loss, 0.1)
    assert all(torch.equal(value, before[path]) for path, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_noise_shifts_inputs_and_leaves_the_gradients_comparison_alone():
    def model(noise):
        def norm(width):
            return BatchNorm(width) if noise is None else NoisyBatchNorm(width, noise=noise, seed=(0, 0))

        return MLP(MLPConfig(inputs=3, width=16, layers=2, outputs=2, norm=norm), seed=0).double()

    none, small, large = (step_changes(model(noise), batch_of(32), squared_loss, 1e-9) for noise in (None, 0.1, 1.0))
    assert none["shift"] < 1e-6
    assert 0.01 < small["shift"] < large["shift"]
    assert large["gradient_change"] < 1e-6
