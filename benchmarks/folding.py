"""Throughput and memory of `normkit fold` on synthetic sharded checkpoints, beside a copy of the same files.

    python benchmarks/folding.py [--size 20] [--shard 5] [--rounds 3] [--threads 2] [--case NAME ...] [--folder DIR]

Each case writes a checkpoint of so many GB of bfloat16 (the shapes of a family, as many layers as fit), then `cp -r`
and `sync` take turns with a fold in a process of its own, each with no byte of the source in memory. It needs twice the
size on the disk, and cleans up.

GB/s counts bytes of the source; medians. A fold is told twice: the weights, until the last file is on the disk, with
the hashes of all files of both; and the whole call, with the check that transformers would load the result, which takes
the same few seconds at any size. Shares are of the copy. On a busy machine the seconds of processor time say more; a
fold has as many threads to spend them. `peak` is the most memory that the process ever had (VmHWM),
Python, torch and transformers included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from normkit.checkpoint.reader import TensorInfo, header_bytes

LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
GPT_NEOX = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "vocab_size": 50432}
GPT2 = {"n_embd": 4096, "n_head": 32, "n_positions": 2048, "vocab_size": 50257}

# Name -> class of transformers, the key of its depth, its sizes, and what is folded.
CASES = {
    "llama gain": ("LlamaForCausalLM", "num_hidden_layers", LLAMA, {"operations": ["gain"]}),
    "llama exponent": ("LlamaForCausalLM", "num_hidden_layers", LLAMA, {"operations": ["exponent"]}),
    "llama scale": ("LlamaForCausalLM", "num_hidden_layers", LLAMA, {"operations": ["scale"], "halvings": 2}),
    "llama rotate": ("LlamaForCausalLM", "num_hidden_layers", LLAMA, {"operations": ["rotate"], "seed": 0}),
    "gpt_neox gain": ("GPTNeoXForCausalLM", "num_hidden_layers", GPT_NEOX, {"operations": ["gain"]}),
    "gpt_neox gain+bias": ("GPTNeoXForCausalLM", "num_hidden_layers", GPT_NEOX, {"operations": ["gain", "bias"]}),
    "gpt_neox centre": ("GPTNeoXForCausalLM", "num_hidden_layers", GPT_NEOX, {"operations": ["centre"]}),
    "gpt2 gain+bias": ("GPT2LMHeadModel", "n_layer", GPT2, {"operations": ["gain", "bias"]}),
    "gpt2 centre": ("GPT2LMHeadModel", "n_layer", GPT2, {"operations": ["centre"]}),
}

FOLD = """
import json, resource, sys, time
from normkit.checkpoint import folding
source, target, options, threads = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
def timed(name, action):
    def run(*arguments, **choices):
        begun = time.perf_counter()
        result = action(*arguments, **choices)
        seconds[name] = time.perf_counter() - begun
        return result
    return run
