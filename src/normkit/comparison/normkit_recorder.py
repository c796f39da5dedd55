"""A recorder of the rows that enter and leave each norm, for any runtime: numpy and safetensors are all it needs.

`normkit record --template` copies this file beside a model; `normkit identify FILE` says what the recorded rows show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
from safetensors.numpy import save_file


class Recorder:
    """The first rows of each norm; `array` makes a numpy array of a runtime's, where `numpy.asarray` does not."""

    def __init__(self, rows: int = 512, array: Callable[[Any], Any] = numpy.asarray) -> None:
        self.rows, self.array = rows, array
        self.tensors: dict[str, list[Any]] = {}
        self.order: dict[str, None] = {}

    def add(self, path: str, x: Any, y: Any, weight: Any = None, bias: Any = None, residual: Any = None) -> None:
        """Keep rows of one norm; call it wherever the norm is called, in the dtypes in which it computes."""
        self.order[path] = None
        for key, value in (("input", x), ("output", y), ("residual", residual)):
            if value is not None:
                self._keep(f"{path}.{key}", value)
        for key, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                self.tensors[f"{path}.{key}"] = [numpy.array(self.array(value))]

    def _keep(self, name: str, value: Any) -> None:
        kept = self.tensors.setdefault(name, [])
        missing = self.rows - sum(map(len, kept))
        if missing > 0:
            rows = self.array(value)
            kept.append(rows.reshape(-1, rows.shape[-1])[:missing].copy())

    def save(self, file: str, tokens: Any = None, outputs: Any = None, runtime: str = "") -> None:
        """Write the file; `tokens` are the ids that the model was given, `outputs` its logits for them."""
        if not self.tensors:
            raise ValueError("expected a call of Recorder.add before save; no norm was recorded")
        metadata = {"format": "normkit-recording", "version": "1", "runtime": runtime}
        metadata["order"] = json.dumps(list(self.order))
        if tokens is not None:
            metadata["tokens"] = json.dumps(numpy.asarray(tokens).tolist())
        if outputs is not None:
            self._keep("outputs", outputs)
        save_file({name: numpy.concatenate(parts) for name, parts in self.tensors.items()}, file, metadata=metadata)
