"""What a Llama gains when its norms are swapped for normkit's by hand: prefill, decoding and a training step.

    python benchmarks/llama.py [--quick] [--json]

One model of random weights, with TinyLlama's widths and 8 of its 22 layers; training is done on a smaller one. Its own
norms, normkit's with the same weights, and none at all take turns in it, so that all see the same matrices. Without
norms the answers are nonsense, but the time that is left is what no norm can save. Outputs are compared first.
Medians; the margin is the interquartile range over the median. bfloat16 is left out on a CPU that has no instructions
for its products: they take nearly all of the time there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time

import torch

import normkit as nk
from normkit.bench import allocation
from normkit.bench.running import machine
from normkit.identification.products import software_dtypes

FULL = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
SMALL = FULL | {"hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 2816, "num_attention_heads": 16}
TINY = SMALL | {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "vocab_size": 256}
PROMPT, STEPS, ROUNDS = 512, 64, 7
BATCH, LENGTH = 4, 256


def build(config: dict[str, int], dtype: torch.dtype):
    """The model, and its norms by path: its own, normkit's, none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cpu"):
        model = LlamaForCausalLM(LlamaConfig(**config)).to(dtype).eval()
    stock = {path: module for path, module in model.named_modules() if type(module).__name__ == "LlamaRMSNorm"}
    ours = {path: with_weight_of(module) for path, module in stock.items()}
    return model, {"stock": stock, "normkit": ours, "no norms": {path: torch.nn.Identity() for path in stock}}


def with_weight_of(module) -> nk.Norm:
    norm = nk.Norm(nk.specs.LLAMA.replace(eps=module.variance_epsilon), module.weight.numel(), device="meta")
    norm.weight = module.weight
    return norm


def use(model, norms) -> None:
    for path, module in norms.items():
        model.set_submodule(path, module)


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def rounds(model, variants, count: int, run) -> dict[str, list[float]]:
    """Seconds of `run` with each kind of norms in turn; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for position, (name, norms) in itertools.product(range(count + 1), variants.items()):
        use(model, norms)
        seconds = timed(run)
        if position:
            taken[name].append(seconds)
    return taken


def decode(model, variants, prompt: torch.Tensor, steps: int) -> dict[str, list[float]]:
    """Seconds a token; each token is decoded once with each kind of norms, from the same cache."""
    use(model, variants["stock"])
    cache = model(prompt, logits_to_keep=1).past_key_values
    token = prompt[:, -1:]
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for step in range(steps + 1):
        for turn, (name, norms) in enumerate(variants.items()):
            if turn:
                cache.crop(-1)
            use(model, norms)
            seconds = timed(lambda: model(token, past_key_values=cache))
            if step:
                taken[name].append(seconds)
    return taken


def difference(model, variants, tokens: torch.Tensor) -> str:
    """How far the logits with normkit's norms are from the stock model's."""
    logits = []
    for name in ("stock", "normkit"):
        use(model, variants[name])
        logits.append(model(tokens).logits.float())
    largest = float((logits[1] - logits[0]).abs().max())
    same = float((logits[1] == logits[0]).float().mean())
    return f"differ by at most {largest:.1e} (the largest is {float(logits[0].max()):.1f}), {same:.2%} not at all"


def measure(dtype: torch.dtype, quick: bool):
    """Rows of the table: what, its dtype, seconds by kind of norms, and how far the logits are apart."""
    model, variants = build(TINY if quick else FULL, dtype)
    prompt = torch.randint(TINY["vocab_size"], (1, PROMPT))
    count, steps = (2, 4) if quick else (ROUNDS, STEPS)
    with torch.inference_mode():
        apart = difference(model, variants, prompt)
        prefill = rounds(model, variants, count, lambda: model(prompt, logits_to_keep=1))
        yield f"prefill, {PROMPT} tokens", dtype, prefill, apart
        yield f"decode, {steps} steps, a token", dtype, decode(model, variants, prompt, steps), apart

    model, variants = build(TINY if quick else SMALL, dtype)
    tokens = torch.randint(TINY["vocab_size"], (BATCH, LENGTH))

    def train():
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    with torch.no_grad():
        apart = difference(model, variants, tokens)
    yield f"training step, {BATCH} x {LENGTH} tokens", dtype, rounds(model, variants, count, train), apart


def spread(times: list[float]) -> float:
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return (upper - lower) / median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rounds: does it run?")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    options = parser.parse_args()
    allocation.settle()
    where, rows = machine(), []
    if not options.json:
        print(f"{where.date}, {where.cpu}, threads {where.threads}, torch {where.torch}; normkit: {where.kernels}\n")
        print(f"{'':42}{'stock':>9}{'normkit':>16}{'no norms':>16}{'faster by':>11}{'norms take':>18}")
    for dtype in sorted({torch.float32, torch.bfloat16} - software_dtypes(), key=str, reverse=True):
        for what, of, taken, apart in measure(dtype, options.quick):
            medians = {name: statistics.median(times) for name, times in taken.items()}
            margins = {name: spread(times) for name, times in taken.items()}
            name = str(of).removeprefix("torch.")
            rows.append({"what": what, "dtype": name, "seconds": medians, "spread": margins, "logits": apart})
            if options.json:
                continue
            stock, ours, none = (medians[kind] for kind in ("stock", "normkit", "no norms"))
            cells = "".join(f"{medians[kind] * 1e3:9.2f} ±{margins[kind]:4.0%} " for kind in medians)
            shares = f"{1 - none / stock:.1%} -> {1 - none / ours:.1%}"
            print(f"{what + ', ' + name:42}{cells}{stock / ours - 1:8.1%}{shares:>18}")
            print(f"    logits: {apart}", flush=True)
    if options.json:
        print(json.dumps({"machine": dataclasses.asdict(where), "rows": rows}, indent=2))
    else:
        print("\nms; 'norms take': their share of the whole time, stock -> normkit")


if __name__ == "__main__":
    main()
