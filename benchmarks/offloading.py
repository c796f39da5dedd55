"""Time and memory of `normkit inspect` with and without --offload, each in a process of its own.

    python benchmarks/offloading.py MODEL [--group FOLDER] [--max-tokens N] [--dtype NAME]

First the files are read once, after they were dropped from the system's file cache; then the model is inspected in
memory, with the files in the cache. The sum of the two times is what reading once and the plain passes take. The files
are dropped before the offloaded run, whose time over that sum is its ratio; the bound is 1.5. With --group, the
offloaded run is done once more in that memory control group. One of 2 GB, which counts anonymous memory and the file
cache of its processes:

    mkdir /sys/fs/cgroup/memory/offload
    echo 2G > /sys/fs/cgroup/memory/offload/memory.limit_in_bytes
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def status(process: int) -> dict[str, int]:
    """Memory of a process now, in MiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.startswith("Rss")}


def drop(model: Path) -> None:
    """Drop the files from the system's cache."""
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(model: Path) -> float:
    """Seconds to read the files, which are not in the cache."""
    drop(model)
    buffer, size, start = bytearray(2**24), 0, time.perf_counter()
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                size += count
    wall = time.perf_counter() - start
    print(f"{'reading once':<40}         {wall:6.0f} s  {size / 1e9:.1f} GB", flush=True)
    return wall


def measured(model: Path, options: list[str], group: Path | None, plain: float = 0.0) -> float:
    """Run once, print a line, and return the seconds; `plain` are those of reading once and the plain passes."""

    def enter() -> None:
        if group is not None:
            (group / "tasks").write_text(str(os.getpid()))

    command = [sys.executable, "-m", "normkit", "inspect", str(model), "--json", "--no-report", "-q", *options]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    peaks = {"RssAnon": 0, "RssFile": 0}
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([*command, "--fail-on", "never"], stdout=out, preexec_fn=enter)
        while process.poll() is None:
            try:
                now = status(process.pid)
            except OSError:
                break
            peaks = {name: max(most, now.get(name, 0)) for name, most in peaks.items()}
            time.sleep(0.02)
        code, wall = process.wait(), time.perf_counter() - start
        out.seek(0)
        digest = hashlib.sha256(out.read()).hexdigest()[:12]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{' '.join(options) or 'in memory':<40} exit {code}  {wall:6.0f} s  {cpu:6.0f} s of the CPU  "
        f"{(after.ru_inblock - before.ru_inblock) * 512 / 1e9:6.1f} GB read  {peaks['RssAnon']:5} MiB anonymous  "
        f"{peaks['RssFile']:5} MiB of files  report {digest}{'' if group is None else f'  in {group.name}'}"
        f"{f'  ratio {wall / plain:.2f}' if plain else ''}",
        flush=True,
    )
    return wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--group", type=Path)
    parser.add_argument("--max-tokens", default="4096")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    tokens = ["--max-tokens", given.max_tokens, "--dtype", given.dtype]
    plain = read_once(given.model) + measured(given.model, tokens, None)
    for group in (None, given.group) if given.group is not None else (None,):
        drop(given.model)
        measured(given.model, [*tokens, "--offload"], group, plain)


main()
