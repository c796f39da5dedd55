"""Whether the Triton kernels can be used, and for which tensors. Triton itself is imported with the first that can.

If they cannot, the reason is one line and the reference computes. The environment variable NORMKIT_CUDA is read when
the kernels are first used:

    auto  `on` once a run of benchmarks/gpu.py on a GPU is recorded, until then `off` (default)
    on    the kernels, where there is Triton and a GPU of compute capability 8.0 or more
    off   no kernels: plain torch

Where they are on, ops/checking.py compares a few rows of each kind of call with the reference before its first use.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor
from torch.nn import Parameter

from normkit.errors import InputError
from normkit.kernels import signatures
from normkit.spec import NormSpec

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_CLASSES = (Tensor, Parameter)
_LEAST_CAPABILITY = (8, 0)
# True from the commit on that records benchmarks/results/gpu.json; a test holds the two together.
_HAS_RUN_ON_A_GPU = False


@functools.cache
def load() -> str | None:
    """Why there are no Triton kernels here, on one line; None if there are.

    Raises:
        InputError: If NORMKIT_CUDA is unknown.
    """
    chosen = os.environ.get("NORMKIT_CUDA", "auto")
    if chosen not in ("auto", "on", "off"):
        raise InputError(f"NORMKIT_CUDA must be auto, on or off, got {chosen!r}")
    if chosen == "off":
        return "NORMKIT_CUDA=off"
    if chosen == "auto" and not _HAS_RUN_ON_A_GPU:
        return "they have not run on a GPU yet; NORMKIT_CUDA=on uses them, each kind of call after a self-check"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch for CUDA brings it"
    return None


@functools.cache
def _capability_reason(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability >= _LEAST_CAPABILITY:
        return None
    return f"a GPU of compute capability {capability[0]}.{capability[1]}; the kernels need 8.0"


def device_reason(index: int) -> str | None:
    """Why there are no kernels for a GPU; None if there are."""
    return load() or _capability_reason(index)


# All that `torch.compiler.assume_constant_result` does, which imports the compiler, and so Triton.
device_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def supports_tensors(
    spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> str | None:
    """Why the kernels cannot compute a norm of these tensors, all on one GPU; None if they can.

    Args:
        spec: The conventions, which `signatures.supports_spec` supports.
        x: Input of shape (..., n), of any strides.
        weight: Gain, or None.
        bias: Bias, or None.
        residual: Added to x before the norm, or None.
    """
    for tensor in (x, weight, bias, residual):
        if tensor is None:
            continue
        if type(tensor) not in _CLASSES:
            return f"tensors of class {type(tensor).__name__}"
        if tensor.dtype not in FLOATING:
            return f"{tensor.dtype}"
        if tensor.device != x.device:
            return f"tensors on {tensor.device.type} and {x.device.type}"
    rows = x if residual is None else residual
    if rows.dtype is not torch.float32 and spec.statistics_dtype == "input":
        return "statistics in 16 bits"
    if spec.casts.output_dtype(x.dtype, weight, bias) not in FLOATING:
        return "an output that is not of 16 or 32 bits"
    return signatures.supports_sizes(len(spec.axes), x, weight, bias)
