"""What a call costs where the arithmetic is nearly nothing: one row, normkit against torch, in microseconds.

    python benchmarks/call_overhead.py [--features 4096] [--seconds 1.0] [--threads 2]

Medians of interleaved rounds in one process. "operator" is the compiled kernel called through torch's dispatcher, with
nothing of Python around it; forward+backward is timed through `torch.autograd.grad`, for the input and the parameters.
"""

from __future__ import annotations

import argparse
import datetime

import torch
from torch.nn import functional as F

import normkit
from normkit import specs
from normkit.bench.running import machine
from normkit.bench.timing import times
from normkit.ops import schemas
from normkit.ops.plans import plan

EPS = 1e-5
# (norm, pass) -> the ratio to torch that is asked for; at most.
BARS = {
    ("layer_norm", "forward"): 1.5,
    ("rms_norm", "forward"): 1 / 2,
    ("layer_norm", "forward+backward"): 1.15,
    ("rms_norm", "forward+backward"): 1 / 1.6,
}


def calls(name, dtype, features):
    """What is timed, by pass and by whose it is."""
    x, dy = torch.randn(1, features).to(dtype), torch.randn(1, features).to(dtype)
    parameters = [(1 + 0.1 * torch.randn(features)).to(dtype) for _ in range(2 if name == "layer_norm" else 1)]
    spec = specs.TORCH_LAYER_NORM if name == "layer_norm" else specs.TORCH_RMS_NORM
    found = plan(spec.replace(eps=EPS))
    weight, bias = (*parameters, None)[:2]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *parameters)]
    timed = {
        ("forward", "operator"): lambda: schemas.normalize_rows(
            x, weight, bias, found.conventions, found.eps, found.offset
        )
    }
    for who, norm in (("normkit", getattr(normkit, name)), ("torch", getattr(F, name))):
        timed["forward", who] = lambda norm=norm: norm(x, (features,), *parameters, eps=EPS)
        timed["forward+backward", who] = lambda norm=norm: torch.autograd.grad(
            norm(leaves[0], (features,), *leaves[1:], eps=EPS), leaves, dy
        )
    return timed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each thing timed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    here = machine()
    print(f"{datetime.date.today()}, {here.cpu}, {here.threads} torch threads, torch {here.torch}, {here.kernels}")
    print(f"one row of {options.features}, microseconds, medians of interleaved rounds\n")
    print(f"{'':38}{'operator':>10}{'normkit':>10}{'torch':>10}{'ratio':>8}{'bar':>8}")
    for name, dtype in ((name, dtype) for name in ("layer_norm", "rms_norm") for dtype in ("float32", "bfloat16")):
        timed = times(calls(name, getattr(torch, dtype), options.features), options.seconds)
        found = {key: time.seconds for key, time in timed.items()}
        for order in ("forward", "forward+backward"):
            ours, theirs = (found[order, who] for who in ("normkit", "torch"))
            operator = f"{found[order, 'operator'] * 1e6:10.2f}" if order == "forward" else " " * 10
            print(
                f"{f'{name} {dtype} {order}':38}{operator}{ours * 1e6:10.2f}{theirs * 1e6:10.2f}"
                f"{ours / theirs:8.2f}{BARS[name, order]:8.2f}"
            )


if __name__ == "__main__":
    main()
