"""Time and memory of `normkit inspect` with and without --offload, each in a process of its own.

    python benchmarks/offloading.py MODEL [--group FOLDER] [--max-tokens N]

The files of the model are dropped from the system's file cache before each run. With --group, the offloaded run is done
once more in that memory control group. One of 2 GB, which counts anonymous memory and the file cache of its processes:

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


def measured(model: Path, options: list[str], group: Path | None) -> None:
    """Run once, and print a line."""
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

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
        f"{peaks['RssFile']:5} MiB of files  report {digest}{'' if group is None else f'  in {group.name}'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--group", type=Path)
    parser.add_argument("--max-tokens", default="4096")
    given = parser.parse_args()
    tokens = ["--max-tokens", given.max_tokens]
    measured(given.model, tokens, None)
    measured(given.model, [*tokens, "--offload"], None)
    if given.group is not None:
        measured(given.model, [*tokens, "--offload"], given.group)


main()
