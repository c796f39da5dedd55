"""Train the twins: `python -m normkit.demo.training --out DIR`.

One plain training loop. Both twins see the same batches in the same order and the same optimizer, so
their difference is their architecture. With one thread a run repeats bit for bit on one machine.
A finished model appears in its folder all at once; an interrupted run leaves what was there before.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit import demo
from normkit.study import corpus
from normkit.demo.architecture import WINDOW, build
from normkit.demo.entropy import bits_per_byte, unigram_entropy
from normkit.demo.tokenizer import byte_tokenizer
from normkit.files import json_text, write_text

_LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All choices of a run.

    Attributes:
        steps: Optimizer steps.
        seed: Of the initial weights and, apart from them, of the batches.
        batch: Windows of 256 bytes in a step.
        learning_rate: At the peak, after `warmup` steps; then half a cosine down to a tenth.
        warmup: Steps of linear increase.
        weight_decay: Of matrices; gains, biases and embeddings are not decayed.
        clip: Largest norm of all gradients together.
        evaluate_every: Steps between two measurements on the held-out files.
    """

    steps: int
    seed: int
    batch: int
    learning_rate: float
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int


def train(model: nn.Module, recipe: Recipe, training: bytes, held_out: bytes) -> Iterator[dict[str, float]]:
    """Train a model in place, yielding one point of its loss curve every ten steps.

    Args:
        model: A byte-level causal language model.
        recipe: The choices.
        training: What to learn from.
        held_out: What to measure on.

    Yields:
        `step`, `learning_rate`, `training` (bits per byte, mean since the last point) and, now and
        then, `held_out` (bits per byte).
    """
    optimizer = torch.optim.AdamW(_parameter_groups(model, recipe.weight_decay), betas=(0.9, 0.95))
    batches = _batches(training, recipe)
    nats: list[float] = []
    for step in range(1, recipe.steps + 1):
        windows = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, recipe)
        logits = model(input_ids=windows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        nats.append(loss.item())
        last, measured = step == recipe.steps, step % recipe.evaluate_every == 0
        if last or measured or step % _LOG_EVERY == 0:
            point = {"step": step, "learning_rate": _learning_rate(step, recipe)}
            point["training"] = sum(nats) / len(nats) / math.log(2)
            if last or measured:
                point["held_out"] = bits_per_byte(model, held_out, WINDOW)
            nats.clear()
            yield {name: round(value, 6) for name, value in point.items()}


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in embeddings]
    kept = [p for p in model.parameters() if p.dim() == 1 or id(p) in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def _batches(text: bytes, recipe: Recipe) -> Iterator[Tensor]:
    """Windows from anywhere in the text, one byte longer than the context: the last is only predicted."""
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        starts = torch.randint(len(stream) - WINDOW, (recipe.batch,), generator=generator)
        yield stream[starts[:, None] + torch.arange(WINDOW + 1)].long()


def _learning_rate(step: int, recipe: Recipe) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return recipe.learning_rate * min(step / recipe.warmup, 0.1 + 0.9 * cosine)


def _record(name: str, recipe: Recipe, model: Any, text: corpus.Corpus, minutes: float) -> dict[str, Any]:
    import transformers

    shipped = demo.text().encode()
    return {
        "model": name,
        "command": shlex.join(["python", "-m", "normkit.demo.training", *sys.argv[1:]]),
        "recipe": asdict(recipe),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "corpus": text.digest,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "minutes": round(minutes, 1),
        "held_out": {
            "unigram_entropy": round(unigram_entropy(text.held_out), 4),
            "bits_per_byte": round(bits_per_byte(model, text.held_out, WINDOW), 4),
        },
        "text": {
            "unigram_entropy": round(unigram_entropy(shipped), 4),
            "bits_per_byte": round(bits_per_byte(model, shipped, WINDOW), 4),
        },
    }


def _train_one(name: str, recipe: Recipe, text: corpus.Corpus, out: Path) -> None:
    """Train one twin and put its folder in place, whole."""
    start = time.monotonic()
    torch.manual_seed(recipe.seed)
    model = build(name)
    curve = []
    for point in train(model, recipe, text.training, text.held_out):
        curve.append(point)
        click.echo(f"{name} {(time.monotonic() - start) / 60:5.1f} min  {json.dumps(point)}", err=True)
    record = _record(name, recipe, model, text, (time.monotonic() - start) / 60)
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        model.save_pretrained(fresh)
        # safetensors writes for the owner alone; a package is installed for everybody.
        (fresh / "model.safetensors").chmod(0o644)
        byte_tokenizer(WINDOW).save_pretrained(fresh)
        write_text(fresh / "training.jsonl", "".join(json.dumps(point) + "\n" for point in curve))
        write_text(fresh / "training.json", json_text(record))
        if (out / name).exists():
            (out / name).rename(Path(scratch) / "previous")
        fresh.rename(out / name)


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the models.")
@click.option("--model", type=click.Choice(["layernorm", "rmsnorm", "both"]), default="both", help="What to train.")
@click.option("--steps", type=click.IntRange(1), default=3000, help="Optimizer steps.")
@click.option("--batch", type=click.IntRange(1), default=16, help="Windows of 256 bytes in a step.")
@click.option("--learning-rate", type=float, default=6e-3, help="At the peak.")
@click.option("--seed", type=int, default=0, help="Of weights and batches.")
@click.option("--evaluate-every", type=click.IntRange(1), default=300, help="Steps between held-out measurements.")
@click.option("--threads", type=click.IntRange(1), default=1, help="Of torch; with one a run repeats bit for bit.")
@click.option("--corpus", "root", type=click.Path(exists=True, path_type=Path), help="Instead of the library.")
def main(out: Path, model: str, threads: int, root: Path | None, **choices: Any) -> None:
    """Train the models that ship with normkit, on the source of this Python's standard library."""
    torch.set_num_threads(threads)
    text = corpus.read(root)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("layernorm", "rmsnorm") if model == "both" else (model,):
        _train_one(name, Recipe(**choices), text, out)
    write_text(out / "corpus.json", json_text(text.to_json()))


if __name__ == "__main__":
    main()
