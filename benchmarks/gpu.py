"""Norms on this GPU over the public grids, in one command that ends by itself; then the bars, and a table for the docs.

    python benchmarks/gpu.py [--minutes 9] [--seconds 0.05] [--results FILE] [--resume]

Peers are what is installed of: pip install liger-kernel quack-kernels flash-attn. Results are written after each case,
to benchmarks/results/gpu.json. A run that was killed goes on with --resume; one whose GPU is left unusable by a kernel
goes on by itself, in a new process. Without a GPU: one line, and exit status 2.

Cases come in the order in which the bars want them, and no new one is begun when the minutes are over. Reckoned, not
measured: three seconds a case, for what is compiled, checked and timed, and five more where torch.compile takes part,
which is where `COMPILED` says. So nine minutes hold the latency, the five widths of quack's grid in three passes and
tritonbench's (116 cases); the rest of the grids follows while there is time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import gpu_bars
import gpu_table
import torch

from normkit.bench.cases import Arguments, Case, arguments
from normkit.bench.devices import Device, find
from normkit.bench.peers import COMPILED as COMPILER
from normkit.bench.peers import NORMKIT, Peer, reason
from normkit.bench.results import Cell
from normkit.bench.running import check_memory, machine, measure_case
from normkit.bench.table import readable
from normkit.errors import InputError
from normkit.files import json_text, write_text

START = time.monotonic()
RESULTS = Path(__file__).parent / "results" / "gpu.json"

NORMS = ("layer_norm", "rms_norm")
ADDED = ("add_layer_norm", "add_rms_norm")
DTYPES = ("bfloat16", "float32")
PASSES = ("forward", "backward", "forward+backward")
BOTH = "forward+backward"
LATENCY = tuple((rows, 4096) for rows in (128, 1, 8, 32, 512, 2048))
# quack's MN_PAIRS.
QUACK = (*((32768, 1 << power) for power in range(8, 17)), (16384, 131072), (8192, 262144))
WIDTHS = tuple(shape for shape in QUACK if shape[1] in (1024, 4096, 16384, 65536, 262144))
# Those of tritonbench and of Liger's own benchmarks.
TRITONBENCH = tuple((rows, 1 << power) for rows in (2048, 4096) for power in range(10, 16))
COMPILED = {*LATENCY, *WIDTHS}
"""Shapes at which torch.compile takes part, in forward+backward of bfloat16."""
BITS = ((300, 1000), (2048, 4096), (70, 65536))
"""Shapes whose bits are compared."""


def product(
    shapes: Iterable[tuple[int, int]], dtypes: Iterable[str], directions: Iterable[str], ops: Iterable[str]
) -> Iterator[Case]:
    """Shape by shape, so that a run that is cut short has all of some shapes."""
    for shape, dtype, direction, op in itertools.product(shapes, dtypes, directions, ops):
        yield Case(op, shape, dtype, direction)


def grid() -> tuple[Case, ...]:
    """All cases, each once, first those that matter most."""
    wanted = itertools.chain(
        product(LATENCY[:1], DTYPES, [BOTH], NORMS),
        product(WIDTHS, DTYPES, PASSES, NORMS),
        product(LATENCY, DTYPES[:1], ["forward", BOTH], NORMS),
        product([LATENCY[0], (32768, 4096)], DTYPES[:1], ["forward", BOTH], ADDED),
        product(TRITONBENCH, DTYPES[:1], [BOTH], NORMS),
        product([*QUACK, *TRITONBENCH, *LATENCY], DTYPES, PASSES, NORMS),
    )
    return tuple(dict.fromkeys(wanted))


def peers(case: Case, device: Device) -> tuple[Peer, ...]:
    """All, but the compiler only where it is worth its time."""
    compiles = case.shape in COMPILED and case.dtype == "bfloat16" and case.direction == BOTH
    return tuple(peer for peer in device.peers if compiles or peer is not COMPILER)


def answers(case: Case, given: Arguments) -> tuple[torch.Tensor, ...]:
    outputs = NORMKIT.prepare(case, given)()
    return (*outputs, *torch.autograd.grad(outputs, given.leaves, given.gradients))


def bits(case: Case, device: Device) -> bool:
    """Whether all answers are the same at the next call, and those of some rows the same without the others."""
    given = arguments(case, device.name)
    rows = slice(case.shape[0] // 3, case.shape[0] // 3 + 17)
    some = replace(
        given,
        x=given.x.detach()[rows].clone().requires_grad_(),
        residual=None if given.residual is None else given.residual.detach()[rows].clone().requires_grad_(),
        gradients=tuple(gradient[rows].clone() for gradient in given.gradients),
    )
    first, again, alone = answers(case, given), answers(case, given), answers(case, some)
    is_same = all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    sheets = zip(first[: case.sheets], alone, strict=False)
    return is_same and all(torch.equal(one[rows], other) for one, other in sheets)


def line(cell: Cell) -> str:
    """What normkit did in a case."""
    own = next((found for found in cell.measurements if found.peer == NORMKIT.name), None)
    if own is None:
        return f"{cell.case}: normkit {dict(cell.left_out).get(NORMKIT.name, 'did not take part')}"
    host = "" if own.host_seconds is None else f", host {readable(own.host_seconds)}"
    wrong = f", WRONG {own.worst}" if own.is_wrong else ""
    share = cell.floor_seconds / own.seconds
    return (
        f"{cell.case}: {readable(own.seconds)}, {own.bytes_per_second / 1e9:.0f} GB/s, {share:.0%} of the copy"
        f"{host}{wrong}"
    )


def is_broken(device: Device) -> bool:
    """Whether the device does nothing any more: after some errors, until the process ends."""
    try:
        return torch.ones(2, device=device.name).sum().item() != 2
    except RuntimeError:
        return True


class Record:
    """What was found so far, on disk after every step."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.document = {"schema_version": 2, "machine": {}, "bits": {}, "cells": [], "not_measured": {}, "begun": None}
        if resume and path.exists():
            self.document = json.loads(path.read_text(encoding="utf-8"))
            if self.document["begun"] is not None:
                self.fail(self.document["begun"], "the process ended in it")

    def done(self) -> set[str]:
        found = {str(Case(**cell["case"] | {"shape": tuple(cell["case"]["shape"])})) for cell in self.document["cells"]}
        return found | self.document["not_measured"].keys() | self.document["bits"].keys()

    def begin(self, what: str) -> None:
        self.document["begun"] = what
        self.save()

    def end(self) -> None:
        self.document["begun"] = None
        self.save()

    def fail(self, what: str, why: str) -> None:
        self.document["not_measured"][what] = why
        self.end()

    def save(self) -> None:
        write_text(self.path, json_text(self.document))


