"""`normkit bench`: how fast norms are on this machine, beside other implementations."""

from __future__ import annotations

import os

import click

from normkit.bench import allocation
from normkit.cli.options import json_option, quiet_option
from normkit.cli.terminal import print_json, progress, results, shows_progress
from normkit.errors import InputError

_OPS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
_PASSES = ("forward", "forward-out", "backward", "forward+backward")


@click.command("bench", short_help="Time norms on this machine, beside PyTorch and others.")
@click.option(
    "--device",
    "place",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Run on the CPU or on a GPU.",
)
@click.option("--op", "ops", multiple=True, type=click.Choice(_OPS), help="Repeatable.  [default: the first two]")
@click.option("--shape", "shapes", multiple=True, metavar="RxN", help="Rows x features; repeatable.  [default: seven]")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="Repeatable.  [default: both]",
)
@click.option(
    "--pass",
    "directions",
    multiple=True,
    type=click.Choice(_PASSES),
    help="Repeatable; forward-out reuses y.  [default: forward, forward+backward]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of every library, on the CPU.  [default: torch's choice]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    metavar="S",
    help="Seconds for each number.  [default: 0.3; on a GPU 0.1]",
)
@click.option("--quick", is_flag=True, help="Only two shapes, 0.05 seconds for each number.")
@json_option
@quiet_option
def run_benchmark(
    place: str,
    ops: tuple[str, ...],
    shapes: tuple[str, ...],
    dtypes: tuple[str, ...],
    directions: tuple[str, ...],
    threads: int | None,
    seconds: float | None,
    quick: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Time normkit beside torch, torch.compile, a plain copy, and other libraries that are installed.

    The others are Hugging Face's module and onnxruntime on the CPU, and Liger, quack and flash-attn on a GPU. Every
    result is first compared with float64; a wrong one is timed and marked. Then all take turns, in many rounds
    (onnxruntime after the others, because its threads keep spinning). A turn is some calls that are not counted and a
    sample of at least 2 ms of calls. A time is the median of the samples, marked ~ where they differ by over 15 %. All
    have the same settings of the memory allocator; without them, outputs over 32 MiB are mapped anew at each call.

    On a GPU a call has two times: its work between two events, with a cold L2 cache and a host that is ahead, and the
    time of the host until the call returns. In a row of calls the slower one counts: for few rows the host.

    Takes 5 minutes on 2 cores. Run nothing else meanwhile; the table says where something else ran.
    """
    from normkit.bench import cases

    chosen = tuple(cases.parse_shape(shape) for shape in shapes)
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise InputError(f"--threads {threads}: this machine has {cores} cores, and more threads only wait")
    if threads is not None and place == "cuda":
        raise InputError("--threads is of the CPU: a GPU has its own; leave it out with --device cuda")
    if place == "cpu":
        allocation.settle()

    import torch

    from normkit.bench import devices
    from normkit.bench.running import measure
    from normkit.bench.table import notes, tables

    device = devices.find(place)
    if threads is not None:
        torch.set_num_threads(threads)
    on_gpu = place == "cuda"
    usual, few = (cases.GPU_SHAPES, cases.GPU_QUICK_SHAPES) if on_gpu else (cases.SHAPES, cases.QUICK_SHAPES)
    grid = cases.grid(
        chosen or (few if quick else usual),
        dtypes or tuple(cases.DTYPES),
        ops or cases.OPS[:2],
        directions or ("forward", "forward+backward"),
    )
    if seconds is None:
        seconds = 0.05 if quick else 0.1 if on_gpu else 0.3
    with progress(shown=shows_progress(quiet=quiet)) as told:
        found = measure(grid, device=device, seconds=seconds, progress=told)
    if as_json:
        print_json(found.to_json())
        return
    console = results()
    for drawn in tables(found):
        console.print(drawn)
        console.print()
    for line in notes(found):
        console.print(line)