seconds = {}
folding.write_shards = timed("weights", folding.write_shards)
timed("whole", folding.fold)(source, target, **options, threads=threads)
used = resource.getrusage(resource.RUSAGE_SELF)
seconds["cpu"] = used.ru_utime + used.ru_stime
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps(seconds | {"peak": int(peak.split()[1]) * 1024}))
"""


@dataclass(frozen=True)
class Row:
    """What one case gave: GB, medians of GB/s, and GB of memory."""

    case: str
    size: float
    copy: float
    weights: float
    whole: float
    peak: float
    cpu: float
    """Seconds of processor time of a fold, of all its threads."""
    copy_cpu: float
    """Of a copy."""


def write_checkpoint(folder: Path, case: str, size: float, shard: float) -> int:
    """Write a checkpoint of about so many GB in files of so many; the bytes of its weights.

    The numbers are pieces of one block of normal ones, so that writing takes no longer than the disk.
    """
    infos = {name: TensorInfo("BF16", shape) for name, shape in shapes(folder, case, size).items()}
    files: list[dict[str, TensorInfo]] = [{}]
    for name, info in infos.items():
        if files[-1] and sum(held.nbytes for held in files[-1].values()) + info.nbytes > shard * 1e9:
            files.append({})
        files[-1][name] = info
    draw, place = torch.Generator().manual_seed(0), random.Random(0)
    block = (0.02 * torch.randn(2**24, generator=draw)).bfloat16().view(torch.uint8).numpy()
    # Gains and biases near one.
    vector = (1 + 0.1 * torch.randn(2**17, generator=draw)).bfloat16().view(torch.uint8).numpy()
    named = {}
    for number, held in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        named |= dict.fromkeys(held, file)
        with (folder / file).open("wb") as opened:
            opened.write(header_bytes(held, {"format": "pt"}))
            for info in held.values():
                left = info.nbytes
                while left:
                    start = 2 * place.randrange(2**15)
                    piece = (vector if len(info.shape) == 1 else block)[start : start + left]
                    left -= opened.write(piece)
    total = sum(info.nbytes for info in infos.values())
    index = {"metadata": {"total_size": total}, "weight_map": named}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def shapes(folder: Path, case: str, size: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model of the case's class with as many layers as fit; its config is written."""
    import transformers

    name, depth, sizes, _ = CASES[case]
    kind = getattr(transformers, name)

    def of(layers: int) -> dict[str, tuple[int, ...]]:
        config = kind.config_class(**sizes, **{depth: layers}, architectures=[name], dtype="bfloat16")
        config.save_pretrained(folder)
        with torch.device("meta"):
            model = kind(config)
        tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
        return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}

    one, two = (sum(2 * torch.Size(shape).numel() for shape in of(layers).values()) for layers in (1, 2))
    return of(1 + max(0, round((size * 1e9 - one) / (two - one))))


def copied(source: Path, target: Path) -> dict[str, float]:
    """Seconds of a copy, on the disk, and its processor time."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(f"cp -r {source} {target} && sync", shell=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"whole": time.perf_counter() - begun, "cpu": used}


def folded(source: Path, target: Path, case: str, threads: int) -> dict[str, float]:
    """Seconds and memory of a fold in a process of its own."""
    command = [sys.executable, "-c", FOLD, str(source), str(target), json.dumps(CASES[case][3]), str(threads)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def forget(folder: Path) -> None:
    """Drop the files of a folder from the cache of the file system; they are on the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, case: str, size: float, shard: float, rounds: int, threads: int) -> Row:
    """All rounds of one case; nothing is left of it."""
    source, target = folder / "source", folder / "target"
    source.mkdir()
    total = write_checkpoint(source, case, size, shard) / 1e9
    copies, folds = [], []
    for _ in range(rounds):
        for times, action in ((copies, copied), (folds, lambda source, target: folded(source, target, case, threads))):
            subprocess.run(["sync"], check=True)
            forget(source)
            times.append(action(source, target))
            shutil.rmtree(target)
    shutil.rmtree(source)

    def median(runs: list[dict[str, float]], what: str) -> float:
        return statistics.median(each[what] for each in runs)

    return Row(
        case=case,
        size=total,
        copy=total / median(copies, "whole"),
        weights=total / median(folds, "weights"),
        whole=total / median(folds, "whole"),
        peak=max(each["peak"] for each in folds) / 1e9,
        cpu=median(folds, "cpu"),
        copy_cpu=median(copies, "cpu"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=20, help="GB of each checkpoint")
    parser.add_argument("--shard", type=float, default=5, help="GB of each of its files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for case in options.case:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows.append(measure(Path(folder), case, options.size, options.shard, options.rounds, options.threads))
        if not options.json:
            row = rows[-1]
            if len(rows) == 1:
                print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds\n")
                titles = f"{'':20}{'GB':>6}{'cp, GB/s':>10}{'weights':>9}{'share':>7}{'whole':>8}{'share':>7}"
                print(f"{titles}{'peak, GB':>10}{'cpu, s':>8}{'cp':>6}")
            print(
                f"{row.case:20}{row.size:6.1f}{row.copy:10.2f}{row.weights:9.2f}{row.weights / row.copy:7.0%}"
                f"{row.whole:8.2f}{row.whole / row.copy:7.0%}{row.peak:10.2f}"
                f"{row.cpu:8.0f}{row.copy_cpu:6.0f}",
                flush=True,
            )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
