"""Liger: GroupNorm squares and adds in the input's dtype, and takes the variance as E[x^2] - E[x]^2.

    python census/finds/liger_group_norm.py

Runs in Triton's interpreter, without a GPU; what a GPU would compute is read off the compiler's first stage. The shape
is that of the first block of Stable Diffusion: 320 channels, 32 groups, 64 x 64. The report is
docs/wild/reports/liger_group_norm.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings

COMPILING = sys.argv[1:] == ["compiled"]
os.environ["TRITON_INTERPRET"] = "0" if COMPILING else "1"

import liger_kernel.ops.group_norm as theirs
import torch
import triton
import triton.language as tl
from torch.nn.functional import group_norm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from patching import fixed, versions


class Eps(float):
    """A number that the interpreter's code may ask for `.to`, as a GPU's may."""

    def to(self, _):
        return self


@triton.jit
def rsqrt(x):
    """In place of the GPU's, which the interpreter lacks."""
    return 1.0 / tl.sqrt(x)


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def compare(module, dtype, mean=0.0, std=1.0, shape=(1, 320, 64, 64), groups=32):
    """Errors of the output and of the gradients, of theirs and of torch's."""
    torch.manual_seed(0)
    x, dy = ((torch.randn(shape) * std + mean).to(dtype), torch.randn(shape).to(dtype))
    channels = shape[1]
    weight, bias = (1 + 0.1 * torch.randn(channels)).to(dtype), torch.zeros(channels, dtype=dtype)

    def run(norm, *tensors, dy):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        y = norm(*leaves)
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def liger(x, weight, bias):
        return module.LigerGroupNormFunction.apply(x, weight, bias, channels, groups, Eps(1e-6))

    def torchs(x, weight, bias):
        return group_norm(x, groups, weight, bias, 1e-6)

    right = run(torchs, x.double(), weight.double(), bias.double(), dy=dy.double())
    for title, norm in (("Liger", liger), ("torch", torchs)):
        found = run(norm, x, weight, bias, dy=dy)
        errors = ", ".join(
            f"{name} {error(a, b):.0e}" for name, a, b in zip(("y", "dx", "dW", "dB"), found, right, strict=True)
        )
        zeros = (found[0] == 0).double().mean().item()
        print(f"    {title}: {errors}; {zeros:.0%} of y is 0")


def compiled(module):
    """The dtypes in which the compiler squares and adds float16 inputs."""
    function = module._group_norm_forward_kernel
    pointers = dict.fromkeys(("Y_ptr", "X_ptr", "Mean_ptr", "RSTD_ptr", "W_ptr", "B_ptr"), "*fp16")
    signature = {name: pointers.get(name, "i32") for name in function.arg_names}
    signature |= {"eps": "fp32", "BLOCK_SIZE": "constexpr"}
    ir = triton.compile(ASTSource(function, signature, {"BLOCK_SIZE": 1024}), GPUTarget("cuda", 90, 32)).asm["ttir"]
    squares = {dtype for _, dtype in re.findall(r"arith\.mulf (%\w+), \1 : tensor<1024x(\w+)>", ir)}
    sums = set(re.findall(r"\(tensor<1024x(\w+)>\) -> \w+", ir))
    print(f"  compiled for a GPU: squares in {', '.join(sorted(squares))}, sums in {', '.join(sorted(sums))}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    if COMPILING:
        compiled(theirs)
        compiled(fixed("liger_group_norm", theirs))
        sys.exit()
    print(versions("torch", "triton", "liger_kernel"))
    gpu = subprocess.run(
        [sys.executable, __file__, "compiled"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    for title, module, line in (
        ("as installed", theirs, gpu[0]),
        ("with the fix", fixed("liger_group_norm", theirs), gpu[1]),
    ):
        print(title)
        print(line)
        module.rsqrt = rsqrt
        for dtype, mean, std in (
            (torch.float16, 0, 1),
            (torch.float16, 0, 2),
            (torch.float32, 100, 1),
            (torch.float32, 1000, 1),
        ):
            print(f"  {str(dtype)[6:]}, mean {mean}, deviation {std}")
            compare(module, dtype, mean, std)
        print("  float16, 256 images of 8 x 8, 8 channels")
        compare(module, torch.float16, 0, 1, (256, 8, 8, 8), 2)
