"""JAX: flax (linen and nnx), haiku, equinox, jax.nn and Keras on JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from wild_libraries import keras_torch
from wild_libraries.arrays import BIAS, WEIGHT, of_jax
from wild_libraries.rows import (
    GROUP,
    GROUP_PAPER,
    INSTANCE_PAPER,
    LAYER,
    LAYER_PAPER,
    RMS,
    RMS_PAPER,
    Row,
)

PACKAGES = {"flax": "flax", "haiku": "dm-haiku", "equinox": "equinox", "jax": "jax", "keras": "keras"}
BOTH = {"weight": WEIGHT, "bias": BIAS}
LAST = {"axes": "all_but_batch_channels_last"}
IMAGE = (2, 5, 5, 64)
FLAX = "its docstring: epsilon 1e-6"
HAIKU = "its signature's eps 1e-5"


def linen(*names: str, **settings: Any) -> Callable[[Any], Callable[..., Tensor]]:
    """A layer of flax.linen as a function of x and its parameters."""

    def make(kind: Any) -> Callable[..., Tensor]:
        norm = kind(**settings)
        return of_jax(lambda x, *given: norm.apply({"params": dict(zip(names, given, strict=True))}, x))

    return make


def nnx(*names: str, **settings: Any) -> Callable[[Any], Callable[..., Tensor]]:
    """A layer of flax.nnx."""

    def make(kind: Any) -> Callable[..., Tensor]:
        from flax.nnx import Rngs

        norm = kind(num_features=64, rngs=Rngs(0), **settings)

        def call(x: Any, *given: Any) -> Any:
            for name, value in zip(names, given, strict=True):
                getattr(norm, name).set_value(value)
            return norm(x)

        return of_jax(call)

    return make


def haiku(*names: str, module: str, **settings: Any) -> Callable[[Any], Callable[..., Tensor]]:
    """A module of haiku; its parameters are those of the name `module`."""

    def make(kind: Any) -> Callable[..., Tensor]:
        import haiku as hk

        function = hk.without_apply_rng(hk.transform(lambda x: kind(**settings)(x)))
        return of_jax(lambda x, *given: function.apply({module: dict(zip(names, given, strict=True))}, x))

    return make


def equinox(*names: str, axes: int = 2, **settings: Any) -> Callable[[Any], Callable[..., Tensor]]:
    """A module of equinox, which takes one sample."""

    def make(kind: Any) -> Callable[..., Tensor]:
        import equinox as eqx
        import jax

        norm = kind(**settings)

        def call(x: Any, *given: Any) -> Any:
            each: Any = eqx.tree_at(lambda tree: [getattr(tree, name) for name in names], norm, list(given))
            for _ in range(axes):
                each = jax.vmap(each)
            return each(x)

        return of_jax(call)

    return make


ROWS = [
    *(
        row
        for library, layer in (("flax.linen", linen), ("flax.nnx", nnx))
        for row in (
            Row(
                path=f"{library}:LayerNorm",
                make=layer("scale", "bias"),
                **BOTH,
                expected=LAYER | {"eps": 1e-6},
                source=f"{LAYER_PAPER}; {FLAX}",
            ),
            Row(
                path=f"{library}:RMSNorm",
                make=layer("scale"),
                weight=WEIGHT,
                expected=RMS,
                source=f"{RMS_PAPER}; {FLAX}",
            ),
            Row(
                path=f"{library}:GroupNorm",
                make=layer("scale", "bias", num_groups=4),
                **BOTH,
                shape=IMAGE,
                expected=LAYER | LAST | {"eps": 1e-6, "groups": 4},
                source=f"{GROUP_PAPER}; {FLAX}",
            ),
            Row(
                path=f"{library}:InstanceNorm",
                make=layer("scale", "bias"),
                **BOTH,
                shape=IMAGE,
                expected=LAYER | LAST | {"eps": 1e-6, "groups": 64},
                source=f"{INSTANCE_PAPER}; {FLAX}",
            ),
        )
    ),
    Row(
        path="flax.linen:LayerNorm",
        variant="use_fast_variance=False",
        make=linen("scale", "bias", use_fast_variance=False),
        **BOTH,
        expected=LAYER | {"eps": 1e-6},
        source=f"{LAYER_PAPER}; {FLAX}",
    ),
    Row(
        path="haiku:LayerNorm",
        make=haiku("scale", "offset", module="layer_norm", axis=-1, create_scale=True, create_offset=True),
        **BOTH,
        expected=LAYER,
        source=f"{LAYER_PAPER}, named in its docstring; {HAIKU}",
    ),
    Row(
        path="haiku:RMSNorm",
        make=haiku("scale", module="rms_norm", axis=-1),
        weight=WEIGHT,
        expected=RMS | {"eps": 1e-5},
        source=f"{RMS_PAPER}, named in its docstring; {HAIKU}",
    ),
    Row(
        path="haiku:GroupNorm",
        make=haiku("scale", "offset", module="group_norm", groups=4),
        **BOTH,
        shape=IMAGE,
        expected=LAYER | LAST | {"groups": 4},
        source=f"{GROUP_PAPER}, named in its docstring; {HAIKU}",
    ),
    Row(
        path="haiku:InstanceNorm",
        make=haiku("scale", "offset", module="instance_norm", create_scale=True, create_offset=True),
        **BOTH,
        shape=IMAGE,
        expected=LAYER | LAST | {"groups": 64},
        source=f"{INSTANCE_PAPER}, named in its docstring; {HAIKU}",
    ),
    Row(
        path="equinox.nn:LayerNorm",
        make=equinox("weight", "bias", shape=64),
        **BOTH,
        expected=LAYER,
        source="its docstring: (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta",
    ),
    Row(
        path="equinox.nn:RMSNorm",
        variant="use_bias=False",
        make=equinox("weight", shape=64, use_bias=False),
        weight=WEIGHT,
        expected=RMS | {"eps": 1e-5},
        source="its docstring: x / sqrt(eps + ||x||^2 / n) * gamma",
    ),
    Row(
        path="equinox.nn:RMSNorm",
        make=equinox("weight", "bias", shape=64),
        **BOTH,
        expected=RMS | {"eps": 1e-5, "has_bias": True},
        source="its docstring: x / sqrt(eps + ||x||^2 / n) * gamma + beta",
    ),
    Row(
        path="equinox.nn:GroupNorm",
        make=equinox("weight", "bias", axes=1, groups=4, channels=64),
        **BOTH,
        shape=(2, 64, 5, 5),
        expected=GROUP | {"groups": 4},
        source="its docstring: (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta",
    ),
    Row(
        path="jax.nn:standardize",
        make=of_jax,
        expected={name: value for name, value in LAYER.items() if name not in ("has_weight", "weight_offset")}
        | {"has_bias": False},
        source="its docstring: to zero mean and unit variance; its signature's epsilon 1e-5",
    ),
    *(replace(row, variant=f"{row.variant}, on JAX".removeprefix(", ")) for row in keras_torch.ROWS),
]
