"""What is asked of a checkpoint, and what of it may be read to answer: its graph, its settings, its vectors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from normkit.checkpoint.plan import Operation
from normkit.checkpoint.source import FLOATS, Source, check_finite
from normkit.errors import ModelError
from normkit.models.conditions import Settings
from normkit.models.graph import Graph, Norm


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What is to be done to which checkpoint.

    Attributes:
        graph: Of the checkpoint.
        settings: Its config.json.
        source: Its tensors; only vectors are read.
        operations: What is asked for.
        untie: The head is given a table of its own.
    """

    graph: Graph
    settings: Settings
    source: Source
    operations: tuple[Operation, ...]
    untie: bool
    _read: dict[str, Tensor] = field(default_factory=dict)

    def vector(self, name: str) -> Tensor:
        """A gain or a bias, in float64; that of several heads as one vector.

        Raises:
            ModelError: If it holds NaN or infinity, or no floating-point numbers.
        """
        if name not in self._read:
            info = self.source.tensors[name]
            if info.dtype not in FLOATS:
                raise ModelError(f"expected {', '.join(FLOATS)} in {name}, got {info.dtype}; give an unquantised model")
            values = self.source.rows(name, 0, info.matrix[0]).flatten().to(torch.float64)
            check_finite(name, values)
            self._read[name] = values
        return self._read[name]

    def gain(self, norm: Norm) -> Tensor | None:
        """The gain of a norm as it acts, or None."""
        return None if norm.weight is None else self.vector(norm.weight) + norm.offset

    def bias(self, norm: Norm) -> Tensor | None:
        """The bias of a norm, or None."""
        return None if norm.bias is None else self.vector(norm.bias)
