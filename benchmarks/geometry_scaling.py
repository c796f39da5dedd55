"""Time per element of the geometry's O(n) functions on single rows of 1e3 to 1e7 features, float64, one thread.

    python benchmarks/geometry_scaling.py [--largest 10000000] [--seconds 0.15]

Each cell is the fastest of at least 3 calls, as other work on the machine only ever adds. `slope` is the least-squares
slope of log time over log n from 1e5 on: 1 for a linear function, 2 for a quadratic one. Caches bend it on any machine
(1e5 numbers may lie in one, 1e7 do not), so `beside a copy` fits the time divided by that of copying the same row: this
is what a missing linearity would show in everywhere.
"""

from __future__ import annotations

import argparse
import datetime
import math
import time
from collections.abc import Callable
from functools import partial

import torch

from normkit import NormSpec
from normkit.bench import allocation
from normkit.geometry import centre, decompose, euler_defect, fiber, jvp, tangent_projection, to_sphere, vjp

SIZES = (1_000, 10_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
FITTED_FROM = 100_000
CALLS = (3, 200)
SPEC = NormSpec()


def functions(n: int) -> dict[str, Callable[[], object]]:
    """Every timed call on rows of n features."""
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, n, generator=generator, dtype=torch.float64)
    weight, bias = 1 + 0.1 * v, 0.1 * x
    return {
        "copy": x.clone,
        "centre": partial(centre, x),
        "to_sphere": partial(to_sphere, x),
        "jvp": partial(jvp, x, v, SPEC, weight),
        "vjp": partial(vjp, x, v, SPEC, weight),
        "tangent_projection": partial(tangent_projection, v, x),
        "euler_defect": partial(euler_defect, x, SPEC, weight),
        "fiber": partial(fiber, 0.9 * v + bias, SPEC, weight, bias),
        "decompose": partial(decompose, x, SPEC, weight, bias),
    }


def fastest(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call, after one that is not counted."""
    call()
    times: list[float] = []
    while len(times) < CALLS[0] or (sum(times) < seconds and len(times) < CALLS[1]):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def slope(times: dict[int, float]) -> float:
    """Least-squares slope of log time over log n."""
    points = [(math.log(n), math.log(seconds)) for n, seconds in times.items() if n >= FITTED_FROM]
    centre_n, centre_t = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((log_n - centre_n) ** 2 for log_n, _ in points)
    return sum((log_n - centre_n) * (log_t - centre_t) for log_n, log_t in points) / spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="leave out longer rows")
    parser.add_argument("--seconds", type=float, default=0.15, help="time spent on one cell, at least 3 calls")
    options = parser.parse_args()
    allocation.settle()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    sizes = [n for n in SIZES if n <= options.largest]
    if sum(n >= FITTED_FROM for n in sizes) < 2:
        parser.error(f"a slope needs two sizes from {FITTED_FROM} on: --largest must be at least {SIZES[3]}")
    start = time.perf_counter()
    times: dict[str, dict[int, float]] = {}
    for n in sizes:
        for name, call in functions(n).items():
            times.setdefault(name, {})[n] = fastest(call, options.seconds)
    print(f"{datetime.date.today()}, torch {torch.__version__}, float64, one row, one thread; ns per element\n")
    print(f"{'n':20}{''.join(f'{n:>9.0e}' for n in sizes)}{'slope':>9}{'beside a copy':>16}")
    for name, row in times.items():
        cells = "".join(f"{row[n] / n * 1e9:9.2f}" for n in sizes)
        beside = slope({n: row[n] / times["copy"][n] for n in sizes})
        print(f"{name:20}{cells}{slope(row):9.3f}{beside:+16.3f}")
    print(f"\n{time.perf_counter() - start:.0f} s in all; linear: slope near 1, beside a copy near 0")


if __name__ == "__main__":
    main()
