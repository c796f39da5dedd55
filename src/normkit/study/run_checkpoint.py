"""A training run on disk, so that a run that was killed at any time continues to the same bits.

One safetensors file: parameters, buffers, the optimizer's state by parameter, torch's random state; and, as JSON in
its header, the recipe and the points so far. It is replaced whole or not at all. The random states of Python and NumPy
are not saved: batches draw from a generator of their own.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.files import write_bytes
from normkit.study.ranks import Ranks
from normkit.study.training_run import Batch, Point, Recipe

_FORMAT = "normkit run 1"
_MODEL, _OPTIMIZER, _RANDOM = "model.", "optimizer.", "random."


class RunCheckpoint:
    """Saves one run in one file.

    Args:
        path: The file. The first of several processes that share a run reads and writes it; the others need not see it.
        seconds: The time between two saves.
    """

    def __init__(self, path: Path, *, seconds: float = 20.0) -> None:
        self.path = path
        self._seconds = seconds
        self._last, self._start = time.monotonic(), ""

    @property
    def is_due(self) -> bool:
        """Whether the run is to be saved after the present step."""
        return time.monotonic() - self._last >= self._seconds

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, points: Sequence[Point], batch: Batch
    ) -> None:
        """Write the run as it is after its last point, whose batch identifies the run's batches later.

        Raises:
            InputError: If the file cannot be written.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # The optimizer's tensors are named by their parameter and their own key.
        state = _model_state(model) | {
            f"{_OPTIMIZER}{names[id(parameter)]}.{key}": value
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        tensors[f"{_RANDOM}cpu"] = torch.get_rng_state()
        device = next(model.parameters()).device
        if device.type == "cuda":
            tensors[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state(device)
        document = {
            "format": _FORMAT,
            "recipe": asdict(recipe),
            "points": [vars(point) for point in points],
            "start": self._start,
            "batch": _digest("", batch),
        }
        text = json.dumps(document)
        write_bytes(self.path, safetensors.torch.save(tensors, {"normkit": text, "sha256": _digest(text, tensors)}))
        self._last = time.monotonic()

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        batches: Iterator[Batch],
        ranks: Ranks,
    ) -> tuple[Point, ...]:
        """Set a run back to its last checkpoint, and skip the batches it has used; no points if there is no checkpoint.

        Raises:
            InputError: If the file is damaged, belongs to another run, or cannot be read.
        """
        self._start = _digest("", _model_state(model))
        content = None
        if ranks.writes:
            try:
                content = self.path.read_bytes()
            except FileNotFoundError:
                pass
            except OSError as error:
                raise self._refusal(f"it cannot be read ({error.strerror})") from None
        content = ranks.shared(content)
        if content is None:
            return ()
        document, tensors = self._parsed(content)
        self._check_fits(document, tensors, model, recipe)
        points = tuple(Point(**point) for point in document["points"])
        used = None
        for _ in points:
            used = next(batches, None)
        if used is None or _digest("", used) != document["batch"]:
            raise self._refusal("its batches are not those of this run")
        if document["start"] != self._start:
            raise self._refusal("it began from other weights")
        _restore(model, optimizer, tensors)
        return points

    def _parsed(self, content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
        try:
            # safetensors does not return the metadata of a file in memory; its header holds it as JSON.
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            text, digest = header["__metadata__"]["normkit"], header["__metadata__"]["sha256"]
            tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(content).items()}
        except (SafetensorError, ValueError, KeyError, TypeError):
            raise self._refusal("it is damaged, or another program's") from None
        if digest != _digest(text, tensors):
            raise self._refusal("it is damaged")
        document: dict[str, Any] = json.loads(text)
        return document, tensors

    def _check_fits(
        self, document: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module, recipe: Recipe
    ) -> None:
        if document["format"] != _FORMAT:
            raise self._refusal(f"its format is {document['format']!r}, and this normkit reads {_FORMAT!r}")
        for choice, value in asdict(recipe).items():
            kept = document["recipe"].get(choice)
            if kept != value:
                raise self._refusal(f"it is of another run, with {choice} {kept!r} where this one has {value!r}")
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in _model_state(model).items()}
        found = {name: (each.shape, each.dtype) for name, each in tensors.items() if name.startswith(_MODEL)}
        if expected != found:
            differing = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            raise self._refusal(f"it is of another model, with another {differing[0].removeprefix(_MODEL)}")

    def _refusal(self, why: str) -> InputError:
        return InputError(f"cannot continue the run kept in {self.path}: {why}; delete the file to begin that run anew")


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once even if several modules share it."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {f"{_MODEL}{name}": tensor for name, tensor in named}


@torch.no_grad()
def _restore(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in _model_state(model).items():
        tensor.copy_(tensors[name])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    document = optimizer.state_dict()
    ordered = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(ordered):
        prefix = f"{_OPTIMIZER}{names[id(parameter)]}."
        # A dot after the prefix: the tensor belongs to a parameter whose name begins with this one's.
        own = {
            name.removeprefix(prefix): each
            for name, each in tensors.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
        }
        if own:
            document["state"][index] = own
    optimizer.load_state_dict(document)
    torch.set_rng_state(tensors[f"{_RANDOM}cpu"])
    if f"{_RANDOM}cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"{_RANDOM}cuda"], next(model.parameters()).device)


def _digest(text: str, tensors: Mapping[str, Tensor] | Batch) -> str:
    """A hash of a text and of tensors with their names, or their places in a batch, dtypes and shapes."""
    named = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(named):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
