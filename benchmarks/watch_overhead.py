"""What a watch costs: training steps bare, watched, and under the peers' monitors, interleaved in one process.

    python benchmarks/watch_overhead.py [--rounds 60] [--wide-rounds 10] [--threads 1 2]

Each column trains its own copy of the model. A round takes one step of each, in an order that turns, so that a slow
minute of the machine falls on all of them; the numbers are medians. A step under "every step" measures everything and
reads the report of the step before, one "between reports" does what is done at all others: the cost at an interval is
that of one of the first and all but one of the second. "bare, again" is what two equal columns differ by.

The floor of a measured step is reading each norm's input and output and each block's output once, at the bandwidth of a
sum. TorchLens captures every tensor of one forward pass, so its column is that alone against the step, in a process of
its own, for it wraps all of torch; it takes part where it is installed (pip install torchlens).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from normkit.bench.running import machine
from normkit.demo.architecture import build

INTERVAL = 25
BARS = {"default interval": 0.01, "every step": 0.20}
NEVER = 10**9
WARM_UP = 3


@dataclass
class Column:
    """One monitor: how it begins, what it does after backward, how it ends."""

    name: str
    begin: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda _model, _optimizer: None
    step: Callable[[object, Tensor], None] = lambda _monitor, _loss: None
    end: Callable[[object], None] = lambda _monitor: None
    seconds: list[float] = field(default_factory=list)


def watched(name: str, every: int) -> Column:
    return Column(
        name,
        lambda model, optimizer: nk.watch(model, optimizer, every=every, say=lambda _line: None).start(),
        lambda monitor, loss: monitor.step(loss),
        lambda monitor: monitor.close(),
    )


def underflow_overflow(model: nn.Module, _optimizer: torch.optim.Optimizer) -> object:
    from transformers.debug_utils import DebugUnderflowOverflow

    return DebugUnderflowOverflow(model)


def item_hooks(model: nn.Module, _optimizer: torch.optim.Optimizer) -> list[float]:
    """The usual hand-written monitor: three numbers of each module's output, read at once."""
    seen: list[float] = []

    def hook(_module: nn.Module, _args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            seen.extend((output.abs().max().item(), output.std().item(), output.mean().item()))

    for module in model.modules():
        if not any(module.children()):
            module.register_forward_hook(hook)
    return seen


def columns() -> list[Column]:
    return [
        Column("bare"),
        Column("bare, again"),
        watched("watch, between reports", NEVER),
        watched("watch, every step", 1),
        Column("DebugUnderflowOverflow", underflow_overflow),
        Column("hooks with .item()", item_hooks, lambda seen, _loss: seen.clear()),
    ]


def demo() -> nn.Module:
    torch.manual_seed(0)
    return build("layernorm")


def wide() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=256, n_embd=768, n_layer=12, n_head=12, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@dataclass(frozen=True)
class Case:
    """A model, and the batch size and length that it trains on."""

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, int]


