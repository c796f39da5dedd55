"""Train the twins: `python -m normkit.demo.training --out DIR`.

With the training loop of the studies. Both twins see the same batches in the same order and the same optimizer, so
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
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit import demo
from normkit.demo.architecture import WINDOW, build, byte_tokenizer
from normkit.errors import InputError
from normkit.files import json_text, write_text
from normkit.identification.state import in_mode
from normkit.study import corpus, training_run
from normkit.study.corpus import SEPARATOR, windows
from normkit.study.training_run import Batch, Point, Recipe

_IGNORED = -100


def unigram_entropy(text: bytes) -> float:
    """The entropy of a text's own byte frequencies: the best that a model without context can reach.

    H = -sum(p * log2(p)) over the bytes that occur.

    Returns:
        Bits per byte.
    """
    counts = Counter(text)
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: bytes, window: int = 256, batch: int = 32) -> float:
    """Mean of -log2(probability) that a byte-level language model gives the bytes of a text.

    The text follows a separator and is cut into windows; each byte is predicted once, from the bytes
    before it in its window, so the first ones of a window are predicted from little.

    Args:
        model: Called with `input_ids`, returns `.logits`; ids are byte values.
        text: What to predict.
        window: Bytes of context at most.
        batch: Windows computed together.

    Returns:
        Bits per byte.

    Raises:
        InputError: If the text is empty.
    """
    if not text:
        raise InputError("expected a text of at least one byte, got an empty one; give a longer text")
    stream = torch.tensor(list(SEPARATOR + text))
    padding = -len(text) % window
    inputs = F.pad(stream[:-1], (0, padding)).view(-1, window)
    targets = F.pad(stream[1:], (0, padding), value=_IGNORED).view(-1, window)
    nats = 0.0
    with in_mode(model, training=False):
        for first in range(0, len(inputs), batch):
            rows = slice(first, first + batch)
            logits = model(input_ids=inputs[rows]).logits.flatten(0, 1)
            nats += F.cross_entropy(logits, targets[rows].flatten(), ignore_index=_IGNORED, reduction="sum").item()
    return nats / math.log(2) / len(text)


CurvePoint = dict[str, float]
"""One point of a loss curve: names -> numbers."""

_LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """All choices of a run."""

    steps: int
    seed: int
    """Seeds the initial weights and, separately, the batches."""
    batch: int
    """Windows of 256 bytes per step."""
    learning_rate: float
    """At the peak, after `warmup` steps; half a cosine then leads down to a tenth."""
    warmup: int = 100
    """Steps of linear increase."""
    weight_decay: float = 0.1
    """Applies to matrices; gains, biases and embeddings are not decayed."""
    clip: float = 1.0
    """Largest norm of all gradients together."""
    evaluate_every: int
    """Steps between two measurements on the held-out files."""

    @property
    def recipe(self) -> Recipe:
        """The choices in the form of the training loop."""
        return Recipe(
            steps=self.steps,
            learning_rate=self.learning_rate,
            warmup=self.warmup,
            weight_decay=self.weight_decay,
            clip=self.clip,
        )


def train(
    model: nn.Module, choices: Choices, training: bytes, held_out: bytes, tell: Callable[[CurvePoint], None]
) -> list[CurvePoint]:
    """Train a model in place.

    Args:
        model: A byte-level causal language model.
        choices: How.
        training: What to learn from.
        held_out: What to measure on.
        tell: Called with each point of the loss curve.

    Returns:
        A point every ten steps: `step`, `learning_rate`, `training` (bits per byte, mean since the last point) and, now
        and then, `held_out` (bits per byte).

    Raises:
        ClickException: If the loss is not finite any more.
    """
    curve: list[CurvePoint] = []
    nats: list[float] = []

    def follow(point: Point) -> None:
        if not math.isfinite(point.loss):
            raise click.ClickException(f"the loss is {point.loss} at step {point.step}; lower --learning-rate")
        nats.append(point.loss)
        last, measured = point.step == choices.steps, point.step % choices.evaluate_every == 0
        if not (last or measured or point.step % _LOG_EVERY == 0):
            return
        values = {"step": point.step, "learning_rate": point.learning_rate}
        values["training"] = sum(nats) / len(nats) / math.log(2)
        if last or measured:
            values["held_out"] = bits_per_byte(model, held_out, WINDOW)
        nats.clear()
        curve.append({name: round(value, 6) for name, value in values.items()})
        tell(curve[-1])

    batches = windows(training, batch=choices.batch, window=WINDOW, seed=choices.seed)
    training_run.train(model, choices.recipe, batches, _next_token_loss, report=follow)
    return curve


def _next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    (ids,) = batch
    logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _record(name: str, choices: Choices, model: Any, text: corpus.Corpus, minutes: float) -> dict[str, Any]:
    import transformers

    shipped = demo.text().encode()
    return {
        "model": name,
        "command": shlex.join(["python", "-m", "normkit.demo.training", *sys.argv[1:]]),
        "recipe": asdict(choices),
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


def _train_one(name: str, choices: Choices, text: corpus.Corpus, out: Path) -> None:
    """Train one twin and put its folder in place, whole."""
    start = time.monotonic()

    def tell(point: CurvePoint) -> None:
        click.echo(f"{name} {(time.monotonic() - start) / 60:5.1f} min  {json.dumps(point)}", err=True)

    torch.manual_seed(choices.seed)
    model = build(name)
    curve = train(model, choices, text.training, text.held_out, tell)
    record = _record(name, choices, model, text, (time.monotonic() - start) / 60)
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        model.save_pretrained(fresh)
        # safetensors makes files private, but a package is installed for all users.
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
        _train_one(name, Choices(**choices), text, out)
    write_text(out / "corpus.json", json_text(text.to_json()))


if __name__ == "__main__":
    main()
