"""What an arm is measured with: settings, a seed, data, and the loop; and what a training run gave."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.files import finite, write_text
from normkit.study import probing
from normkit.study.keeping import Keeper
from normkit.study.loop import Batch, Loss, Observe, Point, Recipe, train
from normkit.study.ranks import ALONE, Ranks
from normkit.study.result import Settings, integer
from normkit.text import dtype_name

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run gave.

    Attributes:
        points: One a step; the last has a loss that is not finite where the run diverged.
        findings: What `inspect` says of the model after the last step, as JSON values: "rule", "severity", "sites".
    """

    points: tuple[Point, ...]
    findings: tuple[Mapping[str, Any], ...] = ()

    @property
    def losses(self) -> list[float | None]:
        """The loss of each step, ready for JSON: None where it was not finite."""
        return [finite(point.loss) for point in self.points]

    @property
    def diverged(self) -> bool:
        """Whether the run was ended by a loss that is not finite."""
        return not math.isfinite(self.points[-1].loss)

    @property
    def last(self) -> float:
        """The loss of the last step, `capped`."""
        return self.capped(self.points[-1].loss)

    def capped(self, loss: float) -> float:
        """A loss of this run's model, at most the loss of the first step, and that where it is not finite."""
        first = self.points[0].loss
        return min(loss, first) if math.isfinite(loss) else first

    def observed(self, name: str) -> list[Any]:
        """What `observe` gave under a name, in the order of the steps that gave it."""
        return [point.observed[name] for point in self.points if name in point.observed]


@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """Given to `Study.measure` with each arm.

    Attributes:
        settings: Of the study.
        seed: Of initial weights and batches; the same for all arms that are compared.
        device: Where models and batches are.
        dtype: float32 or float64, of parameters and of what is real in batches; or bfloat16: parameters, gradients and
            batches stay float32, and the loss is computed under autocast.
        tell: Called with the share of the arm that is done.
        keep: Folder where unfinished runs are kept, of this arm and seed alone; it is the caller's to remove when the
            arm is done. None keeps nothing.
        keep_seconds: Between two times that a run is kept; at its end it is kept too.
        curves: Folder in which each finished run leaves NAME.jsonl, one JSON line a step; None leaves nothing.
        ranks: The processes that share each batch.

    Raises:
        InputError: If the dtype is none of these.
    """

    settings: Settings
    seed: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    tell: Callable[[float], None] = lambda _share: None
    keep: Path | None = None
    keep_seconds: float = 20.0
    curves: Path | None = None
    ranks: Ranks = ALONE
    _names: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse a dtype in which nothing can be trained."""
        if self.dtype not in DTYPES:
            known = ", ".join(dtype_name(dtype) for dtype in DTYPES)
            raise InputError(f"expected a dtype of {known}, got {str(self.dtype).removeprefix('torch.')}")

    def integer(self, name: str) -> int:
        """A setting that is a whole number."""
        return integer(self.settings, name)

    def number(self, name: str) -> float:
        """A setting that is a number."""
        value = self.settings[name]
        assert isinstance(value, int | float)
        return float(value)

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to this laboratory's device and dtype, in place; for what is measured before it is trained."""
        return model.to(self.device, self._parameters)

    def train(
        self,
        model: nn.Module,
        recipe: Recipe,
        batches: Iterator[Batch],
        loss_of: Loss,
        *,
        observe: Observe | None = None,
        name: str = "run",
        held_out: Batch | None = None,
    ) -> Run:
        """Train a model in place, moved to this laboratory's device and dtype, and inspect it.

        Where runs are kept, one that was begun is continued, to the same bits. What `observe` stores elsewhere than in
        the values it returns is lost then, and `batches` must draw from a generator of their own.

        Args:
            model: What to train.
            recipe: The choices.
            batches: One a step, on any device.
            loss_of: The loss.
            observe: Numbers to keep from each step.
            name: Of the run, where an arm has several; each has a name of its own.
            held_out: The batch on which `inspect` reads the trained model; None: the one after the last, or the last
                where there is no other.

        Raises:
            InputError: If what was kept cannot be continued, another run that is kept has this name, the batches end
                before the steps, or the ranks do not divide a batch.
            LostRankError: If another process of the run has ended.
        """
        if self.keep is not None and name in self._names:
            raise InputError(f"two training runs of an arm are kept as {name!r}; give each a name of its own")
        self._names.add(name)
        self.place(model)
        supply = _Supply(batches)
        placed_loss = self._on_device(loss_of)
        with self.ranks.together():
            points = train(
                model,
                recipe,
                supply,
                placed_loss,
                observe=observe,
                tell=lambda point: self.tell(point.step / recipe.steps),
                keeper=self._keeper(name),
                ranks=self.ranks,
            )
            if self.curves is not None:
                write_text(self.curves / f"{name}.jsonl", "".join(map(_line, points)))
            looked_at = next(supply, supply.last) if held_out is None else held_out
            return Run(points=points, findings=probing.findings(model, looked_at, placed_loss))

    def _keeper(self, name: str) -> Keeper | None:
        return None if self.keep is None else Keeper(self.keep / f"{name}.safetensors", seconds=self.keep_seconds)

    @property
    def _parameters(self) -> torch.dtype:
        return torch.float32 if self.dtype is torch.bfloat16 else self.dtype

    def _on_device(self, loss_of: Loss) -> Loss:
        """The loss of a batch that may be anywhere."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, self._parameters if tensor.is_floating_point() else None)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            kind = torch.device(self.device).type
            with torch.autocast(kind, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
                return loss_of(model, tuple(moved(tensor) for tensor in batch))

        return loss


def _line(point: Point) -> str:
    """A step as a line of JSON; a number that is not finite is null."""
    numbers = {
        "step": point.step,
        "loss": point.loss,
        "learning_rate": point.learning_rate,
        "gradient_norm": point.gradient_norm,
    }
    return json.dumps({name: finite(value) for name, value in numbers.items()}) + "\n"


class _Supply:
    """Batches, of which the last one drawn is remembered."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.last: Batch = ()
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.last = next(self._batches)
        return self.last