CASES: Mapping[str, Case] = {
    "demo": Case("demo model (6 layers, width 64), 16 x 256 tokens", demo, (16, 256)),
    "wide": Case("GPT-2 of 12 layers, width 768, 4 x 256 tokens", wide, (4, 256)),
}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, after: Callable[[Tensor], None]) -> None:
    loss = F.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    after(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def interleaved(case: Case, rounds: int) -> list[Column]:
    """Seconds of each step of each column."""
    generator = torch.Generator().manual_seed(0)
    made, runs = columns(), {}
    for column in made:
        model = case.make().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        runs[column.name] = (model, optimizer, column.begin(model, optimizer))
    batch, length = case.shape
    for number in range(rounds + WARM_UP):
        ids = torch.randint(256, (batch, length + 1), generator=generator)
        turn = number % len(made)
        for column in made[turn:] + made[:turn]:
            model, optimizer, monitor = runs[column.name]
            start = time.perf_counter()
            one_step(model, optimizer, ids, lambda loss, column=column, monitor=monitor: column.step(monitor, loss))
            taken = time.perf_counter() - start
            # In the first step the watch finds the norms, in the second it reads what was measured in that.
            if number >= WARM_UP:
                column.seconds.append(taken)
    for column in made:
        column.end(runs[column.name][2])
    return made


def floor(case: Case) -> float:
    """Seconds to read once what a measured step looks at."""
    model, shapes = case.make(), []

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        # A norm's input and output; a block's output, which is the first of a tuple in some versions.
        if isinstance(module, nn.LayerNorm) or "LayerNorm" in type(module).__name__:
            shapes.extend((args[0].shape, args[0].shape))
        elif "Block" in type(module).__name__:
            shapes.append((output if isinstance(output, Tensor) else output[0]).shape)

    for module in model.modules():
        module.register_forward_hook(hook)
    with torch.no_grad():
        model(input_ids=torch.zeros(case.shape, dtype=torch.long))
    # More than a cache holds, read in turn.
    tensors = [torch.randn(shapes[0]) for _ in range(2**25 // shapes[0].numel())]
    times = []
    for x in tensors * 3:
        start = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - start)
    return len(shapes) * statistics.median(times)


def capture(name: str) -> None:
    """Print the seconds of one forward pass under TorchLens."""
    import torchlens

    case = CASES[name]
    model = case.make().eval()
    ids = torch.randint(256, case.shape, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    torchlens.trace(model, ids)
    print(time.perf_counter() - start)


def captured(name: str, threads: int) -> float | None:
    """The same, of a process of its own; None where TorchLens is missing."""
    if find_spec("torchlens") is None:
        return None
    command = [sys.executable, __file__, "--torchlens", name, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def memory(steps: int) -> list[int]:
    """Bytes of all tensors alive after some steps of a watched run, and after as many more, and again."""
    model = build("layernorm").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    counts = []
    with nk.watch(model, optimizer, every=1, say=lambda _line: None) as monitor:
        for step in range(3 * steps):
            one_step(model, optimizer, torch.randint(256, (2, 65)), lambda loss: monitor.step(loss))
            if (step + 1) % steps == 0:
                gc.collect()
                # In no list of ours: it would hold what the training has let go, and be counted the next time.
                alive = (each for each in gc.get_objects() if isinstance(each, Tensor))
                counts.append(sum(each.numel() * each.element_size() for each in alive))
    return counts


def line(name: str, seconds: float, bare: float, bar: float | None = None) -> None:
    told = "" if bar is None else f"{100 * bar:.0f} %"
    print(f"{name:28}{seconds * 1e3:11.1f}{100 * (seconds / bare - 1):+9.2f}%{told:>8}", flush=True)


def show(name: str, rounds: int, threads: int) -> None:
    case = CASES[name]
    made = interleaved(case, rounds)
    seconds = {column.name: statistics.median(column.seconds) for column in made}
    bare = statistics.median(made[0].seconds + made[1].seconds)
    print(f"\n{case.title}, {threads} threads, {rounds} rounds\n{'':28}{'ms a step':>11}{'cost':>10}{'bar':>8}")
    between, every = seconds["watch, between reports"], seconds["watch, every step"]
    for column, taken in seconds.items():
        line(column, taken, bare, BARS["every step"] if column == "watch, every step" else None)
    at_interval = (every + (INTERVAL - 1) * between) / INTERVAL
    line(f"watch, every {INTERVAL}", at_interval, bare, BARS["default interval"])
    line("floor of a measured step", bare + floor(case), bare)
    if (taken := captured(name, threads)) is not None:
        print(f"{'TorchLens, one forward':28}{taken * 1e3:11.1f}   {taken / bare:.1f} x a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--wide-rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--torchlens", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torchlens:
        torch.set_num_threads(options.threads[0])
        capture(options.torchlens)
        return
    here = machine()
    print(f"{here.date}, {here.cpu}, torch {here.torch}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, rounds in (("demo", options.rounds), ("wide", options.wide_rounds)):
            if rounds:
                show(name, rounds, threads)
    first, second, third = memory(40)
    print(f"\nbytes of tensors alive after 40, 80, 120 watched steps: {first:,} {second:,} {third:,}")


if __name__ == "__main__":
    main()
