"""Keras on PyTorch; Keras on JAX is in jax.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from wild_libraries.arrays import BIAS, WEIGHT, of_jax
from wild_libraries.rows import (
    BATCH_PAPER,
    CHOICE,
    GROUP_PAPER,
    L2,
    LAYER,
    LAYER_PAPER,
    RMS,
    RMS_PAPER,
    Row,
)

PACKAGES = {"keras": "keras"}
LAYERS = "keras.layers"
DOCUMENTED = "its docstring: epsilon 1e-3"
KERAS_EPS = {"eps": 1e-3}


def layer(names: tuple[str, ...] = (), **settings: Any) -> Callable[[Any], Callable[..., Tensor]]:
    """A function of x and parameters that calls a layer of the dtype of x; `names` are the layer's variables."""

    def make(kind: Any) -> Callable[..., Any]:
        import keras

        @cache
        def built(dtype: str, shape: tuple[int, ...]) -> Any:
            made = kind(dtype=dtype, **settings)
            made.build((None, *shape[1:]))
            return made

        def call(x: Any, *parameters: Any) -> Any:
            made = built(str(x.dtype).removeprefix("torch."), tuple(x.shape))
            for name, value in zip(names, parameters, strict=True):
                getattr(made, name).assign(value)
            y = made(x)
            return y.detach() if isinstance(y, torch.Tensor) else y

        return of_jax(call) if keras.backend.backend() == "jax" else call

    return make


BOTH = {"weight": WEIGHT, "bias": BIAS}
IMAGE = (2, 5, 5, 64)
ROWS = [
    Row(
        path=f"{LAYERS}:LayerNormalization",
        make=layer(("gamma", "beta")),
        **BOTH,
        expected=LAYER | KERAS_EPS,
        source=f"{LAYER_PAPER}; {DOCUMENTED}",
    ),
    Row(
        path=f"{LAYERS}:LayerNormalization",
        variant="rms_scaling=True",
        make=layer(("gamma",), rms_scaling=True),
        weight=WEIGHT,
        expected=RMS | KERAS_EPS,
        source=f"{RMS_PAPER}: root mean square, nothing centred",
        differs=(
            CHOICE,
            "The scale is the standard deviation about the mean, the row is not centred; deprecated, with a warning.",
        ),
    ),
    Row(
        path=f"{LAYERS}:RMSNormalization",
        make=layer(("scale",)),
        weight=WEIGHT,
        expected=RMS,
        source=f"{RMS_PAPER}; its docstring: epsilon 1e-6",
    ),
    Row(
        path=f"{LAYERS}:GroupNormalization",
        make=layer(("gamma", "beta"), groups=4),
        **BOTH,
        shape=IMAGE,
        expected=LAYER | KERAS_EPS | {"axes": "all_but_batch_channels_last", "groups": 4},
        source=f"{GROUP_PAPER}; {DOCUMENTED}",
    ),
    Row(
        path=f"{LAYERS}:UnitNormalization",
        make=layer(),
        expected={name: value for name, value in L2.items() if name not in ("has_weight", "weight_offset")},
        source="keras.ops.normalize documents x / max(norm, epsilon), 1e-12 in the layer",
    ),
    Row(
        path=f"{LAYERS}:BatchNormalization",
        variant="in evaluation",
        make=layer(),
        shape=(4, 64),
        expected={"verdict": "affine"},
        source=f"{BATCH_PAPER}: the statistics of training",
    ),
]
