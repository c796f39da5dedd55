"""What a watch costs: training steps bare, watched, and under the peers' monitors, interleaved in one process.

    python benchmarks/watch_overhead.py [--rounds 30] [--wide-rounds 6] [--threads 1]

Each column trains its own copy of the model; a round takes one step of each, so that a slow minute of the machine falls
on all of them. The cost at an interval is that of its steps, weighed: (measured + (every - 1) x others) / every. The
floor of a measured step is reading each norm's input and output and each block's output once more, at the copy
bandwidth of this machine. TorchLens captures every tensor of one forward pass, so its column times that alone against
the step; it takes part where it is installed (pip install torchlens).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
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


@dataclass
class Column:
    """One monitor: how it begins, what it does after backward, how it ends."""

    name: str
    begin: Callable[[nn.Module, torch.optim.Optimizer], object]
    step: Callable[[object, Tensor], None] = lambda _monitor, _loss: None
    end: Callable[[object], None] = lambda _monitor: None
    seconds: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)


def watched(every: int) -> Column:
    return Column(
        f"watch, every {every}" if every > 1 else "watch, every step",
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
        Column("bare", lambda _model, _optimizer: None),
        watched(INTERVAL),
        watched(1),
        Column("DebugUnderflowOverflow", underflow_overflow),
        Column("hooks with .item()", item_hooks, lambda seen, _loss: seen.clear()),
    ]


def wide() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=256, n_embd=768, n_layer=12, n_head=12, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, after: Callable[[Tensor], None]) -> None:
    loss = F.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    after(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def interleaved(make: Callable[[], nn.Module], shape: tuple[int, int], rounds: int) -> list[Column]:
    """Median seconds a step; of the watch at an interval its measured steps apart."""
    generator = torch.Generator().manual_seed(0)
    made, runs = columns(), []
    for column in made:
        torch.manual_seed(0)
        model = make().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        runs.append((model, optimizer, column.begin(model, optimizer)))
    for number in range(rounds + 2):
        ids = torch.randint(256, (shape[0], shape[1] + 1), generator=generator)
        for column, (model, optimizer, monitor) in zip(made, runs, strict=True):
            start = time.perf_counter()
            one_step(model, optimizer, ids, lambda loss, column=column, monitor=monitor: column.step(monitor, loss))
            taken = time.perf_counter() - start
            # The first two rounds warm up; the watch finds the norms in the first.
            if number > 1:
                column.seconds.append(taken)
    measure_on_steps(made, runs, shape, generator, rounds)
    for column, (_, _, monitor) in zip(made, runs, strict=True):
        column.end(monitor)
    return made


def measure_on_steps(made, runs, shape, generator, rounds: int) -> None:
    """Measured steps of the watch at an interval, with the report's reading, beside bare ones."""
    place = next(index for index, column in enumerate(made) if column.name == f"watch, every {INTERVAL}")
    column, (model, optimizer, monitor) = made[place], runs[place]
    for _ in range(rounds):
        ids = torch.randint(256, (shape[0], shape[1] + 1), generator=generator)
        monitor._gauging.switch.on = True
        for _ in range(2):
            start = time.perf_counter()
            one_step(model, optimizer, ids, lambda loss: monitor.step(loss))
            column.measured.append(time.perf_counter() - start)


def captured(make: Callable[[], nn.Module], shape: tuple[int, int]) -> float:
    import torchlens

    model = make().eval()
    ids = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    torchlens.trace(model, ids)
    return time.perf_counter() - start


def memory(steps: int) -> list[int]:
    """Bytes of all tensors alive after some steps of a watched run, and after as many more, and again."""
    import gc

    model = build("layernorm").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    counts = []
    with nk.watch(model, optimizer, every=1, say=lambda _line: None) as monitor:
        for step in range(3 * steps):
            one_step(model, optimizer, torch.randint(256, (2, 65)), lambda loss: monitor.step(loss))
            if (step + 1) % steps == 0:
                gc.collect()
                alive = [each for each in gc.get_objects() if isinstance(each, Tensor)]
                counts.append(sum(each.numel() * each.element_size() for each in alive))
    return counts


def show(title: str, made: list[Column], capture: float | None) -> None:
    bare = statistics.median(made[0].seconds)
    print(f"\n{title}\n{'':28}{'ms a step':>11}{'cost':>9}{'bar':>8}")
    for column in made:
        seconds, bar = statistics.median(column.seconds), ""
        if column.measured:
            # A measured step, and the next one, which reads the report.
            pair = [sum(column.measured[at : at + 2]) for at in range(0, len(column.measured), 2)]
            off = statistics.median(column.seconds)
            seconds = (statistics.median(pair) + (INTERVAL - 2) * off) / INTERVAL
            bar = f"{100 * BARS['default interval']:.0f} %"
        elif column.name == "watch, every step":
            bar = f"{100 * BARS['every step']:.0f} %"
        print(f"{column.name:28}{seconds * 1e3:11.1f}{100 * (seconds / bare - 1):+8.1f}%{bar:>8}")
    if capture is not None:
        print(f"{'TorchLens, one forward':28}{capture * 1e3:11.1f}{100 * capture / bare:+8.1f}%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--wide-rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    here = machine()
    print(f"{here.date}, {here.cpu}, {here.threads} torch threads, torch {here.torch}")
    for title, make, shape, rounds in (
        ("demo model (6 layers, width 64), 16 x 256 tokens", lambda: build("layernorm"), (16, 256), options.rounds),
        ("GPT-2 of 12 layers, width 768, 4 x 256 tokens", wide, (4, 256), options.wide_rounds),
    ):
        capture = captured(make, shape) if find_spec("torchlens") else None
        show(title, interleaved(make, shape, rounds), capture)
    first, second, third = memory(40)
    print(f"\nbytes of tensors alive after 40, 80, 120 watched steps: {first:,} {second:,} {third:,}")


if __name__ == "__main__":
    main()
