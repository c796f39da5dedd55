"""Plain RMSNorms of long rows, which PyTorch's own kernel for Hopper and Blackwell reads once.

That kernel (quack's, which torch vendors) spreads a row over several multiprocessors; ours reads such a row twice. It
needs `nvidia-cutlass-dsl` and `apache-tvm-ffi` and starts slowly, so only large calls go to it. Its results are
torch's: squares that leave float32's range are not computed again.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.triton.configuration import forward_tiling
from normkit.kernels.triton.program import Program

_OPERATION = "_fused_rms_norm"
# Hopper and Blackwell.
_CAPABILITIES = (9, 10)
# Below this a call costs more than the second reading: its start takes about 35 us (pytorch/pytorch#197009), in which
# time 3 TB/s move 100 MB.
_LEAST_BYTES = 100_000_000


@functools.cache
def has_native_kernel(index: int) -> bool:
    """Whether this torch has its own kernel for a GPU."""
    if torch.cuda.get_device_capability(index)[0] not in _CAPABILITIES:
        return False
    try:
        native: Any = import_module("torch.backends.python_native")
    except ImportError:
        return False
    return _OPERATION in native.get_dsl_operations("cutedsl") and not (
        native.is_dsl_disabled("cutedsl") or native.is_operation_disabled(_OPERATION)
    )


def is_delegated(of: Program, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch computes the forward pass of a norm without a residual."""
    itemsize = x.dtype.itemsize
    return (
        x.is_cuda
        and x.numel() * itemsize >= _LEAST_BYTES
        and not forward_tiling(x.numel() // of.n, of.n, of.n * itemsize * 2).is_whole
        and of.is_torch_rms_norm
        and bias is None
        and (weight is None or weight.dtype == x.dtype)
        # Its loads are of at least 32 bits.
        and of.n * itemsize % 4 == 0
        and x.is_contiguous()
        and has_native_kernel(x.device.index)
    )


def delegated(of: Program, x: Tensor, weight: Tensor | None) -> tuple[Tensor, None, Tensor]:
    """y, no new residual, and the statistics as our own kernel keeps them."""
    gain = None if weight is None else weight.reshape(-1)
    y, inverse = torch.ops.aten._fused_rms_norm(x.reshape(-1, of.n), (of.n,), gain, of.eps)
    # The power is 1, and the rounding error of 1 / s is not known.
    statistics = torch.zeros((of.statistics_lines, inverse.numel()), dtype=torch.float32, device=x.device)
    statistics[0], statistics[1] = inverse.reshape(-1), 1.0
    return y.reshape(x.shape), None, statistics
