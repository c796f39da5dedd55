"""The context in which an arm is measured: settings, seed, device, and the training of its models."""

from __future__ import annotations

import inspect as signatures
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.files import finite, write_text
from normkit.inspection.inspecting import inspect
from normkit.measurement.running import evaluating
from normkit.study.loop import train
from normkit.study.ranks import ALONE, Ranks
from normkit.study.run_checkpoint import RunCheckpoint
from normkit.study.training_run import Batch, Loss, Observe, Point, Recipe, TrainingRun
from normkit.text import dtype_name

DTYPES = (torch.float32, torch.float64, torch.bfloat16)

Setting = bool | int | float | str | tuple[int, ...] | tuple[float, ...]
"""A choice that `--set` can change; the type of its default is its type."""

Settings = Mapping[str, Setting]

# Tokens that `inspect` reads of a small model; each further one costs time.
_TOKENS = 512


def integer(settings: Settings, name: str) -> int:
    """A setting that is a whole number."""
    value = settings[name]
    assert isinstance(value, int)
    return value


def numbers(settings: Settings, name: str) -> tuple[float, ...]:
    """A setting that is several numbers."""
    values = settings[name]
    assert isinstance(values, tuple)
    return values


@dataclass(frozen=True, kw_only=True)
class ArmContext:
    """Passed to `Study.measure` with each arm.

    Raises:
        InputError: If the dtype is not one of `DTYPES`.
    """

    settings: Settings
    seed: int
    """Of initial weights and batches; the same for all arms that are compared."""
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    """float32 or float64, of parameters and of the real numbers in batches. With bfloat16 parameters, gradients and
    batches stay float32, and the loss is computed under autocast."""
    report: Callable[[float], None] = lambda _share: None
    """Called with the share of the arm that is done."""
    checkpoints: Path | None = None
    """Folder for the checkpoints of this arm and seed alone; the caller removes it when the arm is done. None saves
    nothing."""
    checkpoint_seconds: float = 20.0
    """Between two checkpoints of a run; its end is saved too."""
    curves: Path | None = None
    """Folder in which each finished run leaves NAME.jsonl, one JSON line per step; None leaves nothing."""
    ranks: Ranks = ALONE
    """The processes that share each batch."""
    _names: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse a dtype that cannot be trained in."""
        if self.dtype not in DTYPES:
            known = ", ".join(dtype_name(dtype) for dtype in DTYPES)
            raise InputError(f"expected a dtype of {known}, got {dtype_name(self.dtype)}")

    def integer(self, name: str) -> int:
        """A setting that is a whole number."""
        return integer(self.settings, name)

    def number(self, name: str) -> float:
        """A setting that is a number."""
        value = self.settings[name]
        assert isinstance(value, int | float)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A setting that is several numbers."""
        return numbers(self.settings, name)

    def move(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and dtype, in place; for measurements before it is trained."""
        return model.to(self.device, self._parameter_dtype)

    def train(
        self,
        model: nn.Module,
        recipe: Recipe,
        batches: Iterator[Batch],
        loss_of: Loss,
        *,
        observe: Observe | None = None,
        name: str = "run",
    ) -> TrainingRun:
        """Train a model in place, on the device and in the dtype of this context, and inspect it.

        A run that has a checkpoint is continued, to the same bits. Anything that `observe` stores elsewhere than in the
        values it returns is lost then, and `batches` must draw from a generator of their own. `inspect` reads the
        trained model on the batch after the last one, or on the last one if there is no other.

        Args:
            model: What to train.
            recipe: The choices.
            batches: One per step, on any device.
            loss_of: The loss.
            observe: Values to record at each step.
            name: Of the run; an arm with several runs gives each its own.

        Raises:
            InputError: If the checkpoint cannot be continued, another run with a checkpoint has this name, the batches
                end before the steps, or the number of ranks does not divide a batch.
            LostRankError: If another process of the run has ended.
        """
        if self.checkpoints is not None and name in self._names:
            raise InputError(f"two training runs of an arm are kept as {name!r}; give each a name of its own")
        self._names.add(name)
        self.move(model)
        supply = _Supply(batches)
        moved_loss = self._on_device(loss_of)
        checkpoint = None
        if self.checkpoints is not None:
            checkpoint = RunCheckpoint(self.checkpoints / f"{name}.safetensors", seconds=self.checkpoint_seconds)
        with self.ranks.together():
            points = train(
                model,
                recipe,
                supply,
                moved_loss,
                observe=observe,
                report=lambda point: self.report(point.step / recipe.steps),
                checkpoint=checkpoint,
                ranks=self.ranks,
            )
            if self.curves is not None:
                write_text(self.curves / f"{name}.jsonl", "".join(map(_json_line, points)))
            return TrainingRun(points=points, findings=findings(model, next(supply, supply.last), moved_loss))

    @property
    def _parameter_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype is torch.bfloat16 else self.dtype

    def _on_device(self, loss_of: Loss) -> Loss:
        """The loss of a batch that may be on any device."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, self._parameter_dtype if tensor.is_floating_point() else None)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            kind = torch.device(self.device).type
            with torch.autocast(kind, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
                return loss_of(model, tuple(moved(tensor) for tensor in batch))

        return loss


def _json_line(point: Point) -> str:
    """A step as a line of JSON; a number that is not finite is null."""
    values = {
        "step": point.step,
        "loss": point.loss,
        "learning_rate": point.learning_rate,
        "gradient_norm": point.gradient_norm,
    }
    return json.dumps({name: finite(value) for name, value in values.items()}) + "\n"


class _Supply:
    """Batches, with the last one that was drawn."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.last: Batch = ()
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.last = next(self._batches)
        return self.last


def findings(model: nn.Module, batch: Batch, loss_of: Loss) -> tuple[dict[str, Any], ...]:
    """Inspect a model on the arguments with which the loss of a batch calls it.

    Args:
        model: A trained one; left as it is.
        batch: Preferably not trained on.
        loss_of: The loss; its first call of the model is inspected.

    Returns:
        For each finding, in the order of `inspect`: "rule", "severity", "title", "sites", as JSON has them.
    """
    inspection = inspect(model, _inputs(model, batch, loss_of))
    return tuple(
        {"rule": found.rule, "severity": found.severity, "title": found.title, "sites": list(found.sites)}
        for found in inspection.findings
    )


def _inputs(model: nn.Module, batch: Batch, loss_of: Loss) -> dict[str, Tensor]:
    """The arguments, by name, with which a loss calls a model on the first rows of a batch."""
    first = batch[0]
    # A row of token ids (batch, time) or of vectors (batch, time, n) has many tokens; a vector (batch, n) is one.
    has_time = first.dim() > 2 or (first.dim() == 2 and not first.is_floating_point())
    rows = max(1, _TOKENS // (first.shape[1] if has_time else 1))
    calls: list[dict[str, Tensor]] = []
    signature = signatures.signature(model.forward)

    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with evaluating(model), torch.no_grad():
            loss_of(model, tuple(tensor[:rows] for tensor in batch))
    finally:
        handle.remove()
    return calls[0]
