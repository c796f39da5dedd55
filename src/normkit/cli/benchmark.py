"""`normkit bench`: how fast norms are on this machine, beside what else computes them."""

from __future__ import annotations

import os

import click

from normkit.bench import allocation
from normkit.cli.terminal import progress, results, shows_progress
from normkit.errors import InputError
from normkit.files import json_text

_OPS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
_PASSES = ("forward", "forward-out", "backward", "forward+backward")


@click.command("bench", short_help="How fast norms are here, beside PyTorch and others.")
@click.option(
    "--device", "place", type=click.Choice(["cpu", "cuda"]), default="cpu", help="A GPU is cuda.  [default: cpu]"
)
@click.option("--op", "ops", multiple=True, type=click.Choice(_OPS), help="Repeatable.  [default: the first two]")
@click.option("--shape", "shapes", multiple=True, metavar="RxN", help="Rows x features; repeatable.  [default: seven]")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(["float32", "bfloat16"]), help="Repeatable.")
@click.option(
    "--pass",
    "directions",
    multiple=True,
    type=click.Choice(_PASSES),
    help="Repeatable; forward-out reuses y.  [default: forward, forward+backward]",
)
@click.option("--threads", type=click.IntRange(min=1), help="On the CPU, of every library.  [default: torch's choice]")
@click.option(
    "--seconds", type=click.FloatRange(0, 3600), metavar="S", help="For each number.  [default: 0.3; on a GPU 0.1]"
)
@click.option("--quick", is_flag=True, help="Two shapes, 0.05 seconds for each number.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
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
    """Time normkit beside torch, torch.compile, a plain copy, and what else computes norms here.

    On the CPU that is Hugging Face's module and onnxruntime; on a GPU Liger, quack and flash-attn, where installed.
    Every answer is first held against float64: what is wrong is timed and marked. Then all take turns, in many rounds
    (onnxruntime after the others, as its threads spin on). A turn is some calls that are not counted and a sample of at
    least 2 ms of calls; a time is the median of the samples, marked ~ where they spread by over 15 %. All have the
    same settings of the memory allocator; without these, outputs over 32 MiB are mapped anew at each call.

    On a GPU a call has two times: that of its work, between two events, with a cold L2 cache and a host that is ahead;
    and that of the host until the call returns. In a row of calls the slower counts: for few rows the host.

    Takes 5 minutes on 2 cores. Nothing else should run meanwhile; where something did, the table says so.
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
        click.echo(json_text(found.to_json()), nl=False)
        return
    console = results()
    for drawn in tables(found):
        console.print(drawn)
        console.print()
    for line in notes(found):
        console.print(line)
