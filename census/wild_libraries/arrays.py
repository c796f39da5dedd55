"""Functions of JAX's and MLX's arrays as functions of tensors, in every dtype that `identify` asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

WEIGHT = torch.ones(64)
BIAS = torch.zeros(64)


def of_jax(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of JAX's arrays as one of tensors."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def of_tensors(*tensors: Tensor) -> Tensor:
        y = function(*(jnp.asarray(_numbers(each), dtype=_name(each.dtype)) for each in tensors))
        return _tensor(np.asarray(y.astype("float64")), str(y.dtype))

    return of_tensors


def of_mlx(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of MLX's arrays as one of tensors, on the CPU."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)

    def of_tensors(*tensors: Tensor) -> Tensor:
        arrays = [mx.array(_numbers(each)).astype(getattr(mx, _name(each.dtype))) for each in tensors]
        y = function(*arrays)
        wide = mx.float64 if y.dtype == mx.float64 else mx.float32
        return _tensor(np.array(y.astype(wide)), str(y.dtype).removeprefix("mlx.core."))

    return of_tensors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numbers(tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor; NumPy has no bfloat16, and float32 holds each of its numbers."""
    tensor = tensor.detach()
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).numpy()


def _tensor(numbers: np.ndarray, dtype: str) -> Tensor:
    return torch.from_numpy(np.array(numbers)).to(getattr(torch, dtype))
