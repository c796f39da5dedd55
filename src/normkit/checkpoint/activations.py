"""The size of each channel where the readers of a norm take it, on a text: what `migrate` makes scales of."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.checkpoint.migration import LARGEST, MEAN
from normkit.checkpoint.opening import open_model
from normkit.checkpoint.reader import TensorInfo, header_bytes
from normkit.errors import InputError
from normkit.files import write_bytes
from normkit.models.graph import Graph
from normkit.text import own_version


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationStatistics:
    """Statistics of what leaves each norm that linear maps read, channel by channel."""

    largest: Mapping[str, Tensor]
    """Path of a norm -> max |x| of each channel over all rows, float32, of shape (n,)."""
    mean: Mapping[str, Tensor]
    """Path of a norm -> mean |x| of each channel, summed in float64, float32."""
    rows: int
    """Rows that the first of the norms gave: tokens, for a model of text."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Other entries of the file, such as the model and the text."""

    def save(self, path: Path | str) -> Path:
        """Write a safetensors file: NORM.max and NORM.mean of each norm, and the metadata.

        Raises:
            InputError: If it cannot be written.
        """
        tensors = {f"{name}{LARGEST}": value for name, value in self.largest.items()}
        tensors |= {f"{name}{MEAN}": value for name, value in self.mean.items()}
        told = {"format": "normkit activations 1", "normkit": own_version(), "rows": str(self.rows), **self.metadata}
        # The package safetensors writes metadata in an order of its own, another one each time.
        header = header_bytes({name: TensorInfo("F32", tuple(value.shape)) for name, value in tensors.items()}, told)
        content = b"".join(value.numpy().astype("<f4").tobytes() for value in tensors.values())
        return write_bytes(Path(path).expanduser(), header + content)


class ActivationMeter:
    """A context in which a model is run, and what enters the linear maps that read its norms is measured.

    Args:
        model: Of a declared family of transformers.
        graph: Of its checkpoint; None: it is read from the model.

    Raises:
        KindError: If it is not a model of transformers.
        ModelError: If its family is not declared.
        InputError: If no norm has readers; from the run, if one gives NaN or infinity.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> import normkit as nk
        >>> from normkit import demo
        >>> model = AutoModelForCausalLM.from_pretrained(demo.directory("rmsnorm"))
        >>> meter = ActivationMeter(model)
        >>> _ = nk.inspect(model, {"input_ids": torch.arange(32).view(1, 32)}, during=meter)
        >>> meter.statistics().rows
        32
    """

    def __init__(self, model: nn.Module, graph: Graph | None = None) -> None:
        graph = graph or open_model(model).graph
        self._model = model
        self._norms = {norm.module: norm.name for norm in graph.norms if graph.readers(norm.gives)}
        if not self._norms:
            raise InputError(f"no linear map reads a norm of {graph.architecture}, so that nothing can be measured")
        self._largest: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []
        self._thread = 0

    def __enter__(self) -> Self:
        """Begin to measure."""
        # `inspect` runs models whose weights lie in files in several threads.
        self._thread = threading.get_ident()
        for path, name in self._norms.items():
            see = self._model.get_submodule(path).register_forward_hook(
                lambda _module, _given, output, name=name: self._see(name, output)
            )
            self._handles.append(see)
        return self

    def __exit__(self, *_exception: object) -> None:
        """Leave the model as it was."""
        while self._handles:
            self._handles.pop().remove()

    def statistics(self, metadata: Mapping[str, str] = MappingProxyType({})) -> ActivationStatistics:
        """The statistics so far; the metadata is for the file, such as the names of the model and of the text.

        Raises:
            InputError: If no norm was called.
        """
        if not self._rows:
            raise InputError("expected at least one batch that reaches a norm, got none")
        # A norm that no batch reached, as an expert's or a second encoder's, has no statistics.
        named = [name for name in self._norms.values() if name in self._rows]
        return ActivationStatistics(
            largest={name: self._largest[name] for name in named},
            mean={name: (self._totals[name] / self._rows[name]).to(torch.float32) for name in named},
            rows=self._rows[named[0]],
            metadata=metadata,
        )

    def _see(self, name: str, output: Tensor) -> None:
        if threading.get_ident() != self._thread:
            return
        sizes = output.detach().abs().flatten(0, -2)
        most = sizes.amax(0).to("cpu", torch.float32)
        if not bool(most.isfinite().all()):
            raise InputError(f"{name} gives NaN or infinity in {output.dtype}; measure the model in float32")
        total = sizes.sum(0, dtype=torch.float64).cpu()
        self._largest[name] = torch.maximum(self._largest[name], most) if name in self._largest else most
        self._totals[name] = self._totals[name] + total if name in self._totals else total
        self._rows[name] = self._rows.get(name, 0) + len(sizes)


def measure_activations(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    graph: Graph | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> ActivationStatistics:
    """Run a model on batches and measure what enters the linear maps that read its norms, channel by channel.

    Args:
        model: Of a declared family of transformers.
        batches: Arguments of `model(**batch)`, without padding.
        graph: Of its checkpoint; None: it is read from the model.
        metadata: For the file, such as the names of the model and of the text.

    Raises:
        KindError: If it is not a model of transformers.
        ModelError: If its family is not declared.
        InputError: If there is no batch, no norm has readers, or one gives NaN or infinity.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from normkit import demo
        >>> model = AutoModelForCausalLM.from_pretrained(demo.directory("rmsnorm"))
        >>> found = measure_activations(model, [{"input_ids": torch.arange(32).view(1, 32)}])
        >>> found.rows, len(found.largest), found.largest["model.norm"].shape
        (32, 13, torch.Size([64]))
    """
    with torch.no_grad(), ActivationMeter(model, graph) as meter:
        for batch in batches:
            model(**batch)
    return meter.statistics(metadata)
