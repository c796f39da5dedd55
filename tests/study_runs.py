"""Short runs of the studies' loop: to be killed and continued, or shared by processes under torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.errors import InputError, LostRankError
from normkit.study import arm_context
from normkit.study.arm_context import ArmContext
from normkit.study.corpus import next_token_loss, windows
from normkit.study.model_parts import BatchNorm
from normkit.study.ranks import Ranks, joined
from normkit.study.run_checkpoint import RunCheckpoint
from normkit.study.training_run import Batch, Point, Recipe, train
from normkit.study.transformer import Transformer, TransformerConfig

STEPS = 30
LONG = 60
RECIPE = Recipe(steps=STEPS, learning_rate=1e-2, warmup=5, weight_decay=0.1)
TEXT = bytes(range(97, 123)) * 40


class Model(nn.Module):
    """All that a checkpoint must hold: shared weights, buffers, random numbers in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(128, 12)
        self.norm, self.dropout, self.mixing = BatchNorm(12), nn.Dropout(0.2), nn.Linear(12, 12)
        self.final_norm, self.unembedding = nn.LayerNorm(12), nn.Linear(12, 128, bias=False)
        self.unembedding.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.dropout(F.gelu(self.mixing(self.norm(x))))
        return self.unembedding(self.final_norm(x))


def batches(seed: int = 0, *, batch: int = 4) -> Iterator[Batch]:
    return windows(TEXT, batch=batch, window=8, seed=seed)


def observe(model: nn.Module, step: int) -> dict[str, object]:
    return {"length": next(model.parameters()).norm().item(), "odd": step % 2 == 1}


def run(
    checkpoint: RunCheckpoint | None = None, report: Callable[[Point], None] | None = None, **choices: object
) -> tuple[nn.Module, tuple[Point, ...]]:
    """One whole run, or what is left of it."""
    model = Model()
    recipe = replace(RECIPE, **choices)
    points = train(model, recipe, batches(), next_token_loss, observe=observe, report=report, checkpoint=checkpoint)
    return model, points


def state(model: nn.Module) -> dict[str, list[object]]:
    """Every number of a model, to its last bit."""
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


def keep(folder: Path, last: int) -> None:
    """A run that is kept after every step and told of before; its end goes to a file. After a step it waits."""

    def tell(point: Point) -> None:
        sys.stdout.write(f"{point.step}\n")
        sys.stdout.flush()
        if point.step == last:
            time.sleep(600)

    model, points = run(RunCheckpoint(folder / "run.safetensors", seconds=0.0), tell, steps=LONG)
    (folder / "end.json").write_text(json.dumps({"state": state(model), "points": [vars(point) for point in points]}))


class Batched(nn.Module):
    """Rows through a batch norm, twice over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # A bias before the norm would have a gradient of rounding errors only.
        self.before, self.norm, self.after = nn.Linear(5, 7, bias=False), BatchNorm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.norm(self.before(x))))


def rows(seed: int = 0, *, count: int = 6) -> Iterator[Batch]:
    """Rows whose mean moves from the first to the last, so that parts of a batch differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(count, 4, 5, generator=generator, dtype=torch.float64)
        yield x + torch.arange(count)[:, None, None], torch.randn(count, 4, 3, generator=generator, dtype=torch.float64)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """In the model's own precision."""
    (ids,) = batch
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def transformer() -> Transformer:
    return Transformer(TransformerConfig(vocabulary=128, context=8, width=16, layers=2, heads=2), seed=1)


def new_context(**choices: object) -> ArmContext:
    return ArmContext(settings={}, seed=0, **choices)


def _uninspected() -> Any:
    """Runs whose findings nobody asks for."""
    return mock.patch.object(arm_context, "findings", return_value=())


def shared_runs(ranks: Ranks) -> dict[str, object]:
    """The same runs for any number of processes: losses and all numbers of the models."""
    results: dict[str, object] = {}
    recipe = Recipe(steps=8, learning_rate=1e-2, warmup=2, weight_decay=0.1)
    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        model = transformer()
        with _uninspected() if name == "float32" else nullcontext():
            done = new_context(dtype=dtype, ranks=ranks).train(model, recipe, batches(), cross_entropy)
        results[name] = {"losses": done.losses, "state": state(model), "findings": list(done.findings)}
    model = Batched()
    with _uninspected():
        done = new_context(dtype=torch.float64, ranks=ranks).train(model, recipe, rows(), squared_error)
    results["batched"] = {
        "losses": done.losses,
        "state": state(model),
        "gradient_norms": [point.gradient_norm for point in done.points],
    }
    return results


class _EnoughError(Exception):
    """Ends a run in the middle."""


def share(folder: Path) -> None:
    """All that two processes do together; at the end the second is killed while the first is busy by itself."""
    try:
        with joined() as ranks:
            results = shared_runs(ranks)
            with _uninspected():
                results["kept"] = _continued(ranks, folder / f"{ranks.rank}")
            try:
                new_context(ranks=ranks).train(transformer(), RECIPE, batches(batch=3), next_token_loss)
            except InputError as error:
                results["indivisible"] = str(error)
            written = folder / f"{ranks.rank}.part"
            written.write_text(json.dumps(results))
            written.rename(folder / f"{ranks.rank}.json")
            if ranks.rank == 1:
                while not (folder / "0.json").exists():
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    except LostRankError as error:
        (folder / "ended.txt").write_text(str(error))


def _continued(ranks: Ranks, folder: Path) -> dict[str, object]:
    """A run that is broken off and continued, of which each process has a folder of its own."""

    def fail(share: float) -> None:
        if share > 0.5:
            raise _EnoughError

    recipe = Recipe(steps=8, learning_rate=1e-2)
    try:
        new_context(ranks=ranks, checkpoints=folder, checkpoint_seconds=0.0, report=fail).train(
            transformer(), recipe, batches(), next_token_loss
        )
    except _EnoughError:
        begun = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    seen: list[float] = []
    model, whole = transformer(), transformer()
    continued = new_context(ranks=ranks, checkpoints=folder, checkpoint_seconds=0.0, report=seen.append).train(
        model, recipe, batches(), next_token_loss
    )
    uninterrupted = new_context(ranks=ranks).train(whole, recipe, batches(), next_token_loss)
    return {
        "files": begun,
        "first": seen[0],
        "same": continued.points == uninterrupted.points and state(model) == state(whole),
    }


def lose(folder: Path) -> None:
    """The second process is killed in a step of which the first waits for the gradients."""

    def tell(share: float) -> None:
        if os.environ["RANK"] == "1" and share > 0.1:
            os.kill(os.getpid(), signal.SIGKILL)

    with joined() as ranks:
        try:
            new_context(ranks=ranks, report=tell).train(transformer(), RECIPE, batches(), next_token_loss)
        except LostRankError as error:
            (folder / "lost.txt").write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    share(Path(sys.argv[1]))
