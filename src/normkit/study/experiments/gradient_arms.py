"""What the study `gradients` measures: backward passes, landscapes along steps, and weights that only turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit import reference, specs
from normkit.files import finite
from normkit.spec import NormSpec
from normkit.study.curves import padded
from normkit.study.laboratory import Laboratory
from normkit.study.landscape import Landscape, along_the_gradient
from normkit.study.loop import Batch, Observe, Recipe
from normkit.study.norms import NormLayer
from normkit.study.result import Arm, Measurement, Settings
from normkit.study.tangency import tangencies
from normkit.study.transformer import Residual, Transformer, TransformerConfig
from normkit.study.turning import flat, turnings
from normkit.study.windows import held_out_loss, next_token_loss, text_of_the_library, windows

NO_EPS = 1e-30
TRAINED = ("LayerNorm", "RMSNorm", "detached", "no norm")
_GAINS = (0.5, 1.0, 2.0)
_POINTS = 5
_RMS = specs.TORCH_RMS_NORM.replace(eps=1e-5)


class DetachedNorm(nn.Module):
    """LayerNorm whose backward pass takes mean and scale of a row for constants: dx = weight * dy / s.

    Args:
        width: Features of a row.

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


def measure(lab: Laboratory, arm: Arm) -> Measurement:
    """One arm: a trained model, a deep one at its start, or a model under plain gradient descent."""
    kinds = {"trained": _measure_trained, "start": _measure_start, "turning": _measure_turning}
    return kinds[arm.choices["kind"]](lab, arm)


def _model(lab: Laboratory, norm: NormLayer, layers: int, **choices: Any) -> Transformer:
    config = TransformerConfig(
        context=lab.integer("window"), width=lab.integer("width"), layers=layers, norm=norm, **choices
    )
    return Transformer(config, seed=lab.seed).to(lab.device)


def _held_out_batch(lab: Laboratory) -> Batch:
    _, held_out = text_of_the_library()
    (ids,) = next(windows(held_out, batch=lab.integer("batch"), window=lab.integer("window"), seed=0))
    return (ids.to(lab.device),)


