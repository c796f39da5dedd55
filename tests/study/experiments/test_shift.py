import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit.study.experiments.shift import NoisyBatchNorm, measure, observer
from normkit.study.model_parts import BatchNorm
from normkit.study.small_nets import MLP, MLPConfig


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


def test_noise_is_an_affine_map_of_a_batch_norm_that_changes_with_each_step_and_layer():
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


def test_noise_is_the_same_where_a_run_goes_on_and_absent_in_evaluation():
    x = torch.randn(64, 5)
    norm = NoisyBatchNorm(5, noise=1.0, seed=(0, 2))
    norm(x)
    continued = NoisyBatchNorm(5, noise=1.0, seed=(0, 2))
    continued.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), continued(x))
    plain = BatchNorm(5)
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm.eval()(x), plain.eval()(x))


def test_a_step_changes_a_linear_net_as_theory_says():
    model, batch, rate = linear_model(), batch_of(), 0.1
    before = copy.deepcopy(model)
    squared_loss(before, batch).backward()
    measured = measure(model, batch, squared_loss, rate)
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
    measured = measure(model, batch, squared_loss, rate)
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
    measured = measure(model, (torch.randn(4, 2),), loss_of, 0.01)
    assert measured["smoothness"] == pytest.approx(expected.item(), rel=1e-3)


def test_a_layer_without_layers_before_it_is_left_out():
    wide = measure(linear_model(layers=3), batch_of(), squared_loss, 0.1)
    # With a rate that moves nothing there is no shift and no change of gradients.
    still = measure(linear_model(layers=3), batch_of(), squared_loss, 1e-12)
    assert still["shift"] < 1e-10 < wide["shift"]
    assert still["gradient_change"] < 1e-10 < wide["gradient_change"]


def test_noise_shifts_inputs_and_leaves_the_gradients_comparison_alone():
    def model(noise):
        def norm(width):
            return BatchNorm(width) if noise is None else NoisyBatchNorm(width, noise=noise, seed=(0, 0))

        return MLP(MLPConfig(inputs=3, width=16, layers=2, outputs=2, norm=norm), seed=0).double()

    none, small, large = (measure(model(noise), batch_of(32), squared_loss, 1e-9) for noise in (None, 0.1, 1.0))
    assert none["shift"] < 1e-6
    assert 0.01 < small["shift"] < large["shift"]
    assert large["gradient_change"] < 1e-6


def test_a_model_is_left_as_it_was():
    model = MLP(MLPConfig(inputs=3, width=4, outputs=2, norm=BatchNorm), seed=0).double()
    before = copy.deepcopy(model.state_dict())
    measure(model, batch_of(), squared_loss, 0.1)
    assert all(torch.equal(value, before[path]) for path, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_observer_measures_every_so_manieth_step():
    observe = observer(batch_of(), squared_loss, rate=0.1, every=3)
    seen = [observe(linear_model(), step) for step in range(1, 8)]
    assert [step["at"] for step in seen if step] == [1, 4, 7]
    assert set(seen[0]) == {"at", "loss", "shift", "gradient_change", "smoothness"}
