"""The context in which an arm is measured: settings, seed, device, and the building and training of its models."""

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
from normkit.study.corpus import next_token_loss, text_of_the_library, windows
from normkit.study.ranks import ALONE, Ranks
from normkit.study.run_checkpoint import RunCheckpoint
from normkit.study.training_run import Batch, Loss, Observe, Recipe, TrainingRun, train
from normkit.study.transformer import Transformer, TransformerConfig
from normkit.text import dtype_name

DTYPES = (torch.float32, torch.float64, torch.bfloat16)

Setting = bool | int | float | str | tuple[int, ...] | tuple[float, ...]
"""A choice that `--set` can change; the type of its default is its type."""

Settings = Mapping[str, Any]
"""Name -> value of each, a `Setting`."""

# Tokens that `inspect` reads of a small model; each further one costs time.
_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class ArmContext:
    """Passed to `Study.measure` with each arm.

    Raises:
        InputError: If the dtype is not one of `DTYPES`.
    """

    settings: Settings
    seed: int
    """The seed of initial weights and batches; the same for all arms that are compared."""
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
            names = ", ".join(map(dtype_name, DTYPES))
            raise InputError(f"expected a dtype of {names}, got {dtype_name(self.dtype)}")

    def __getitem__(self, setting: str) -> Any:
        return self.settings[setting]

    def recipe(self, **choices: Any) -> Recipe:
        """The choices, and the settings "steps", "learning_rate" and "warmup" for those that are not given."""
        named = ("steps", "learning_rate", "warmup")
        return Recipe(**{name: self.settings[name] for name in named if name in self.settings} | choices)

    def transformer(self, **choices: Any) -> Transformer:
        """An untrained model; settings "window", "width" and "layers" are its sizes unless the choices give them."""
        sizes = {"context": "window", "width": "width", "layers": "layers"}
        choices = {name: self[setting] for name, setting in sizes.items() if name not in choices} | choices
        return Transformer(TransformerConfig(**choices), seed=self.seed)

    def text_ids(
        self, text: bytes | None = None, *, batch: int | None = None, window: int | None = None, seed: int = 0
    ) -> Tensor:
        """Token ids (batch, window + 1) of a text, on the device.

        Args:
            text: The held-out text of the standard library if None.
            batch: The setting "batch" if None.
            window: The setting "window" if None.
            seed: Of the places of the windows.
        """
        text = text_of_the_library()[1] if text is None else text
        (ids,) = next(windows(text, batch=batch or self["batch"], window=window or self["window"], seed=seed))
        return ids.to(self.device)

    def random_ids(self, vocabulary: int, *, rows: int, tokens: int) -> tuple[Tensor, torch.Generator]:
        """Token ids (rows, tokens + 1) of equal probability, and the generator that drew them."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(vocabulary, (rows, tokens + 1), generator=generator)
        return ids.to(self.device), generator

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
        wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
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
            wrap: From the recipe's optimizer to the one that steps.

        Raises:
            InputError: If the checkpoint cannot be continued, another run with a checkpoint has this name, the batches
                end before the steps, or the number of ranks does not divide a batch.
            LostRankError: If another process of the run has ended.
        """
        if self.checkpoints is not None and name in self._names:
            raise InputError(f"two training runs of an arm are kept as {name!r}; give each a name of its own")
        self._names.add(name)
        self.move(model)
        last: Batch = ()

        def drawn() -> Iterator[Batch]:
            nonlocal last
            for batch in batches:
                last = batch
                yield batch

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            real = self._parameter_dtype
            moved = tuple(part.to(self.device, real if part.is_floating_point() else None) for part in batch)
            is_half = self.dtype is torch.bfloat16
            with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=is_half):
                return loss_of(model, moved)

        supply, checkpoint = drawn(), None
        if self.checkpoints is not None:
            checkpoint = RunCheckpoint(self.checkpoints / f"{name}.safetensors", seconds=self.checkpoint_seconds)
        with self.ranks.together():
            points = train(
                model,
                recipe,
                supply,
                loss,
                observe=observe,
                report=lambda point: self.report(point.step / recipe.steps),
                checkpoint=checkpoint,
                ranks=self.ranks,
                wrap=wrap,
            )
            if self.curves is not None:
                shown = ("step", "loss", "learning_rate", "gradient_norm")
                lines = ({name: finite(getattr(point, name)) for name in shown} for point in points)
                write_text(self.curves / f"{name}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
            return TrainingRun(points=points, findings=findings(model, next(supply, last), loss))

    def train_on_text(
        self,
        model: Transformer,
        recipe: Recipe,
        *,
        batch: int | None = None,
        text: bytes | None = None,
        observe: Observe | None = None,
    ) -> TrainingRun:
        """Train a model on windows of text as long as its context; the seed decides their places.

        Args:
            model: What to train.
            recipe: The choices.
            batch: Windows in a batch; the setting "batch" if None.
            text: What to train on; the training text of the standard library if None.
            observe: Values to record at each step.
        """
        batches = windows(
            text_of_the_library()[0] if text is None else text,
            batch=self["batch"] if batch is None else batch,
            window=model.config.context,
            seed=self.seed,
        )
        return self.train(model, recipe, batches, next_token_loss, observe=observe)

    @property
    def _parameter_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype is torch.bfloat16 else self.dtype


def findings(model: nn.Module, batch: Batch, loss_of: Loss) -> tuple[dict[str, Any], ...]:
    """Inspect a model on the arguments with which the loss of the first rows of a batch calls it.

    Args:
        model: A trained one; left as it is.
        batch: Preferably not trained on.
        loss_of: The loss; its first call of the model is inspected.

    Returns:
        For each finding, in the order of `inspect`: "rule", "severity", "title", "sites", as JSON has them.
    """
    first = batch[0]
    # A row of token ids (batch, time) or of vectors (batch, time, n) has many tokens; a vector (batch, n) is one.
    has_time = first.dim() > 2 or (first.dim() == 2 and not first.is_floating_point())
    rows = max(1, _TOKENS // (first.shape[1] if has_time else 1))
    calls: list[dict[str, Tensor]] = []
    signature = signatures.signature(model.forward)

    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))

    with model.register_forward_pre_hook(record, with_kwargs=True), evaluating(model), torch.no_grad():
        loss_of(model, tuple(tensor[:rows] for tensor in batch))
    return tuple(
        {"rule": found.rule, "severity": found.severity, "title": found.title, "sites": list(found.sites)}
        for found in inspect(model, calls[0]).findings
    )