def _measure_trained(lab: Laboratory, arm: Arm) -> Measurement:
    norm = arm.choices["norm"]
    model = _model(lab, NORMS[norm], lab.integer("layers"))
    steps, window = lab.integer("steps"), lab.integer("window")
    training, held_out = text_of_the_library()
    batch, at = _held_out_batch(lab), list(range(0, steps, max(1, steps // _POINTS)))
    run = lab.train(
        model,
        Recipe(steps=steps, learning_rate=lab.number("learning_rate"), warmup=lab.integer("warmup")),
        windows(training, batch=lab.integer("batch"), window=window, seed=lab.seed),
        next_token_loss,
        observe=_landscapes(batch, at),
    )
    return {
        "losses": padded(run, steps),
        "held_out": run.capped(held_out_loss(model, held_out, window=window)),
        "diverged": run.diverged,
        "at": at,
        **{name: _as_long(run.observed(name), at) for name in ("roughness", "loss_range", "surprise")},
        **(_tangency(model, norm, batch) if norm in _SPECS else {}),
        "findings": list(run.findings),
    }


def _as_long(values: list[float | None], at: list[int]) -> list[float | None]:
    """Of a run that diverged there are fewer."""
    return values + [None] * (len(at) - len(values))


def _landscapes(batch: Batch, at: list[int]) -> Observe:
    def observe(model: nn.Module, step: int) -> Mapping[str, Any]:
        return _numbers(along_the_gradient(model, batch, next_token_loss)) if step - 1 in at else {}

    return observe


def _numbers(landscape: Landscape) -> dict[str, float | None]:
    names = ("roughness", "loss_range", "surprise")
    return {name: finite(float(getattr(landscape, name))) for name in names}


def _tangency(model: Transformer, norm: str, batch: Batch) -> dict[str, float]:
    """Errors of the two formulas over all norms of a trained model, with the eps it has and without."""
    worst: dict[str, float] = {}
    for name, eps in (("with_eps", 1e-5), ("without_eps", NO_EPS)):
        spec = _SPECS[norm].replace(eps=eps)
        copied = _in_float64(model, spec if norm != "detached" else DetachedNorm)
        norms = {path: module.norm for path, module in copied.named_modules() if isinstance(module, Residual)}
        found = tangencies(copied, {**norms, "final": copied.final_norm}, spec, batch, next_token_loss).values()
        worst[f"projected_{name}"] = max(each.projected for each in found)
        worst[f"exact_{name}"] = max(each.exact for each in found)
        worst["removed"] = max(each.removed for each in found)
    return worst


def _in_float64(model: Transformer, norm: NormLayer) -> Transformer:
    copied = Transformer(dataclasses.replace(model.config, norm=norm))
    copied.load_state_dict(model.state_dict())
    return copied.to(next(model.parameters()).device, torch.float64)


def _measure_start(lab: Laboratory, arm: Arm) -> Measurement:
    """Roughness of a deep model's loss before the first step, and its loss with branches scaled up and down."""
    norm, layers, batch = NORMS[arm.choices["norm"]], lab.integer("deep_layers"), _held_out_batch(lab)
    losses = []
    for gain in _GAINS:
        with torch.no_grad():
            losses.append(next_token_loss(_model(lab, norm, layers, branch_gain=gain), batch).item())
        lab.tell(len(losses) / (1 + len(_GAINS)))
    landscape = along_the_gradient(_model(lab, norm, layers), batch, next_token_loss)
    spread = max(losses) - min(losses)
    return {**_numbers(landscape), "scale_spread": finite(spread)}


def _measure_turning(lab: Laboratory, _arm: Arm) -> Measurement:
    """Scale-invariant groups, found by behaviour, under steps from several lengths; then plain gradient descent."""
    norm = specs.TORCH_LAYER_NORM.replace(eps=NO_EPS)
    batch = _held_out_batch(lab)
    layers = lab.integer("turning_layers")
    wide = _model(lab, norm, layers, placement="peri").double()
    measured = turnings(wide, lambda: wide(batch[0][:2, :-1]), lambda: next_token_loss(wide, batch))
    model = _model(lab, norm, layers, placement="peri")
    named = dict(model.named_parameters())
    groups = [[named[path] for path in each.paths] for each in measured]

    def observe(_model: nn.Module, _step: int) -> Mapping[str, Any]:
        slopes = [[parameter.grad for parameter in group if parameter.grad is not None] for group in groups]
        return {"squares": [_square(group) for group in groups], "steps": [_square(slope) for slope in slopes]}

    training, _ = text_of_the_library()
    recipe = Recipe(
        steps=lab.integer("turning_steps"),
        learning_rate=lab.number("turning_rate"),
        optimizer="sgd",
        clip=None,
    )
    supply = windows(training, batch=lab.integer("batch"), window=lab.integer("window"), seed=lab.seed)
    run = lab.train(model, recipe, supply, next_token_loss, observe=observe)
    start = run.observed("squares")[0]
    end = [_square(group) for group in groups]
    rates = [point.learning_rate for point in run.points]
    grown = [
        sum(rate**2 * square for rate, square in zip(rates, squares, strict=True))
        for squares in zip(*run.observed("steps"), strict=True)
    ]
    return {
        "losses": padded(run, recipe.steps),
        "groups": [list(each.paths) for each in measured],
        "expected_groups": 2 * layers,
        "products": [max(each.products) / min(each.products) - 1 for each in measured],
        "cosines": [each.cosine for each in measured],
        "by_gradient": [list(each.by_gradient) for each in measured],
        "by_sign": [list(each.by_sign) for each in measured],
        "growth_errors": [abs((b - a) / g - 1) for a, b, g in zip(start, end, grown, strict=True)],
        "growth": [b / a for a, b in zip(start, end, strict=True)],
        "findings": list(run.findings),
    }


def _square(tensors: Sequence[Tensor]) -> float:
    return flat(tensors).double().square().sum().item()
