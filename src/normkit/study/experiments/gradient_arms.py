"""The arms of the study `gradients`: trained models, deep models at their start, and weights that only turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit import reference, specs
from normkit.spec import NormSpec
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.corpus import held_out_loss, next_token_loss, text_of_the_library
from normkit.study.experiments.gradient_measures import along_the_gradient, backward_errors, flat, turnings
from normkit.study.model_parts import NormLayer
from normkit.study.result import Arm
from normkit.study.statistics import Measurement, padded
from normkit.study.text_training import text_batch, train_on_text, transformer
from normkit.study.training_run import Batch, Recipe
from normkit.study.transformer import Residual, Transformer

NO_EPS = 1e-30
TRAINED = ("LayerNorm", "RMSNorm", "detached", "no norm")
_GAINS = (0.5, 1.0, 2.0)
_POINTS = 5
_RMS = specs.TORCH_RMS_NORM.replace(eps=1e-5)


class DetachedNorm(nn.Module):
    """LayerNorm whose backward pass treats mean and scale of a row as constants: dx = weight * dy / s.

    Source:
        Xu et al. 2019, arXiv:1911.07013, DetachNorm.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (..., width)."""
        mean, scale = reference.statistics(x.detach(), specs.TORCH_LAYER_NORM, 1e-5)
        return self.weight * ((x - mean) / scale) + self.bias


NORMS: Mapping[str, NormLayer] = {
    "LayerNorm": specs.TORCH_LAYER_NORM,
    "RMSNorm": _RMS,
    "detached": DetachedNorm,
    "no norm": None,
}
_SPECS: Mapping[str, NormSpec] = {
    "LayerNorm": specs.TORCH_LAYER_NORM,
    "RMSNorm": _RMS,
    "detached": specs.TORCH_LAYER_NORM,
}


def arms(_settings: Settings) -> tuple[Arm, ...]:
    """Norms trained, the same deep and untrained, and scale-invariant weights."""
    return (
        *(Arm(name=norm, choices={"kind": "trained", "norm": norm}) for norm in TRAINED),
        *(Arm(name=f"{norm}, deep", choices={"kind": "start", "norm": norm}, cost=0.3) for norm in TRAINED),
        Arm(name="gradient descent", choices={"kind": "turning"}, cost=0.5),
    )


def measure(context: ArmContext, arm: Arm) -> Measurement:
    """One arm: a trained model, a deep one at its start, or a model under plain gradient descent."""
    kinds = {"trained": _measure_trained, "start": _measure_start, "turning": _measure_turning}
    return kinds[arm.choices["kind"]](context, arm)


def _held_out_batch(context: ArmContext) -> Batch:
    return text_batch(context, text_of_the_library()[1])


def _measure_trained(context: ArmContext, arm: Arm) -> Measurement:
    norm = arm.choices["norm"]
    model = transformer(context, norm=NORMS[norm]).to(context.device)
    steps, batch = context.integer("steps"), _held_out_batch(context)
    at = list(range(0, steps, max(1, steps // _POINTS)))

    def observe(model: nn.Module, step: int) -> Mapping[str, float]:
        return along_the_gradient(model, batch, next_token_loss).measures if step - 1 in at else {}

    recipe = Recipe(steps=steps, learning_rate=context.number("learning_rate"), warmup=context.integer("warmup"))
    run = train_on_text(context, model, recipe, observe=observe)
    unseen = held_out_loss(model, text_of_the_library()[1], window=model.config.context)
    return run.measurement(
        steps,
        held_out=run.capped(unseen),
        diverged=run.diverged,
        at=at,
        **{name: padded(run.observed(name), len(at)) for name in ("roughness", "loss_range", "surprise")},
        **(_backward_errors(model, norm, batch) if norm in _SPECS else {}),
    )


def _backward_errors(model: Transformer, norm: str, batch: Batch) -> dict[str, float]:
    """Errors of the two formulas over all norms of a trained model, with its eps and without."""
    worst: dict[str, float] = {}
    for name, eps in (("with_eps", 1e-5), ("without_eps", NO_EPS)):
        spec = _SPECS[norm].replace(eps=eps)
        layer: NormLayer = spec if norm != "detached" else DetachedNorm
        copied = Transformer(dataclasses.replace(model.config, norm=layer))
        copied.load_state_dict(model.state_dict())
        copied.to(next(model.parameters()).device, torch.float64)
        norms = {path: module.norm for path, module in copied.named_modules() if isinstance(module, Residual)}
        norms["final"] = copied.final_norm
        found = backward_errors(copied, norms, spec, batch, next_token_loss).values()
        worst[f"projected_{name}"] = max(each.projected for each in found)
        worst[f"exact_{name}"] = max(each.exact for each in found)
        worst["removed"] = max(each.removed for each in found)
    return worst


def _measure_start(context: ArmContext, arm: Arm) -> Measurement:
    """Roughness of a deep model's loss before the first step, and its loss with branches scaled up and down."""
    batch, losses = _held_out_batch(context), []

    def build(gain: float) -> Transformer:
        layers, norm = context.integer("deep_layers"), NORMS[arm.choices["norm"]]
        return transformer(context, layers=layers, norm=norm, branch_gain=gain).to(context.device)

    for gain in _GAINS:
        with torch.no_grad():
            losses.append(next_token_loss(build(gain), batch).item())
        context.report(len(losses) / (1 + len(_GAINS)))
    measures = along_the_gradient(build(1.0), batch, next_token_loss).measures
    return {**measures, "scale_spread": max(losses) - min(losses)}


