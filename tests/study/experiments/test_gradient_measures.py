import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import specs
from normkit.study.experiments.gradient_measures import FACTORS, along_the_gradient, backward_errors, flat, turnings
from normkit.study.statistics import slope


class Point(nn.Module):
    def __init__(self, *start):
        super().__init__()
        self.place = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))


CURVATURE = 3.0


def quadratic(model, batch):
    return 0.5 * CURVATURE * model.place.square().sum() + batch[0].sum()


def test_a_bowl_is_as_rough_as_it_is_curved():
    found = along_the_gradient(Point(3.0, 4.0), (torch.zeros(1),), quadratic, shares=(0.1, 0.2))
    assert found.distances == pytest.approx((0.5, 1.0))
    assert found.loss == pytest.approx(37.5)
    assert found.losses == pytest.approx((0.5 * 3 * 4.5**2, 0.5 * 3 * 4**2))
    assert found.measures["loss_range"] == pytest.approx(37.5 - 24)
    assert found.changes == pytest.approx((1.5, 3.0))
    assert found.measures["roughness"] == pytest.approx(CURVATURE)
    assert found.measures["surprise"] == pytest.approx(3.0 / 15.0)


def test_a_plane_is_smooth():
    found = along_the_gradient(Point(1.0, 2.0), (), lambda model, _: model.place.sum())
    assert found.measures["roughness"] == 0
    assert found.measures["surprise"] == 0
    assert found.measures["loss_range"] > 0


def test_weights_and_their_gradients_are_left_as_they_were():
    model = Point(1.0, 2.0)
    model.place.grad = torch.ones(2, dtype=torch.float64)
    memory = model.place.data_ptr()
    along_the_gradient(model, (torch.zeros(1),), quadratic)
    assert model.place.tolist() == [1.0, 2.0]
    assert model.place.data_ptr() == memory
    assert model.place.grad.tolist() == [1.0, 1.0]
    assert model.unused.grad is None


def test_what_is_not_finite_on_the_way_is_infinitely_rough():
    # The root ends at 0; one step further there is no loss.
    found = along_the_gradient(Point(1e-6, 0.0), (), lambda model, _: model.place[0].sqrt(), shares=(0.5, 2.0))
    assert found.measures["loss_range"] == math.inf
    assert found.measures["roughness"] == math.inf
    assert found.measures["surprise"] == math.inf


N = 12


def network(norm):
    return nn.Sequential(nn.Linear(5, N), norm, nn.Tanh(), nn.Linear(N, 3)).double()


def loss(model, batch):
    return model(batch[0]).square().sum()


def found(spec, norm=None):
    norm = nk.Norm(spec, N) if norm is None else norm
    model = network(norm)
    if norm.weight is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, N))
    return backward_errors(model, {"norm": model[1]}, spec, (torch.randn(7, 5, dtype=torch.float64),), loss)["norm"]


@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.TORCH_RMS_NORM])
def test_without_eps_the_backward_pass_is_the_projection(spec):
    result = found(spec.replace(eps=1e-30))
    assert result.projected < 1e-13
    assert result.exact < 1e-13
    assert 0 < result.removed < 1


@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.TORCH_RMS_NORM])
def test_an_eps_leaves_part_of_the_radial_direction(spec):
    result = found(spec.replace(eps=0.1))
    assert result.projected > 1e-3
    assert result.exact < 1e-13


def test_a_norm_that_computes_another_formula_is_off():
    rms = specs.TORCH_RMS_NORM.replace(eps=1e-30)
    result = found(specs.TORCH_LAYER_NORM.replace(eps=1e-30), nk.Norm(rms, N))
    assert min(result.projected, result.exact) > 0.01


def test_a_norm_without_a_gain_is_compared_too():
    assert found(specs.TORCH_LAYER_NORM.replace(eps=1e-30, has_weight=False)).projected < 1e-13


@pytest.fixture
def model():
    norm = nk.Norm(specs.TORCH_LAYER_NORM.replace(eps=1e-30), 8)
    return nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Linear(8, 3)).double()


def test_a_weight_before_a_norm_turns_by_the_rate_over_its_squared_length(model):
    x = torch.randn(9, 5, dtype=torch.float64)
    before = flat(tuple(model.parameters())).clone()
    (group,) = turnings(model, lambda: model(x), lambda: model(x).pow(3).sum())
    assert group.paths == ("0.weight", "0.bias")
    assert group.cosine < 1e-12
    assert max(group.products) / min(group.products) - 1 < 1e-12
    assert slope(FACTORS, group.by_gradient) == pytest.approx(-2, abs=1e-3)
    assert slope(FACTORS, group.by_sign) == pytest.approx(-1, abs=1e-3)
    assert torch.equal(flat(tuple(model.parameters())), before)


def test_a_model_without_a_norm_has_no_such_weight():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(9, 5, dtype=torch.float64)
    assert turnings(model, lambda: model(x), lambda: model(x).sum()) == ()
