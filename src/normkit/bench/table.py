"""Benchmark -> tables and their notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.table import Table
from rich.text import Text

from normkit.bench.peers import NORMKIT
from normkit.bench.results import Benchmark, Cell, Machine, Measurement

NOISY = 0.15
"""Spread of the samples above which a time is marked."""
BUSY = 0.1
"""Share of the machine that other processes use above which a case is marked."""


def tables(benchmark: Benchmark) -> Iterator[Table]:
    """One an operation and pass; in it, one line a case and peer.

    At most 80 columns; on a GPU, where host times are shown too, so many if all answers are right.
    """
    for (op, direction), cells in groupby(benchmark.cells, key=lambda cell: (cell.case.op, cell.case.direction)):
        yield _table(f"{op} {direction}", cells, on_gpu=benchmark.machine.gpu is not None)


def _table(title: str, cells: Iterable[Cell], *, on_gpu: bool) -> Table:
    drawn = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left", title_style="bold")
    drawn.add_column("", no_wrap=True, min_width=18)
    numbers = (("time", 8), *((("host", 7),) if on_gpu else ()), ("/ floor", 7), ("/ normkit", 9), ("kept / x", 8))
    for heading, width in numbers:
        drawn.add_column(heading, justify="right", no_wrap=True, min_width=width)
    drawn.add_column("answer", no_wrap=True, min_width=6)
    for cell in cells:
        case = cell.case
        own = next((found.latency for found in cell.measurements if found.peer == NORMKIT.name), None)
        busy = Text(f"others {cell.others:.0%}", style="bold yellow") if (cell.others or 0) > BUSY else ""
        drawn.add_row(Text(f"{case.shape[0]}x{case.shape[1]} {case.dtype}", style="bold"), *("" for _ in numbers), busy)
        drawn.add_row("  copy (floor)", _time(cell.floor_seconds, cell.floor_spread), *([""] * on_gpu), "1.00")
        for found in cell.measurements:
            drawn.add_row(*_line(found, cell, own))
    return drawn


def _line(found: Measurement, cell: Cell, own: float | None) -> tuple[str | Text, ...]:
    host = found.host_seconds
    return (
        f"  {found.peer}{' *' if found.is_fresh else ''}",
        _time(found.seconds, found.spread),
        *(() if host is None else (readable(host),)),
        f"{found.seconds / cell.floor_seconds:.2f}",
        "" if own is None else f"{found.latency / own:.2f}",
        "" if found.saved_bytes is None else f"{found.saved_bytes / cell.input_bytes:.2f}",
        Text(f"WRONG {found.worst} {_size(found.error)}", style="bold red") if found.is_wrong else "right",
    )


def _time(seconds: float, spread: float) -> str:
    return readable(seconds) + ("~" if spread > NOISY else " ")


def readable(seconds: float) -> str:
    """Three digits and a unit.

    Example:
        >>> readable(3.333e-6), readable(0.0468), readable(1.5)
        ('3.33 us', '46.8 ms', '1.50 s')
    """
    value, unit = next(
        ((seconds * scale, unit) for scale, unit in ((1e6, "us"), (1e3, "ms")) if seconds * scale < 999.5),
        (seconds, "s"),
    )
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _size(error: float) -> str:
    if math.isinf(error):
        return "NaN"
    return f"{error:.0%}" if error >= 0.01 else f"{error:.1e}"


def _about(machine: Machine) -> tuple[str, ...]:
    kernels = f"normkit: {machine.kernels}"
    if machine.gpu is None:
        return (
            f"{machine.date}, {machine.cpu}, threads {machine.threads}, torch {machine.torch}",
            kernels,
            "time: of one call, with what it reads in the caches if it fits; median of interleaved rounds",
        )
    versions = "".join(f", {package} {version}" for package, version in machine.versions)
    return (
        f"{machine.date}, {machine.gpu}, {machine.cpu}, torch {machine.torch}{versions}",
        kernels,
        "time: of one call on the GPU, which finds nothing in its L2 cache; median of interleaved rounds",
        "host: time until the call returns; / normkit: of host and GPU the slower, as many calls add it",
    )


def notes(benchmark: Benchmark) -> tuple[str, ...]:
    """The machine, what the columns mean, and who was left out of what."""
    found = [measurement for cell in benchmark.cells for measurement in cell.measurements]
    spreads = [cell.floor_spread for cell in benchmark.cells] + [measurement.spread for measurement in found]
    absent: dict[tuple[str, str], int] = {}
    for cell in benchmark.cells:
        for pair in cell.left_out:
            absent[pair] = absent.get(pair, 0) + 1
    lines = (
        (True, "floor: time to copy as many bytes as the pass must read and write; nothing can be much faster"),
        (any(m.saved_bytes is not None for m in found), "kept / x: bytes kept for backward, in sizes of x"),
        (any(s > NOISY for s in spreads), f"~: the samples spread by over {NOISY:.0%} (interquartile range)"),
        (
            any((cell.others or 0) > BUSY for cell in benchmark.cells),
            "others: other processes used so much of the machine meanwhile; do not trust these times",
        ),
        (any(m.is_fresh for m in found), "*: has no out=, so it allocates its output"),
        (
            any(m.is_wrong for m in found),
            "WRONG: this far from float64, ||answer - exact|| / ||exact||, more than rounding explains",
        ),
    )
    return (
        *_about(benchmark.machine),
        *(text for is_needed, text in lines if is_needed),
        *(
            f"{peer} left out of {count} of {len(benchmark.cells)} cases: {why}"
            for (peer, why), count in absent.items()
        ),
    )
