"""The Triton kernels compiled ahead of time, without a GPU: registers, spills, shared memory, widths of loads.

    python benchmarks/compiled_kernels.py [--arch 80 90 100] [--jobs 2] [--json] [--write]

The launches are those that the operators make for tensors on the meta device, each specialized as Triton would for
tensors that begin at multiples of 16 bytes. Registers, stack and shared memory are read off the machine code; widths
off the PTX, where each load and store is told by the source line it comes from. Nothing runs: no time, no bandwidth.
--write records it in results/compiled_kernels.json and in the table of docs/explanation/gpu-kernels.md.
"""

from __future__ import annotations

import argparse
import datetime
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compiled_table import differences, page_part, with_part
from torch import Tensor

from normkit import specs
from normkit.files import json_text, write_text
from normkit.ops.plans import plan

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "compiled_kernels.json"
PAGE = ROOT / "docs" / "explanation" / "gpu-kernels.md"

# Of one multiprocessor: registers, threads, programs, and bytes of shared memory, of which each program costs 1 KB more
# than it asks for (CUDA C++ programming guide, table of compute capabilities).
REGISTERS, THREADS, PROGRAMS, EACH = 65536, 2048, 32, 1024
SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
# Arguments of one number a row, not one an element; `at` walks along the statistics.
OF_A_ROW = ("statistics", "row_sums", "at")


class Case(NamedTuple):
    """A norm of a shape.

    Attributes:
        norm: layer_norm (gain and bias), rms_norm (gain), add_rms_norm (float32 residual), or one without weight.
        dtype: Of x.
        weight: dtype of the parameters.
        shape: Rows and features.
    """

    norm: str
    dtype: str
    weight: str
    shape: tuple[int, int]

    def __str__(self) -> str:
        kept = self.dtype if self.weight in (self.dtype, "") else f"{self.dtype}, {self.weight} weight"
        return f"{self.norm} {'x'.join(map(str, self.shape))} {kept}"


class Call(NamedTuple):
    """One launch of a pass, and the tensors that it takes."""

    direction: str
    launch: Any
    tensors: tuple[Tensor | None, ...]


class Figures(NamedTuple):
    """What a kernel takes, compiled for one architecture.

    Attributes:
        registers: Of a thread.
        stack: Bytes a thread keeps in local memory: what did not fit into registers.
        spills: Instructions that move them.
        shared: Bytes of a program.
        widths: Bits of the loads and stores of each argument that has a number for each of a row's, with how many there
            are of them.
        copies: Copies to shared memory that do not wait, of 16 bytes.
        warps: Of a program.
        resident: Warps that a multiprocessor holds at once.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    widths: dict[str, dict[str, int]]
    copies: int
    warps: int
    resident: int


# --- cases ---

WIDTHS = ((32768, 1 << power) for power in range(6, 17))
SHAPES = (*WIDTHS, (16384, 131072), (8192, 262144), (8192, 5120), (8192, 12288), (8192, 1000), (128, 4096))
SMALL = tuple((2048, 1 << power) for power in range(10, 16))
SOME = ((32768, 256), (32768, 1024), (32768, 4096), (32768, 8192), (32768, 16384), (32768, 65536), (8192, 262144))
KINDS = (
    ("layer_norm", "float32", "float32"),
    ("rms_norm", "float32", "float32"),
    ("rms_norm", "bfloat16", "float32"),
    ("add_rms_norm", "bfloat16", "bfloat16"),
    ("rms_norm without weight", "bfloat16", ""),
)


def cases() -> tuple[Case, ...]:
    """All shapes in bfloat16, some of them in every other kind."""
    main = [
        Case(norm, "bfloat16", "bfloat16", shape) for norm in ("layer_norm", "rms_norm") for shape in SHAPES + SMALL
    ]
    return (*main, *(Case(*kind, shape) for kind in KINDS for shape in SOME))


def calls(case: Case) -> list[Call]:
    """The launches of forward, for training, and of backward, as the operators make them."""
    from normkit.kernels.triton import operators

    found: list[Call] = []
    direction = "forward"

    def keep(launch: Any, tensors: tuple[Tensor | None, ...]) -> Any:
        found.append(Call(direction, launch, tensors))
        return lambda _: None

    def empty(dtype: str, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    spec = specs.TORCH_LAYER_NORM if case.norm == "layer_norm" else specs.TORCH_RMS_NORM
    of = plan(spec)
    x = empty(case.dtype, *case.shape)
    weight = empty(case.weight, case.shape[1]) if case.weight else None
    bias = weight if spec.has_bias else None
    own = (of.conventions, of.eps, of.offset)
    compiling, operators.compile_launch = operators.compile_launch, keep
    try:
        if case.norm == "add_rms_norm":
            addend: Tensor | None = empty("float32", *case.shape)
            assert addend is not None
            y, x, statistics = operators.add_normalize_forward(x, addend, weight, bias, *own)
        else:
            addend = None
            y, statistics = operators.normalize_forward(x, weight, bias, *own)
        direction = "backward"
        needs = (True, weight is not None, bias is not None)
        operators.normalize_backward(y, x, statistics, weight, bias, *own, addend, *needs)
    finally:
        operators.compile_launch = compiling
        operators._plans.clear()
    return found


# --- compiling ---


def specialized(call: Call, arch: int) -> tuple[Any, Any, dict[str, Any]]:
    """What Triton compiles for a call: its source, target and options, from Triton's own binding of arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, target = call.launch.kernel, GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    given = {**call.launch.constants, "num_warps": call.launch.warps}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, found, options = bind(*call.tensors, *call.launch.numbers, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, found, options)
    return ASTSource(kernel, signature, constants, attributes), target, options.__dict__