def _measure_turning(context: ArmContext, _arm: Arm) -> Measurement:
    """Scale-invariant groups, found by behaviour, under steps from several lengths; then plain gradient descent."""
    batch = _held_out_batch(context)
    layers = context.integer("turning_layers")

    def build() -> Transformer:
        norm = specs.TORCH_LAYER_NORM.replace(eps=NO_EPS)
        return transformer(context, layers=layers, norm=norm, placement="peri").to(context.device)

    wide = build().double()
    measured = turnings(wide, lambda: wide(batch[0][:2, :-1]), lambda: next_token_loss(wide, batch))
    model = build()
    named = dict(model.named_parameters())
    groups = [[named[path] for path in each.paths] for each in measured]

    def squares(of_groups: Sequence[Sequence[Tensor]]) -> list[float]:
        return [flat(tensors).double().square().sum().item() for tensors in of_groups]

    def observe(_model: nn.Module, _step: int) -> Mapping[str, Any]:
        slopes = [[parameter.grad for parameter in group if parameter.grad is not None] for group in groups]
        return {"squares": squares(groups), "steps": squares(slopes)}

    recipe = Recipe(
        steps=context.integer("turning_steps"),
        learning_rate=context.number("turning_rate"),
        optimizer="sgd",
        clip=None,
    )
    run = train_on_text(context, model, recipe, observe=observe)
    start, end = run.observed("squares")[0], squares(groups)
    rates = [point.learning_rate for point in run.points]
    grown = [
        sum(rate**2 * step for rate, step in zip(rates, steps, strict=True))
        for steps in zip(*run.observed("steps"), strict=True)
    ]
    return {
        "losses": padded(run.losses, recipe.steps),
        "groups": [list(each.paths) for each in measured],
        "expected_groups": 2 * layers,
        "products": [max(each.products) / min(each.products) - 1 for each in measured],
        "cosines": [each.cosine for each in measured],
        "by_gradient": [each.by_gradient for each in measured],
        "by_sign": [each.by_sign for each in measured],
        "growth_errors": [abs((b - a) / g - 1) for a, b, g in zip(start, end, grown, strict=True)],
        "growth": [b / a for a, b in zip(start, end, strict=True)],
        "findings": list(run.findings),
    }
