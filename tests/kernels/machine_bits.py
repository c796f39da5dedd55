"""The bits that the compiled kernels give for fixed inputs, one line for each case: the same on every CPU.

Run as a program on two machines, or under two values of NORMKIT_CPU, and compare what it prints. The first line names
the instruction set in use.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch
from torch import Tensor

import normkit as nk
from normkit import NormSpec, specs
from normkit.checkpoint.hadamard import compiled
from normkit.checkpoint.plan import Rotation
from normkit.kernels import cpu
from normkit.kernels.hadamard import turn

SHAPES = ((7, 96), (3, 777), (2, 5120), (33, 5), (4, 1))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def numbers(generator: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of a mean other than 0, some of them large, that no library's transcendental function has touched."""
    values = generator.random(shape) * 4 - 1
    values.flat[:: max(1, values.size // 3)] *= 50
    # By way of float32: torch rounds float64 to 16 bits twice on some CPUs and once on others.
    return torch.from_numpy(values.astype(np.float32)).to(dtype)


def digest(*tensors: Tensor) -> str:
    """The first 16 digits of the SHA-256 of the tensors' bytes; the sign and payload of a NaN are each CPU's own."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = torch.where(tensor.isnan(), torch.nan, tensor).detach().contiguous()
        found.update(plain.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def case(spec: NormSpec, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> str:
    """One digest of the outputs, one of the gradients, of a norm with an addition in front of it."""
    generator = np.random.default_rng(seed)
    x, residual, upstream = (numbers(generator, shape, dtype) for _ in range(3))
    weight, bias = (
        numbers(generator, shape[-1:], dtype).requires_grad_() if held else None
        for held in (spec.has_weight, spec.has_bias)
    )
    x.requires_grad_(), residual.requires_grad_()
    if reason := cpu.supports(spec, x, weight, bias, residual):
        return f"not compiled: {reason}"
    y, added = nk.add_normalize(x, residual, spec, weight, bias)
    leaves = [leaf for leaf in (x, residual, weight, bias) if leaf is not None]
    gradients = torch.autograd.grad([y, added], leaves, [upstream, upstream])
    return f"{digest(y, added)} {digest(*gradients)}"


def rotation(rows: int, columns: int, size: int, axis: int, dtype: torch.dtype) -> str:
    """One digest of runs along an axis, times factors and a Hadamard matrix with its signs."""
    generator = np.random.default_rng(size)
    x, factors = numbers(generator, (rows, columns), dtype), numbers(generator, (columns,), torch.float64)
    made = compiled(Rotation(axis=axis, size=size, seed="0", construction=""))
    out = torch.empty_like(x)
    turned = {"down": None, "across": made} if axis else {"down": made, "across": None}
    measured = turn(x, out, factors=factors, length=rows, **turned)
    return f"{digest(out)} {digest(torch.tensor(measured, dtype=torch.float64))}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(f"{cpu.instructions()}\n")
    presets = sorted((name, value) for name, value in vars(specs).items() if isinstance(value, NormSpec))
    for number, (name, spec) in enumerate(presets):
        for shape in SHAPES:
            for dtype in DTYPES:
                found = case(spec, shape, dtype, seed=number)
                sys.stdout.write(f"{name} {'x'.join(map(str, shape))} {str(dtype)[6:]} {found}\n")
    for size in (4, 64, 96, 576, 4096):
        for dtype in DTYPES:
            for axis, shape in ((0, (size, 19)), (1, (3, 2 * size))):
                found = rotation(*shape, size, axis, dtype)
                sys.stdout.write(f"rotation {size} axis {axis} {str(dtype)[6:]} {found}\n")
