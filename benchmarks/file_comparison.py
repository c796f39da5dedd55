"""Seconds and memory of comparing the gains in two files or folders, each time in a fresh process.

    python benchmarks/file_comparison.py [--size 20 140 ...] [--pair PORT REFERENCE ...] [--rounds 3] [--folder DIR]

Each size is a Llama of so many GB of bfloat16 in shards of 5 GB: against the same model in one GGUF file of F16, and
against another such folder. Gains are written; matrices are left as holes in the files, which take no space on the
disk: a few rows of each are read, as the bytes read show (`/proc/self/io`). `--pair` takes GGUF files and folders as
they are, as often as given. The pages of the files stay in the memory of the system from round to round. `peak` is
the most memory that the process ever had (VmHWM), and how much of it came after normkit and torch were imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from normkit.checkpoint.reader import TensorInfo, header_bytes

HIDDEN, INTERMEDIATE, VOCABULARY, SHARD = 8192, 28672, 128256, 5

COMPARE = """
import json, sys, time
from normkit.comparison.gguf_file import read_gguf
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of
import gguf.constants, gguf.tensor_mapping
def told(file, key):
    return next(int(line.split()[1]) for line in open(file) if line.startswith(key))
before, read = told("/proc/self/status", "VmHWM"), told("/proc/self/io", "rchar")
begun = time.perf_counter()
port, reference = (read_gguf(path) if path.endswith(".gguf") else weights_of(path) for path in sys.argv[1:])
opened = time.perf_counter() - begun
found = compare_values(port, reference)
peak = told("/proc/self/status", "VmHWM")
print(json.dumps({
    "opened": opened, "seconds": time.perf_counter() - begun, "peak": peak, "more": peak - before,
    "read": told("/proc/self/io", "rchar") - read,
    "groups": [f"{group.title}: {group.words}" for group in found.groups],
}))
"""


def tensors(layers: int) -> dict[str, TensorInfo]:
    """The tensors of a Llama of so many layers."""
    block = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"},
        **{f"self_attn.{name}_proj.weight": (HIDDEN // 8, HIDDEN) for name in "kv"},
        **{f"mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    found |= {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    found |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return {name: TensorInfo("BF16", shape) for name, shape in found.items()}


def gain(name: str) -> torch.Tensor:
    """The gain of this name, the same in both files."""
    drawn = torch.Generator().manual_seed(sum(name.encode()))
    return (1 + 0.3 * torch.randn(HIDDEN, generator=drawn)).bfloat16()


def of_size(gigabytes: float) -> dict[str, TensorInfo]:
    """The tensors of a Llama of so many GB."""
    one = tensors(1)
    fixed = sum(info.nbytes for name, info in one.items() if ".layers." not in name)
    layer = sum(info.nbytes for name, info in one.items() if ".layers." in name)
    return tensors(max(1, round((gigabytes * 1e9 - fixed) / layer)))


def written_folder(target: Path, held: dict[str, TensorInfo]) -> Path:
    """A folder of transformers."""
    shards: list[dict[str, TensorInfo]] = [{}]
    for name, info in held.items():
        if sum(each.nbytes for each in shards[-1].values()) + info.nbytes > SHARD * 1e9:
            shards.append({})
        shards[-1][name] = info
    target.mkdir()
    named = {}
    for number, shard in enumerate(shards, 1):
        file = target / f"model-{number:05}-of-{len(shards):05}.safetensors"
        named |= dict.fromkeys(shard, file.name)
        place = len(header_bytes(shard, {}))
        with file.open("wb") as opened:
            opened.write(header_bytes(shard, {}))
            for name, info in shard.items():
                if "norm" in name:
                    opened.seek(place)
                    opened.write(gain(name).view(torch.uint8).numpy().tobytes())
                place += info.nbytes
            opened.truncate(place)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5}))
    return target


def written_gguf(file: Path, held: dict[str, TensorInfo]) -> Path:
    """The same model as llama.cpp has it: gains in F32, matrices in F16."""
    layers = sum(name.endswith("input_layernorm.weight") for name in held)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token {number}" for number in range(VOCABULARY)])
    gains, reached = {}, 0
    for name, info in held.items():
        kind, size = (np.float32, 4) if "norm" in name else (np.float16, 2)
        count = int(np.prod(info.shape)) * size
        writer.add_tensor_info(table.get_name(name, (".weight",)), info.shape, np.dtype(kind), count)
        if "norm" in name:
            gains[name] = reached
        reached += -(-count // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with file.open("r+b") as opened:
        data = -(-os.fstat(opened.fileno()).st_size // 32) * 32
        for name, place in gains.items():
            opened.seek(data + place)
            opened.write(gain(name).float().numpy().tobytes())
        opened.truncate(data + reached)
    return file


def measured(port: Path, reference: Path, rounds: int) -> None:
    """Print the fastest round."""
    files = [file for each in (port, reference) for file in ([each] if each.is_file() else each.glob("*.safetensors"))]
    command = [sys.executable, "-c", COMPARE, str(port), str(reference)]
    runs: list[dict[str, Any]] = [
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(rounds)
    ]
    best = min(runs, key=lambda run: run["seconds"])
    print(
        f"{port.name} and {reference.name}, {sum(file.stat().st_size for file in files) / 1e9:.1f} GB: "
        f"{best['seconds']:.2f} s, {best['opened']:.2f} of them to "
        f"open; {best['read'] / 1e6:.1f} MB read; peak {best['peak'] / 1024:.0f} MiB, {best['more'] / 1024:.0f} of it "
        f"after the imports; {'; '.join(best['groups'])}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, nargs="*", default=[20.0, 140.0], help="GB of a synthetic folder")
    parser.add_argument("--pair", type=Path, nargs=2, action="append", default=[], metavar=("PORT", "REFERENCE"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the synthetic files are written, and removed")
    given = parser.parse_args()
    for port, reference in given.pair:
        measured(port, reference, given.rounds)
    for size in given.size:
        above = Path(tempfile.mkdtemp(dir=given.folder))
        try:
            held = of_size(size)
            reference = written_folder(above / "model", held)
            measured(written_gguf(above / "model.gguf", held), reference, given.rounds)
            measured(written_folder(above / "port", held), reference, given.rounds)
        finally:
            shutil.rmtree(above)


main()
