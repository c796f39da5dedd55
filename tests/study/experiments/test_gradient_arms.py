import json
import math

import pytest
import torch
from torch.nn import functional as F

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.gradient_arms import DetachedNorm, arms, measure
from normkit.study.experiments.gradients import STUDY

TINY = {
    **STUDY.quick,
    "layers": 1,
    "deep_layers": 2,
    "width": 16,
    "batch": 2,
    "window": 8,
    "steps": 3,
    "turning_layers": 1,
    "turning_steps": 4,
    "warmup": 0,
}
LAB = ArmContext(settings=TINY, seed=1)


def measured(name):
    (arm,) = (arm for arm in arms(TINY) if arm.name == name)
    found = measure(LAB, arm)
    json.dumps(found)
    return found


def test_a_detached_norm_is_layer_norm_forward_and_a_scaling_backward():
    x = torch.randn(5, 8, requires_grad=True)
    y = DetachedNorm(8)(x)
    torch.testing.assert_close(y, F.layer_norm(x, (8,)))
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt().expand_as(x).detach())


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_the_backward_pass_of_a_trained_model_is_a_projection(norm):
    found = measured(norm)
    assert found["projected_without_eps"] < 1e-12
    assert found["exact_with_eps"] < 1e-12
    assert found["projected_with_eps"] > found["exact_with_eps"]
    assert len(found["losses"]) == 3
    assert found["at"] == [0, 1, 2]
    assert all(value > 0 for name in ("roughness", "loss_range", "surprise") for value in found[name])


@pytest.mark.slow
def test_a_detached_norm_does_not_project():
    assert measured("detached")["projected_with_eps"] > 0.01


def test_without_a_norm_there_is_nothing_to_project():
    assert "projected_with_eps" not in measured("no norm")


def test_a_deep_model_at_its_start_depends_on_scale_without_a_norm():
    with_norm, without = measured("LayerNorm, deep"), measured("no norm, deep")
    assert without["scale_spread"] > with_norm["scale_spread"] > 0
    assert "losses" not in with_norm


@pytest.mark.slow
def test_gradient_descent_lengthens_weights_before_a_norm_as_squares_add_up():
    found = measured("gradient descent")
    assert [path.rsplit(".", 2)[-2] for paths in found["groups"] for path in paths] == ["out", "out", "down", "down"]
    assert len(found["groups"]) == found["expected_groups"]
    # Four steps grow the square by 1e-4 or so, of which float32's weights leave a hundredth uncertain.
    assert max(found["growth_errors"]) < 0.01
    assert all(growth > 1 for growth in found["growth"])
    assert max(found["products"]) < 1e-6
    assert all(math.isfinite(angle) for angles in found["by_gradient"] for angle in angles)
