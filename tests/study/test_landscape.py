import math

import pytest
import torch
from torch import nn

from normkit.study.landscape import along_the_gradient


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
    assert found.loss_range == pytest.approx(37.5 - 24)
    assert found.changes == pytest.approx((1.5, 3.0))
    assert found.roughness == pytest.approx(CURVATURE)
    assert found.surprise == pytest.approx(3.0 / 15.0)


def test_a_plane_is_smooth():
    found = along_the_gradient(Point(1.0, 2.0), (), lambda model, _: model.place.sum())
    assert found.roughness == 0
    assert found.surprise == 0
    assert found.loss_range > 0


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
    assert found.loss_range == math.inf
    assert found.roughness == math.inf
    assert found.surprise == math.inf