def identity(call: Call) -> str:
    """The same for calls that one compiled kernel serves."""
    source, _, options = specialized(call, 90)
    return f"{source.hash()} {options['num_warps']}"


def compiled(call: Call, arch: int) -> Figures:
    """Compile a call's kernel, and read off what it takes."""
    import triton

    source, target, options = specialized(call, arch)
    kernel = triton.compile(source, target=target, options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
        code = _output(tools / "nvdisasm", "-c", file.name) if stack else ""
    widths, copies = accesses(kernel.asm["ptx"])
    shared, warps = kernel.metadata.shared, call.launch.warps
    spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
    resident = warps * resident_programs(registers, shared, warps, arch)
    return Figures(registers, stack, spills, shared, widths, copies, warps, resident)


def _output(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resident_programs(registers: int, shared: int, warps: int, arch: int) -> int:
    """How many programs a multiprocessor holds: registers are dealt to a warp by 256."""
    of_warp = -(-registers * 32 // 256) * 256
    return min(REGISTERS // (of_warp * warps), THREADS // (32 * warps), PROGRAMS, SHARED[arch] // (shared + EACH))


def accesses(ptx: str) -> tuple[dict[str, dict[str, int]], int]:
    """Of each argument how many loads and stores of how many bits there are, and how many copies of 16 bytes."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx))
    counted: dict[str, Counter[str]] = {}
    copies, name = 0, "?"
    for line in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            text = linecache.getline(files[place[1]], int(place[2]))
            argument = re.search(r"tl\.(?:load|store)\((\w+)", text)
            name = argument[1] if argument else "?"
        elif copy := re.search(r"cp\.async\.c[ag]\.shared\.global .*\], (0x\w+|\d+)", line):
            bits = 8 * int(copy[1], 0)
            copies += bits == 128
            counted.setdefault(name, Counter())[str(bits)] += 1
        elif access := re.search(r"\b(?:ld|st)\.global[\w:.]*?(?:\.v(\d))?\.[bfu](\d+)\b", line):
            counted.setdefault(name, Counter())[str(int(access[1] or 1) * int(access[2]))] += 1
    found = {name: counts for name, counts in sorted(counted.items()) if name not in OF_A_ROW}
    return {name: dict(sorted(counts.items(), key=lambda item: int(item[0]))) for name, counts in found.items()}, copies


def bytes_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.itemsize


def shares(found: list[Call]) -> dict[str, list[float]]:
    """For each pass the bytes that must move over those that the kernels move: predicted, of a copy's bandwidth.

    Twice: with the second reading of rows that are taken in pieces from memory, and from the cache. Between two kernels
    of one pass nothing is expected to stay in the cache.
    """
    calls_of = {name: [call for call in found if call.direction == name] for name in ("forward", "backward")}
    (first,) = calls_of["forward"]
    x, residual, weight, bias, y, new_residual, statistics = first.tensors
    needed = sum(map(bytes_of, (x, residual, weight, bias, y, new_residual)))
    again = 0
    if "BLOCK_ROWS" not in first.launch.constants:
        again = bytes_of(x) if new_residual is None else 2 * bytes_of(new_residual)
    moved = needed + bytes_of(statistics)
    result = {"forward": [needed / (moved + again), needed / moved]}
    needed = moved = 0
    for call in calls_of["backward"]:
        of = dict(zip(call.launch.kernel.arg_names, call.tensors, strict=False))
        moved += sum(map(bytes_of, call.tensors))
        new = ("dy", "x", "weight", "addend", "dx", "dweight", "dbias")
        if call.launch.kernel.__name__ != "sum_gradient_rows":
            needed += sum(bytes_of(of.get(name)) for name in new)
    result["backward"] = [needed / moved] * 2
    return result


# --- the whole list ---


def measured(case: Case, place: int, architectures: tuple[int, ...]) -> dict[str, Any]:
    """The figures of one of a case's kernels for each architecture."""
    call = calls(case)[place]
    return {str(arch): compiled(call, arch)._asdict() for arch in architectures}


def record(architectures: tuple[int, ...], jobs: int, listed: Iterable[Case]) -> dict[str, Any]:
    """All cases; each kernel is compiled once, however many cases it serves."""
    import triton

    kernels: dict[str, tuple[Case, int]] = {}
    entries = []
    for case in listed:
        found = calls(case)
        for place, call in enumerate(found):
            key = identity(call)
            kernels.setdefault(key, (case, place))
            constants = call.launch.constants
            entries.append(
                {
                    "case": str(case),
                    "direction": call.direction,
                    "kernel": call.launch.kernel.__name__,
                    "programs": call.launch.programs,
                    "warps": call.launch.warps,
                    **{name: constants.get(name) for name in ("BLOCK_ROWS", "BLOCK_N", "STAGES")},
                    "predicted_share_of_copy": shares(found)[call.direction],
                    "figures": key,
                }
            )
    with ProcessPoolExecutor(jobs) as pool:
        figures = list(pool.map(measured, *zip(*kernels.values(), strict=True), repeat(architectures)))
    of = dict(zip(kernels, figures, strict=True))
    for entry in entries:
        entry["figures"] = of[entry["figures"]]
    return {
        "schema_version": 1,
        "date": datetime.date.today().isoformat(),
        "triton": triton.__version__,
        "torch": str(torch.__version__),
        "measured": "registers, memory and widths; no speed",
        "kernels_compiled": len(kernels),
        "entries": entries,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=sorted(SHARED))
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--json", action="store_true", help="print all that was found, nothing else")
    parser.add_argument("--write", action="store_true", help="record it, and write the page's table")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("compiled_kernels.py: TRITON_INTERPRET must be unset; given 1, nothing is compiled", file=sys.stderr)
        return 2
    if options.write and 90 not in options.arch:
        print("compiled_kernels.py: --write takes --arch with 90, which the page shows", file=sys.stderr)
        return 2
    found = record(tuple(options.arch), options.jobs, cases())
    if options.write:
        write_text(RESULTS, json_text(found))
        write_text(PAGE, with_part(PAGE.read_text(encoding="utf-8"), page_part(found)))
    if options.json:
        print(json_text(found), end="")
    elif 90 in options.arch:
        print(page_part(found))
    else:
        print("\n".join(differences(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
