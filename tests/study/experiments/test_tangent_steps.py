"""Steps along the sphere: the measure against formulas, and verdicts that follow from numbers."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from normkit.study.arm_context import ArmContext
from normkit.study.catalogue import load, settings_of
from normkit.study.digits import digit_loss
from normkit.study.experiments import tangent_steps
from normkit.study.result import Arm
from normkit.study.small_nets import MLPConfig
from tiny_study import decided_claim

STUDY = tangent_steps.STUDY
RATES = settings_of(STUDY, "quick")["rates"]
BATCH = (torch.randn(20, 8, 8, generator=torch.Generator().manual_seed(1)).double(), torch.arange(20) % 10)


def net(norm=tangent_steps._BARE_NORM, activation="relu"):
    config = MLPConfig(width=16, layers=2, norm=norm, activation=activation)
    return tangent_steps.Reader(config, seed=3).double()


@pytest.mark.parametrize("is_tangent", [False, True])
def test_surprise_is_half_the_curvature_along_the_step_over_its_slope(is_tangent):
    """To first order in the rate; the curvature by autograd along the step. Logits are rounded to float32."""
    model = net(activation="tanh")
    rate = 0.003
    found = tangent_steps.surprise(model, BATCH, rate, is_tangent=is_tangent)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    loss = lambda values: digit_loss(lambda x: torch.func.functional_call(model, values, (x,)), BATCH)  # noqa: E731
    gradient = torch.func.grad(loss)(weights)
    along = {name: -part for name, part in gradient.items()}
    slope = torch.func.jvp(loss, (weights,), (along,))[1]
    curvature = torch.func.jvp(lambda at: torch.func.jvp(loss, (at,), (along,))[1], (weights,), (along,))[1]
    # Behind a norm the gradient is tangent already, and bringing the weight back to its length moves no output.
    assert found == pytest.approx(abs((rate * curvature / 2 / slope).item()), rel=0.2)
    assert tangent_steps.surprise(net(norm=None), BATCH, 1e4, is_tangent=is_tangent) <= 10.0


def test_behind_a_norm_each_hidden_layer_is_a_sphere_and_the_output_layer_is_not_trained():
    model = net()
    groups = tangent_steps.spheres(model, tangent_steps.hidden(model))
    assert [group.paths for group in groups] == [(f"hidden.{k}.weight", f"hidden.{k}.bias") for k in (0, 1)]
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {path for group in groups for path in group.paths}
    longer = copy.deepcopy(model)
    with torch.no_grad():
        for group in tangent_steps.spheres(longer, tangent_steps.hidden(longer)):
            for weight in group.parameters:
                weight.mul_(7)
    # What eps leaves: 1e-5 beside variances near 1.
    assert torch.allclose(longer(BATCH[0]), model(BATCH[0]), atol=1e-3)


@pytest.mark.slow
def test_tangent_steps_keep_the_length_and_plain_ones_let_it_grow():
    pytest.importorskip("sklearn")
    settings = {**settings_of(STUDY, "quick"), "steps": 20, "layers": 2, "width": 16}
    context = ArmContext(settings=settings, seed=0)
    tangent, plain = (
        tangent_steps._measure(context, Arm(name=name, choices={"net": name, "rate": 0.1}))
        for name in ("LayerNorm, tangent", "LayerNorm")
    )
    assert tangent["growth"] == pytest.approx(1.0, abs=1e-5)
    assert plain["growth"] > 1.0001
    assert 0 < tangent["surprise"] < 10
    assert len(plain["losses"]) == 20


def measured(**sensitivities):
    """One seed in which each net loses this much at all rates but the best."""
    paired = {}
    for net_name in tangent_steps.NETS:
        worse = sensitivities[net_name.replace(", ", "_").replace(" ", "_")] * len(RATES) / (len(RATES) - 1)
        for rate in RATES:
            last = 0.1 + (worse if rate != RATES[0] else 0.0)
            surprise = math.exp(sensitivities[net_name.replace(", ", "_").replace(" ", "_")])
            paired[f"{net_name}, rate {rate:g}"] = {"last": last, "growth": 3.0, "surprise": surprise}
    return {0: paired}


@pytest.mark.parametrize(
    ("place", "tangent", "norm_tangent", "bare", "verdict"),
    [
        (0, 0.4, 0.2, 1.0, "reproduced"),
        (0, 0.9, 0.2, 1.0, "not reproduced"),
        (0, 0.4, 0.2, 0.25, "not testable here"),
        (1, 0.4, 0.3, 1.0, "reproduced"),
        (1, 0.4, 0.22, 1.0, "not reproduced"),
    ],
)
def test_verdicts_follow_from_the_numbers(place, tangent, norm_tangent, bare, verdict):
    numbers = measured(LayerNorm=0.2, LayerNorm_tangent=norm_tangent, no_norm=bare, no_norm_tangent=tangent)
    assert decided_claim(load("tangent-steps").claims[place], numbers).verdict == verdict
