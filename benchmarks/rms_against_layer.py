"""Is RMSNorm faster than LayerNorm? By whose kernel: torch's own two, eager formulas and a copy, in one run.

    python benchmarks/rms_against_layer.py

Medians of interleaved rounds, forward passes, without gradients. The floor is the copy: each norm reads its input once
and writes its output once.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

ROUNDS = 60
CASES = ((2048, 1024, torch.float32), (2048, 4096, torch.bfloat16))


def layer_formula(x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    return weight * (x - mean) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) + bias


def rms_formula(x, weight, _):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


CANDIDATES = {
    "copy": lambda x, *_: x.clone(),
    "F.layer_norm": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
    "F.rms_norm": lambda x, weight, _: F.rms_norm(x, weight.shape, weight),
    "LayerNorm, eager formula": layer_formula,
    "RMSNorm, eager formula": rms_formula,
}


def medians(rows: int, features: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds a call, by candidate."""
    x = torch.randn(rows, features).to(dtype)
    weight, bias = torch.ones(features, dtype=dtype), torch.zeros(features, dtype=dtype)
    taken: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for _ in range(ROUNDS):
        for name, function in CANDIDATES.items():
            begin = time.perf_counter()
            function(x, weight, bias)
            taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(times) for name, times in taken.items()}


@torch.no_grad()
def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {ROUNDS} rounds")
    for rows, features, dtype in CASES:
        found = medians(rows, features, dtype)
        print(f"\n{rows} x {features} {str(dtype).removeprefix('torch.')}")
        for name, milliseconds in found.items():
            ratio = milliseconds / found["F.layer_norm"]
            print(f"  {name:26}{milliseconds:8.2f} ms {ratio:7.2f} x F.layer_norm")


if __name__ == "__main__":
    main()
