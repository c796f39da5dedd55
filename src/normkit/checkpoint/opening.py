"""A checkpoint ready to be planned on: configuration, graph, tensors; and what a plan makes of the configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from normkit.checkpoint.configuration import read_config
from normkit.checkpoint.plan import Plan
from normkit.checkpoint.source import CheckpointSource, ModelSource
from normkit.errors import KindError, ModelError
from normkit.models import catalogue
from normkit.models.expansion import expand
from normkit.models.graph import Graph


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """A checkpoint on disk. Closes its files as a context manager.

    Attributes:
        folder: Where it lies.
        config: Its config.json.
        graph: Its norms, readers and writers.
        source: Its tensors.
    """

    folder: Path
    config: Mapping[str, Any]
    graph: Graph
    source: CheckpointSource

    def __enter__(self) -> Opened:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self.source.close()


def open_checkpoint(folder: Path) -> Opened:
    """Read headers and configuration of a model folder, and find out what reads and writes what.

    Raises:
        ModelError: If it is no folder of a declared family, quantised, pickled, damaged, or holds something else than
            its family's file declares.
    """
    if not folder.is_dir():
        raise ModelError(f"expected the folder of a model, got {folder}; fetch it first, then give its folder")
    config = read_config(folder)
    family = catalogue.family(config["model_type"])
    source = CheckpointSource(folder)
    try:
        graph = expand(family, config, {name: info.shape for name, info in source.tensors.items()})
    except BaseException:
        source.close()
        raise
    return Opened(folder=folder, config=config, graph=graph, source=source)


def open_model(model: nn.Module) -> tuple[Graph, dict[str, Any], ModelSource]:
    """The graph of a model in memory, its configuration, and its tensors.

    Raises:
        KindError: If it is no model of transformers.
        ModelError: If its family is not declared, or it holds something else than its family's file declares.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "to_dict"):
        raise KindError(
            f"expected a model of transformers, got {type(model).__name__}: without its config, what reads and writes "
            "is not known; give the model itself"
        )
    values: dict[str, Any] = config.to_dict() | {"architectures": [type(model).__name__]}
    source = ModelSource(model)
    shapes = {name: info.shape for name, info in source.tensors.items()}
    return expand(catalogue.family(str(values.get("model_type", ""))), values, shapes), values, source


def folded_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The configuration with the keys of a plan set, and those dropped that it drops."""
    changed = copy.deepcopy(dict(config))
    for path, value in plan.config.items():
        *above, key = path.split(".")
        values = changed
        for name in above:
            values = values[name]
        values[key] = value
    for key in plan.dropped:
        changed.pop(key, None)
    return changed
