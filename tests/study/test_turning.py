import pytest
import torch
from torch import nn

import normkit as nk
from normkit import specs
from normkit.study.statistics import slope
from normkit.study.turning import FACTORS, flat, turnings


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
