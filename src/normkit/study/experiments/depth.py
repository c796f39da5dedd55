"""`depth`: what 2 to 48 layers do to activations and gradients at the start, and no norm to training."""

from __future__ import annotations

import math
from typing import Any

import torch

from normkit.files import finite
from normkit.study.curves import mean_of_last, padded
from normkit.study.experiments.depth_charts import LONG, TRAINED, VARIANTS, charts
from normkit.study.experiments.depth_claims import CLAIMS
from normkit.study.laboratory import Laboratory
from normkit.study.loop import Recipe
from normkit.study.propagation import Propagation, propagate
from normkit.study.result import Arm, Measurement, Settings, Study
from normkit.study.transformer import Transformer, TransformerConfig
from normkit.study.windows import next_token_loss, text_of_the_library, windows

_CHOICES: dict[str, dict[str, Any]] = {
    "no norm": {"placement": "none", "norm": None},
    "post": {"placement": "post"},
    "pre": {"placement": "pre"},
    "peri": {"placement": "peri"},
    "DeepNorm": {"placement": "post"},
    "depth-scaled": {"placement": "pre", "depth_scaled": True},
}
_VOCABULARY = 256


def variant_of(name: str, layers: int, **choices: Any) -> TransformerConfig:
    """The configuration of an arm at a depth.

    Args:
        name: A key of the variants; DeepNorm takes alpha = (2 L)^(1/4) and beta = (8 L)^(-1/4).
        layers: L.
        choices: Further fields.
    """
    scales = {"residual_scale": (2 * layers) ** 0.25, "branch_gain": (8 * layers) ** -0.25}
    return TransformerConfig(layers=layers, **_CHOICES[name], **(scales if name == "DeepNorm" else {}), **choices)


def _arms(settings: Settings) -> tuple[Arm, ...]:
    depths, trained = settings["depths"], settings["trained_layers"]
    assert isinstance(depths, tuple)
    assert isinstance(trained, tuple)
    starts = tuple(Arm(name=name, choices={"variant": name, "window": settings["window"]}) for name in VARIANTS)
    long = Arm(name=LONG, choices={"variant": "pre", "window": settings["long_window"]})
    runs = tuple(
        Arm(name=f"{name}, {layers} layers trained", choices={"variant": name, "layers": layers}, cost=layers / 4)
        for layers in trained
        for name in TRAINED
    )
    return (*starts, long, *runs)


def _measure(lab: Laboratory, arm: Arm) -> Measurement:
    if "layers" in arm.choices:
        return _trained(lab, arm.choices["variant"], int(arm.choices["layers"]))
    depths = lab.settings["depths"]
    assert isinstance(depths, tuple)
    starts = []
    for done, layers in enumerate(depths, start=1):
        starts.append(_start(lab, arm, int(layers)))
        lab.tell(done / len(depths))
    return {
        "depths": list(depths),
        "stream": [finite(start.stream[-1]) for start in starts],
        "last_gradient": [finite(start.token_gradient) for start in starts],
        "all_gradients": [finite(math.hypot(*start.gradients)) for start in starts],
        "change": [finite(start.change) for start in starts],
        "deepest_stream": [finite(value) for value in starts[-1].stream],
        "deepest_gradients": [finite(value) for value in starts[-1].gradients],
    }


def _start(lab: Laboratory, arm: Arm, layers: int) -> Propagation:
    """Of an untrained model, on random ids: always as many tokens, in windows of the arm's length."""
    window = int(arm.choices["window"])
    config = variant_of(
        arm.choices["variant"], layers, vocabulary=_VOCABULARY, context=window, width=lab.integer("width")
    )
    model = Transformer(config, seed=lab.seed)
    lab.place(model)
    generator = torch.Generator().manual_seed(lab.seed)
    shape = (max(1, lab.integer("tokens") // window), window + 1)
    return propagate(model, torch.randint(_VOCABULARY, shape, generator=generator).to(lab.device), generator)


def _trained(lab: Laboratory, name: str, layers: int) -> Measurement:
    """A short run without warm-up."""
    window, steps = lab.integer("trained_window"), lab.integer("steps")
    model = Transformer(variant_of(name, layers, context=window, width=lab.integer("trained_width")), seed=lab.seed)
    text, _ = text_of_the_library()
    batches = windows(text, batch=lab.integer("trained_batch"), window=window, seed=lab.seed)
    recipe = Recipe(steps=steps, learning_rate=lab.number("learning_rate"))
    run = lab.train(model, recipe, batches, next_token_loss)
    return {
        "losses": padded(run, steps),
        "loss": mean_of_last(run),
        "first": run.points[0].loss,
        "diverged": run.diverged,
        "findings": list(run.findings),
    }


STUDY = Study(
    name="depth",
    title="Depth",
    question="What do 2 to 48 layers do to activations and gradients, with norms and without?",
    claims=CLAIMS,
    quick={
        "seeds": 3,
        "depths": (2, 4, 6, 12, 24, 48),
        "width": 128,
        "tokens": 128,
        "window": 8,
        "long_window": 32,
        "trained_layers": (4, 12),
        "trained_width": 64,
        "trained_batch": 8,
        "trained_window": 32,
        "steps": 60,
        "learning_rate": 1e-3,
    },
    full={"seeds": 8, "width": 256, "steps": 200},
    arms=_arms,
    measure=_measure,
    charts=charts,
    data="random token ids for what is measured at the start; bytes of Python's standard library for the training",
    regime="width 128 and windows of 8 tokens at the start, width 64 and 60 steps of AdamW at 1e-3 for the training",
)
