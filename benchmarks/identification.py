"""What it costs to identify norms: one of width 4096, all 65 of a 32-layer Llama, and to convert that model.

    python benchmarks/identification.py [--rounds 5] [--threads 2]

Medians. Of the model, the forward pass that shows which modules are called is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from normkit.bench.running import machine
from normkit.conversion.swapping import convert
from normkit.identification.behaviour import identify
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace

WIDTH, LAYERS, MODEL_WIDTH = 4096, 32, 512
ONE, ALL, CONVERTED = 0.025, 4.0, 8.0
"""The bars, in seconds."""


def load_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=MODEL_WIDTH,
        intermediate_size=2 * MODEL_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
    )
    return LlamaForCausalLM(config).eval()


def single_norms() -> Iterator[tuple[str, nn.Module]]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    yield "nn.LayerNorm", nn.LayerNorm(WIDTH)
    yield "nn.RMSNorm", nn.RMSNorm(WIDTH)
    yield "LlamaRMSNorm", LlamaRMSNorm(WIDTH)


def median(action: Callable[[], object], rounds: int) -> float:
    """Median seconds, after one round that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def report(name: str, seconds: float, bar: float) -> None:
    print(f"{name:44}{seconds * 1e3:10.0f}{bar * 1e3:10.0f}   {'met' if seconds <= bar else 'missed'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    here = machine()
    print(f"{here.date}, {here.cpu}, {here.threads} torch threads, torch {here.torch}")
    print(f"medians of {options.rounds} rounds\n\n{'':44}{'ms':>10}{'bar ms':>10}")
    for name, norm in single_norms():
        report(f"identify {name}({WIDTH})", median(lambda norm=norm: identify(norm, WIDTH), options.rounds), ONE)
    model = load_llama()
    ids = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        called = trace(model, lambda: model(ids))
    sites, _ = find_sites(model, called)
    name = f"all {len(sites)} norms of a {LAYERS}-layer Llama, width {MODEL_WIDTH}"
    report(name, median(lambda: find_sites(model, called), options.rounds), ALL)
    times = []
    for _ in range(options.rounds):
        fresh = load_llama()
        start = time.perf_counter()
        convert(fresh, ids)
        times.append(time.perf_counter() - start)
    report("convert it, verified on the spot", statistics.median(times), CONVERTED)


if __name__ == "__main__":
    main()
