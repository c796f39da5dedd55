"""What is sent of each step, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from small_training import Run, Transformer

pytestmark = pytest.mark.slow


def test_every_parameter_is_measured_as_torch_measures_it():
    seen: list[dict[str, tuple[float, float, float]]] = []

    def body(run: Run) -> None:
        before = {path: each.detach().clone() for path, each in run.model.named_parameters()}
        run.step()
        seen.append(
            {
                path: (
                    _rms(before[path]),
                    _rms(each.grad),
                    _rms(each - before[path]) / (_rms(before[path]) or math.nan),
                )
                for path, each in run.model.named_parameters()
            }
        )

    training = Run().go(body=body, steps=3).watch.inspection().training
    assert [each.path for each in training.parameters] == list(seen[0])
    for each in training.parameters:
        rms, gradient, ratio = seen[2][each.path]
        assert (each.rms, each.gradient_rms) == pytest.approx((rms, gradient), rel=1e-5)
        assert each.update_ratio == pytest.approx(ratio, rel=1e-3, nan_ok=True)
        assert (
            each.first_update_ratio == pytest.approx(seen[0][each.path][2], rel=1e-3, nan_ok=True)
            or not seen[0][each.path][0]
        )
        assert each.gradient_steps == 3
    for series in training.of("parameter gradient"):
        size = next(each.size for each in training.parameters if each.path == series.path)
        expected = [step[series.path][1] * math.sqrt(size) for step in seen]
        assert series.values == pytest.approx(expected, rel=1e-5)


def _rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def test_activation_gradients_are_those_of_autograd():
    run, kept = Run(), []
    run.model.eval()

    def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
            kept.append(output)

    for block in run.model.blocks:
        block.register_forward_hook(keep)

    training = run.go(steps=1, batch=(run.batch(),)).watch.inspection().training
    expected = [_rms(each.grad) for each in kept[-2:]]
    assert [each.last for each in training.of("activation gradient")] == pytest.approx(expected, rel=1e-5)


def test_a_gradient_that_is_missing_is_none():
    def frozen() -> nn.Module:
        model = Transformer()
        model.embedding.requires_grad_(False)
        return model

    parameters = Run(frozen).go().watch.inspection().training.parameters
    embedding = next(each for each in parameters if each.kind == "embedding")
    assert (embedding.trained, embedding.gradient_steps) == (False, 0)
    assert math.isnan(embedding.gradient_rms)
    assert embedding.update_ratio == 0


def test_what_a_frozen_parameter_holds_of_the_training_before_is_no_gradient():
    """B8 warned of batch norms that were frozen for fine-tuning: no optimizer cleared their gradients any more."""
    run = Run()
    weight = run.model.norm.weight.requires_grad_(False)
    weight.grad = torch.ones_like(weight)
    run.optimizer = torch.optim.SGD([each for each in run.model.parameters() if each.requires_grad], lr=1e-2)
    parameters = run.go().watch.inspection().training.parameters
    assert next(each for each in parameters if each.path == "norm.weight").gradient_steps == 0


@pytest.mark.parametrize("limit", [0.0, math.inf])
def test_small_moments_are_those_below_ten_times_eps(limit: float):
    run = Run()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3, eps=limit or 1e-30)
    if limit:
        run.optimizer.param_groups[0]["eps"] = 1e6
    parameters = run.go(steps=3).watch.inspection().training.parameters
    weights = [each for each in parameters if each.kind == "weight"]
    assert {each.optimizer_eps_share for each in weights} == {1.0 if limit else 0.0}


def test_a_first_bad_parameter_is_named():
    def spoil(run: Run) -> None:
        run.model.blocks[1].mlp[0].weight.grad[0, 0] = math.nan

    run = Run().go(body=lambda run: run.step(after_backward=spoil), steps=1)
    training = run.watch.inspection().training
    assert (training.reason, training.reason_step) == ("non-finite gradients", 0)
    assert any("blocks.1.mlp.0.weight" in line for line in run.said)
