"""What the study `centring` measures: losses, and the energy of weights, gradients and stream along a direction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit import specs
from normkit.geometry import centre
from normkit.study.curves import padded
from normkit.study.hyperplane_norm import HyperplaneNorm, random_hyperplanes
from normkit.study.laboratory import Laboratory
from normkit.study.loop import Observe, Recipe
from normkit.study.norms import NormLayer
from normkit.study.result import Arm, Measurement, Settings, integer
from normkit.study.transformer import Residual, Transformer, TransformerConfig
from normkit.study.windows import held_out_loss, next_token_loss, text_of_the_library, windows

_SHALLOW = ("LayerNorm", "RMSNorm", "hyperplane", "own hyperplanes", "16 directions", "centring only")
_DEEP = ("LayerNorm", "RMSNorm", "centring only")
_POINTS = 20


class Centring(nn.Module):
    """LayerNorm without its division: y = weight * (x - mean(x)) + bias.

    Args:
        width: Features of a row.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Centre x of shape (..., width)."""
        return self.weight * centre(x) + self.bias


def _norm(name: str, seed: int) -> NormLayer:
    norms: Mapping[str, NormLayer] = {
        "LayerNorm": specs.TORCH_LAYER_NORM,
        "RMSNorm": specs.TORCH_RMS_NORM.replace(eps=1e-5),
        "hyperplane": random_hyperplanes(seed=seed),
        "own hyperplanes": random_hyperplanes(seed=seed, is_shared=False),
        "16 directions": random_hyperplanes(16, seed=seed),
        "centring only": Centring,
    }
    return norms[name]


def arms(settings: Settings) -> tuple[Arm, ...]:
    """Norms in a shallow model, and some of them in a deep one."""
    deep = integer(settings, "deep_layers")
    return (
        *(Arm(name=norm, choices={"norm": norm, "layers": settings["layers"]}) for norm in _SHALLOW),
        *(Arm(name=f"{norm}, deep", choices={"norm": norm, "layers": deep}, cost=1.5) for norm in _DEEP),
    )


def measure(lab: Laboratory, arm: Arm) -> Measurement:
    """Train with one norm; losses, and shares of energy along what the norms project out."""
    window = lab.integer("window")
    config = TransformerConfig(
        context=window,
        width=lab.integer("width"),
        layers=int(arm.choices["layers"]),
        norm=_norm(arm.choices["norm"], lab.seed),
    )
    model = Transformer(config, seed=lab.seed).to(lab.device)
    is_deep = arm.name.endswith("deep")
    steps = lab.integer("deep_steps" if is_deep else "steps")
    recipe = Recipe(steps=steps, learning_rate=lab.number("learning_rate"), warmup=lab.integer("warmup"))
    training, held_out = text_of_the_library()
    directions = removed_directions(model)
    start = {path: writer.clone() for path, writer in writers(model)}
    (probe,) = next(windows(held_out, batch=8, window=window, seed=0))
    before = stream_share(model, probe[:, :-1].to(lab.device), directions)
    every = max(1, steps // _POINTS)
    at = list(range(every, steps, every)) or [0]
    run = lab.train(
        model,
        recipe,
        windows(training, batch=lab.integer("batch"), window=window, seed=lab.seed),
        next_token_loss,
        observe=_observe(directions, start, at),
    )
    return {
        "losses": padded(run, steps),
        "held_out": run.capped(held_out_loss(model, held_out, window=window)),
        "diverged": run.diverged,
        "chance": 1 / config.width,
        "at": at,
        "changes": _as_long(run.observed("changes"), at),
        "gradients": _as_long(run.observed("gradients"), at),
        "update": share(_changes(model, start), directions),
        "biases": share((bias[:, None] for bias in _biases(model)), directions),
        "stream_start": before,
        "stream_end": stream_share(model, probe[:, :-1].to(lab.device), directions),
        "findings": list(run.findings),
    }


def removed_directions(model: nn.Module) -> Tensor:
    """What the model's norms project out, as orthonormal columns: all-ones, unless the norms say otherwise."""
    for module in model.modules():
        if isinstance(module, HyperplaneNorm):
            return module.directions.detach()
    width = next(module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding))
    parameter = next(model.parameters())
    return torch.full((width, 1), 1 / math.sqrt(width), device=parameter.device, dtype=parameter.dtype)


def writers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Paths and matrices (n, inputs) of what writes to the residual stream: embeddings and the ends of branches."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield path, module.weight.detach().mT
        elif isinstance(module, nn.Linear) and path.endswith((".out", ".down")):
            yield path, module.weight.detach()


def writing_gradients(model: nn.Module) -> Iterator[Tensor]:
    """The gradients of `writers`, in their order and shape."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight.grad is not None:
            yield module.weight.grad.mT
        elif isinstance(module, nn.Linear) and path.endswith((".out", ".down")) and module.weight.grad is not None:
            yield module.weight.grad


def _biases(model: nn.Module) -> Iterator[Tensor]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path.endswith((".out", ".down")):
            yield module.bias.detach()


def share(matrices: Iterable[Tensor], directions: Tensor) -> float:
    """Mean over matrices W (n, inputs) of |Q^T W|^2 / (k |W|^2): their energy along one of k directions.

    A matrix without a preferred direction has 1 / n; one of zeros does not count.
    """
    wide = directions.double()
    shares = [
        ((wide.mT @ matrix.double()).square().sum() / matrix.double().square().sum()).item() / wide.shape[1]
        for matrix in matrices
        if bool(matrix.any())
    ]
    return sum(shares) / len(shares) if shares else math.nan


@torch.no_grad()
def stream_share(model: nn.Module, ids: Tensor, directions: Tensor) -> float:
    """`share` of the residual stream, as each residual branch finds it: mean over branches and rows."""
    found: list[float] = []

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].double().flatten(0, -2)
        along = (rows @ directions.double()).square().sum(-1) / directions.shape[1]
        found.append((along / rows.square().sum(-1)).mean().item())

    handles = [module.register_forward_pre_hook(keep) for module in model.modules() if isinstance(module, Residual)]
    try:
        model(ids)
    finally:
        for handle in handles:
            handle.remove()
    return sum(found) / len(found)


def _as_long(values: list[float], at: list[int]) -> list[float | None]:
    """Of a run that diverged there are fewer."""
    return values + [None] * (len(at) - len(values))


def _changes(model: nn.Module, start: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """What has become of the writers since the start, less what they were."""
    for path, writer in writers(model):
        yield writer - start[path]


def _observe(directions: Tensor, start: Mapping[str, Tensor], at: list[int]) -> Observe:
    def observe(model: nn.Module, step: int) -> Mapping[str, Any]:
        if step - 1 not in at:
            return {}
        return {
            "changes": share(_changes(model, start), directions),
            "gradients": share(writing_gradients(model), directions),
        }

    return observe
