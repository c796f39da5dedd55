"""A small sharded checkpoint, a plan with every kind of edit, and folds of it to be killed, resumed and compared."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from normkit.checkpoint.folding import Written, write_shards
from normkit.checkpoint.hadamard import construction
from normkit.checkpoint.plan import (
    Constant,
    Edit,
    FoldPlan,
    Gain,
    Product,
    Quotient,
    Reference,
    Rotation,
    Sum,
    TensorEdit,
    VectorEdit,
)
from normkit.checkpoint.reader import NAME, CheckpointSource
from normkit.checkpoint.staging import JOURNAL, Staging

INDEX = "model.safetensors.index.json"
FEATURES, WIDE = 384, 1024
"""Small, yet a matrix of them has several chunks."""


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Weights of two blocks: a norm, its reader with a bias, a writer, with numbers of all kinds around them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    found = {"ids": torch.arange(7), "table": normal(2 * WIDE, FEATURES)}
    for block in ("one", "two"):
        found |= {
            f"{block}.norm.weight": normal(FEATURES),
            f"{block}.norm.bias": normal(FEATURES),
            f"{block}.read.weight": normal(WIDE, FEATURES),
            f"{block}.read.bias": normal(WIDE),
            f"{block}.turned.weight": normal(FEATURES, WIDE),
            f"{block}.write.weight": normal(FEATURES, WIDE),
            f"{block}.kept.weight": normal(3, 5, 7),
        }
    return found | {"gone": normal(11), "mask": torch.arange(13) % 3 == 0}


def save(folder: Path, shards: int = 3) -> Path:
    """The checkpoint on disk, in so many files; in one without an index."""
    folder.mkdir(parents=True)
    found = tensors()
    names = list(found)
    parts = [names[len(names) * i // shards : len(names) * (i + 1) // shards] for i in range(shards)]
    files = [
        f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors" for i in range(shards)
    ]
    for file, part in zip(files, parts, strict=True):
        save_file({name: found[name] for name in part}, folder / file, metadata={"format": "pt", "by": "a test"})
    if shards > 1:
        named = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        document = {"metadata": {"total_size": 1, "kept": "as it is"}, "weight_map": named}
        (folder / INDEX).write_text(json.dumps(document))
    return folder


def plan(dtype: str = "same") -> FoldPlan:
    """Gains, biases, centring of both kinds, powers of two, rotations, a created table, a tensor removed, the rest."""
    edits: list[Edit] = []
    for name, tensor in tensors().items():
        own = NAME[tensor.dtype]
        made = "F32" if dtype == "float32" and own == "BF16" else own
        block = name.partition(".")[0]
        gain = Gain(weight=f"{block}.norm.weight")
        copy = TensorEdit(name=name, source=name, dtype=made)
        vector = VectorEdit(name=name, source=name, size=tensor.numel(), dtype=made, value=Constant(value=1.0))
        match name.partition(".")[2]:
            case "norm.weight":
                edits.append(vector)
            case "norm.bias":
                edits.append(replace(vector, value=Quotient(gain=gain)))
            case "read.weight":
                edits.append(replace(copy, gain=gain, gain_axis=1))
            case "read.bias":
                bias = Reference(name=f"{block}.norm.bias")
                term = Product(matrix=f"{block}.read.weight", in_axis=1, vector=bias)
                edits.append(replace(vector, value=Sum(terms=(term,))))
            case "turned.weight":
                edits.append(replace(copy, gain=gain, gain_axis=0, centred_axis=1))
            case "write.weight" if block == "two":
                turns = (
                    Rotation(axis=axis, size=size, seed="0/x", construction=str(construction(size)))
                    for axis, size in ((0, FEATURES), (1, 64))
                )
                edits.append(replace(copy, centred_axis=0, exponent=-3, rotations=tuple(turns)))
            case "kept.weight" if block == "two":
                edits.append(replace(copy, exponent=2))
            case "write.weight":
                edits.append(replace(copy, centred_axis=0))
            case _ if name != "gone":
                edits.append(copy)
    edits.append(TensorEdit(name="created.table", source="table", dtype="F32", centred_axis=1))
    return FoldPlan(
        family="none",
        architecture="None",
        operations=("gain", "bias", "centre"),
        untie=True,
        edits=tuple(edits),
        removed=("gone",),
    )


def fold(
    source: Path, destination: Path, *, made: FoldPlan | None = None, resume: bool = False, **choices: object
) -> Written:
    """Read, write and finish; what `write_shards` returned lies beside the weights too."""
    with CheckpointSource(source) as opened, Staging(destination, source=source, resume=resume) as staging:
        written = write_shards(made or plan(), opened, staging, **choices)
        staging.write("written.json", json.dumps(asdict(written), sort_keys=True).encode())
        staging.finish()
    return written


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def steps_of(source: Path, destination: Path, run: Callable[..., object] = fold) -> int:
    """How often a fold that nothing disturbs tells its progress."""
    told: list[object] = []
    run(source, destination, progress=lambda *state: told.append(state))
    return len(told)


def killed(
    source: Path, destination: Path, threads: int, seed: int, steps: int, run: Callable[..., object] = fold
) -> tuple[int, int]:
    """Fold in processes that are killed at random moments, then in one that is let be.

    A process waits at each step until it is told to go on, so that on a busy machine, too, it is killed in the step
    that was drawn. The first three have a third of the steps each, and so are killed for certain; the fourth is killed
    at any moment up to the end, and may end before. Where a destination is there after a kill, nothing touches it any
    more: it must be whole.

    Args:
        source: The checkpoint.
        destination: Where it is folded to.
        threads: Of each process.
        seed: Of the moments.
        steps: How often a fold tells its progress.
        run: The fold.

    Returns:
        How many were killed, and how many finished files they left behind.
    """
    staging = destination.with_name(f".{destination.name}.normkit-partial")
    moments, kills = random.Random(seed), 0
    for most in (steps // 3, steps // 3, steps // 3, steps):
        heard, told = os.pipe()
        allowed, allows = os.pipe()
        process = os.fork()
        if process == 0:
            # If nobody is left who allows anything, it goes on to its end.
            os.close(allows)

            def wait(*_state: object, to: int = told, until: int = allowed) -> None:
                os.write(to, b".")
                os.read(until, 1)

            run(source, destination, resume=True, threads=threads, progress=wait)
            os._exit(0)
        os.close(told)
        for _ in range(moments.randrange(most)):
            os.read(heard, 1)
            os.write(allows, b".")
        time.sleep(moments.uniform(0.0, 0.01))
        os.kill(process, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(process, 0)[1])
        for end in (heard, allowed, allows):
            os.close(end)
        if destination.exists():
            # Whole; the journal goes last.
            (destination / JOURNAL).unlink(missing_ok=True)
            return kills, 0
    kept = len(list(staging.glob("*.safetensors")))
    run(source, destination, resume=True, threads=threads)
    return kills, kept


if __name__ == "__main__":
    begun, target, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    steps = steps_of(begun, target / "whole")
    sys.stdout.write(json.dumps([killed(begun, target / seed, threads, int(seed), steps) for seed in sys.argv[4:]]))
