"""Training runs for tests: put together by hand, or taken from a tiny model by plain measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normkit.measurement.facts import Attention, Attenuation, Block, ModelFacts, RowStatistics, Site
from normkit.measurement.training import Parameter, Quantity, Series, Training
from normkit.rules import Facts
from normkit.spec import NormSpec

VOCABULARY, WIDTH = 32, 16


def series(quantity: Quantity, values: Sequence[float], path: str = "", *, first: int = 0, every: int = 1) -> Series:
    """A series from a step on."""
    steps = tuple(first + every * index for index in range(len(values)))
    return Series(quantity=quantity, path=path, steps=steps, values=tuple(float(value) for value in values))


def calm(quantity: Quantity, path: str = "", *, steps: int = 60, level: float = 1.0, every: int = 1) -> Series:
    """A healthy series that wavers by 5 %; the wave is no multiple of a few steps."""
    return series(quantity, [level * (1 + 0.05 * math.sin(1.7 * step)) for step in range(steps)], path, every=every)


def raised(plain: Series, **changes: float) -> Series:
    """A series with other values at some steps: `raised(calm("loss"), at_50=9.0)`."""
    replaced = {int(name.removeprefix("at_")): value for name, value in changes.items()}
    values = [replaced.get(step, value) for step, value in zip(plain.steps, plain.values, strict=True)]
    return Series(quantity=plain.quantity, path=plain.path, steps=plain.steps, values=tuple(values))


def parameter(path: str, kind: Any = "weight", **changes: Any) -> Parameter:
    """A parameter that is trained well."""
    given: dict[str, Any] = {
        "site": "",
        "block": None,
        "size": 256,
        "dtype": "float32",
        "trained": True,
        "gradient_steps": 60,
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "rms": 0.1,
        "gradient_rms": 1e-3,
        "update_ratio": 1e-2,
        "first_update_ratio": 1e-3,
    }
    return Parameter(path=path, kind=kind, **(given | changes))


def training(*measured: Series, **changes: Any) -> Training:
    """A run of 60 steps with these series."""
    given: dict[str, Any] = {
        "steps": 60,
        "every": 5,
        "reports": 12,
        "reason": "asked",
        "reason_step": 59,
        "ranks": 1,
        "observer": "one process: nothing is pooled",
        "remarks": (),
        "optimizers": ("AdamW",),
        "parameters": (),
        "vocabulary": VOCABULARY,
    }
    return Training(series=measured, **(given | changes))


def rows(**changes: Any) -> RowStatistics:
    """Gaussian rows of rms 1."""
    given: dict[str, Any] = {
        "rows": 100,
        "features": WIDTH,
        "rms_min": 0.5,
        "rms_quantiles": (0.8, 1.0, 1.2),
        "rms_max": 1.5,
        "histogram": ((0, 100),),
        "zero_rows": 0,
        "mean_energy": 0.05,
        "angle_to_ones": 90.0,
        "absmax": 4.0,
        "nonfinite": 0,
    }
    return RowStatistics(**(given | changes))


def site(path: str, **changes: Any) -> Site:
    """A healthy norm."""
    given: dict[str, Any] = {
        "class_name": "LayerNorm",
        "order": 0,
        "calls": 1,
        "block": None,
        "role": "pre",
        "spec": NormSpec(),
        "confidence": 1.0,
        "evidence": (),
        "input": rows(),
        "output": rows(),
        "attenuation": Attenuation(median=1.0, smallest=1.0, share_below_99=0.0, share_below_90=0.0),
        "gain": None,
        "bias": None,
        "dtype": "float32",
        "headroom_bits": 100.0,
        "statistics_headroom_bits": None,
    }
    return Site(path=path, **(given | changes))


def block(index: int, **changes: Any) -> Block:
    """A pre-norm block that moves its stream."""
    given: dict[str, Any] = {
        "placement": "pre",
        "output_slope": 1.0,
        "branch_slope": 0.0,
        "rows_normalized": None,
        "stream_in": rows(),
        "stream_out": rows(),
        "branch_share": 0.3,
        "cosine": 0.95,
    }
    return Block(path=f"blocks.{index}", index=index, **(given | changes))


def facts(
    run: Training | None,
    *,
    sites: tuple[Site, ...] = (),
    blocks: tuple[Block, ...] = (),
    attentions: tuple[Attention, ...] = (),
) -> Facts:
    """What the rules are given of a run."""
    model = ModelFacts(
        name="tiny",
        class_name="Tiny",
        architecture="",
        parameters=1000,
        dtype="float32",
        width=WIDTH,
        source="a test",
        tokens=100,
        padding=0,
    )
    return Facts(
        model=model, sites=sites, blocks=blocks, attentions=attentions, final_norm=None, intent=None, training=run
    )


class Tiny(nn.Module):
    """An embedding, two residual layers behind norms, a norm and an output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.05)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + F.gelu(layer(norm(x)))
        return self.head(self.norms[2](x))


def trained(
    model: nn.Module,
    learning_rate: float = 3e-3,
    steps: int = 60,
    break_at: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
) -> Training:
    """Train a model to count upwards, with every number taken at every step.

    Args:
        model: Changed in place.
        learning_rate: Of Adam, after a warm-up of ten steps.
        steps: How many.
        break_at: Changes the targets of a step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    generator = torch.Generator().manual_seed(1)
    found: dict[tuple[Quantity, str], list[float]] = {}

    def put(quantity: Quantity, path: str, value: torch.Tensor) -> None:
        found.setdefault((quantity, path), []).append(float(value))

    for step in range(steps):
        ids = torch.randint(VOCABULARY, (8, 16), generator=generator)
        targets = (ids + 1) % VOCABULARY
        if break_at is not None:
            targets = break_at(step, targets)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = {path: tensor.grad for path, tensor in model.named_parameters()}
        put("loss", "", loss.detach())
        put("gradient norm", "", torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        for path, gradient in gradients.items():
            put("parameter gradient", path, gradient.norm())
        before = {path: tensor.detach().clone() for path, tensor in model.named_parameters()}
        optimizer.step()
        for path, tensor in model.named_parameters():
            if bool(before[path].any()):
                put("update ratio", path, (tensor.detach() - before[path]).norm() / before[path].norm())
    kinds = {
        id(tensor): "gain" for norm in model.modules() if isinstance(norm, nn.LayerNorm) for tensor in [norm.weight]
    }
    parameters = tuple(
        parameter(path, kinds.get(id(tensor), "weight" if tensor.dim() > 1 else "bias"), learning_rate=learning_rate)
        for path, tensor in model.named_parameters()
        if "embedding" not in path
    )
    return training(
        *(series(quantity, values, path) for (quantity, path), values in found.items()),
        steps=steps,
        parameters=parameters,
    )