def measure(device: Device, record: Record, cases: Iterable[Case], *, until: float, seconds: float) -> list[Case]:
    """Measure what is not yet recorded, until the time is over or the device broken; returns what was not reached."""
    done = record.done()
    left = [case for case in cases if str(case) not in done]
    while left and time.monotonic() < until and not is_broken(device):
        case = left.pop(0)
        record.begin(str(case))
        try:
            chosen = peers(case, device)
            check_memory(case, device, len(chosen))
            cell = measure_case(case, device, seconds, chosen)
        except Exception as error:  # a case that fails must not take the others with it
            record.fail(str(case), reason(error))
            print(f"{case}: not measured: {reason(error)}", flush=True)
        else:
            record.document["cells"].append(cell.to_json())
            record.end()
            print(line(cell), flush=True)
    return left


def compare_bits(device: Device, record: Record) -> None:
    """Record for each case whether its bits depend on the run or the batch."""
    done = record.done()
    for case in product(BITS, DTYPES, [BOTH], NORMS):
        what = f"bits of {case}"
        if what in done or is_broken(device):
            continue
        record.begin(what)
        try:
            record.document["bits"][what] = bits(case, device)
        except Exception as error:
            record.fail(what, reason(error))
        record.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="no new case after so many")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each number, on average")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="keep what the results hold, measure the rest")
    options = parser.parse_args()
    # What is measured here is what stays off until it is.
    os.environ.setdefault("NORMKIT_CUDA", "on")
    try:
        device = find("cuda")
    except InputError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    until = START + 60 * options.minutes
    record = Record(options.results, resume=options.resume)
    record.document["machine"] = asdict(machine(device))
    compare_bits(device, record)
    left = measure(device, record, grid(), until=until, seconds=options.seconds)
    if is_broken(device) and time.monotonic() < until:
        print("the GPU is unusable in this process: going on in a new one", flush=True)
        minutes = str((until - time.monotonic()) / 60)
        given = ["--resume", "--minutes", minutes, "--seconds", str(options.seconds), "--results", str(options.results)]
        os.execv(sys.executable, [sys.executable, __file__, *given])
    print(f"\n{len(record.document['cells'])} cases measured, {len(left)} not reached in {options.minutes:g} minutes")
    for case in left:
        print(f"  not reached: {case}")
    print()
    gpu_bars.show(record.document)
    print()
    print(gpu_table.table(record.document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
