import json
import math

import pytest
import torch
from torch.nn import functional as F

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.gradients import STUDY
from normkit.study.model_parts import DetachedNorm
from normkit.study.propagation import FACTORS
from tiny_study import decided_claim


def invented(losses=(), rough=(1.0, 1.0), start=(1.0, 1.0), spread=(0.1, 100.0), **changed):
    """All that theory says, with LayerNorm and no norm alike in the rest; pairs are LayerNorm's and no norm's."""
    arms = {
        norm: {
            "held_out": dict(losses).get(norm, 2.0),
            "projected_without_eps": 1e-15,
            "exact_with_eps": 1e-15,
            "projected_with_eps": 0.2,
            "removed": 0.03,
            "at": [0, 5],
            "roughness": [rough[norm == "no norm"]] * 2,
            "surprise": [rough[norm == "no norm"]] * 2,
        }
        for norm in ("LayerNorm", "RMSNorm", "detached", "no norm")
    }
    deep = {
        f"{norm}, deep": {
            "roughness": start[norm == "no norm"],
            "surprise": start[norm == "no norm"],
            "scale_spread": spread[norm == "no norm"],
        }
        for norm in arms
    }
    turning = {
        "groups": [["a"], ["b"]],
        "expected_groups": 2,
        "cosines": [1e-16, 1e-17],
        "products": [1e-9, 1e-8],
        "by_gradient": [[factor**-2.0 for factor in FACTORS]] * 2,
        "by_sign": [[factor**-1.0 for factor in FACTORS]] * 2,
        "growth_errors": [1e-4, 1e-3],
    }
    arms["RMSNorm"] |= {name: value for name, value in changed.items() if name in arms["RMSNorm"]}
    turning |= {name: value for name, value in changed.items() if name in turning}
    return {seed: {**arms, **deep, "gradient descent": turning} for seed in range(3)}


def verdict(words, measured):
    (claim,) = (claim for claim in STUDY.claims if words in claim.says)
    decided = decided_claim(claim, measured)
    return decided.verdict, decided.only_if


HELD, FAILED = ("reproduced", ""), ("not reproduced", "")


@pytest.mark.parametrize(
    ("words", "measured", "expected"),
    [
        ("tangent space", invented(), HELD),
        ("tangent space", invented(exact_with_eps=1e-6), FAILED),
        ("tangent space", invented(projected_without_eps=1e-6), FAILED),
        ("derivatives of mean", invented(losses={"detached": 2.3}), HELD),
        ("derivatives of mean", invented(losses={"detached": 2.3, "no norm": 2.25}), FAILED),
        ("only turns", invented(), HELD),
        ("only turns", invented(groups=[["a"]]), FAILED),
        ("only turns", invented(cosines=[0.1, 0.0]), FAILED),
        ("only turns", invented(products=[0.1, 0.0]), FAILED),
        ("only turns", invented(growth_errors=[0.5, 0.0]), FAILED),
        ("only turns", invented(by_gradient=[[factor**-1.0 for factor in FACTORS]]), FAILED),
        ("only turns", invented(by_sign=[[factor**-2.0 for factor in FACTORS]]), FAILED),
        ("smooths", invented(rough=(1.0, 2.0), start=(1.0, 2.0)), HELD),
        ("smooths", invented(), FAILED),
        ("smooths", invented(start=(1.0, 2.0)), ("reproduced only if", "the model is deep and at its start")),
        ("smooths", invented(rough=(1.0, 2.0)), ("reproduced only if", "the model is shallow, through training")),
        ("less sensitive", invented(), HELD),
        ("less sensitive", invented(spread=(2.0, 100.0)), FAILED),
        ("less sensitive", invented(spread=(0.1, 0.5)), FAILED),
    ],
)
def test_verdicts(words, measured, expected):
    assert verdict(words, measured) == expected


def test_charts_and_verdicts_hold_what_is_not_finite():
    measured = invented(rough=(1.0, None), start=(1.0, None))
    assert verdict("smooths", measured) == ("not run", "")
    bars, landscape, turning = STUDY.charts(STUDY.quick, list(invented(rough=(1.0, None)).values()))
    assert [name for name, _ in bars.values] == ["LayerNorm", "RMSNorm", "detached", "no norm"]
    assert len(landscape.panels) == 2
    assert [line.label for line in turning.panels[0][1]] == ["gradient", "signs"]


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
    (arm,) = (arm for arm in STUDY.arms(TINY) if arm.name == name)
    found = STUDY.measure(LAB, arm)
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
