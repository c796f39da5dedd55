"""A checkpoint ready to be planned on: configuration, graph, tensors; and what a plan makes of the configuration."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from normkit.checkpoint.configuration import CONFIG, paths_to, read_config
from normkit.checkpoint.fingerprints import FileState, file_states
from normkit.checkpoint.plan import Plan
from normkit.checkpoint.source import CheckpointSource, ModelSource, changed
from normkit.checkpoint.weights import ADAPTER, INDEX, WEIGHTS
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
        states: Of the files below the folder, by name, before the first of them was read.
    """

    folder: Path
    config: Mapping[str, Any]
    graph: Graph
    source: CheckpointSource
    states: Mapping[str, FileState]

    def require_same(self, beside: Collection[str]) -> None:
        """Refuse a folder whose files are not those that were opened.

        Args:
            beside: Names of the files that count beside configuration and weights, as they are now.

        Raises:
            ModelError: If one that counts has changed, is gone, or is new.
        """
        names = {CONFIG, INDEX, *(file.name for file in self.source.files), *beside}
        now = file_states(self.folder)
        for name in sorted(names):
            if now.get(name) != self.states.get(name):
                raise ModelError(changed(self.folder / name))

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
    # Without a configuration it may be any folder, and a large one.
    states = file_states(folder) if (folder / CONFIG).is_file() else {}
    config = read_config(folder)
    _require_plain(folder, config)
    family = catalogue.family(config["model_type"])
    source = CheckpointSource(folder)
    try:
        graph = expand(family, config, {name: info.shape for name, info in source.tensors.items()})
    except BaseException:
        source.close()
        raise
    return Opened(folder=folder, config=config, graph=graph, source=source, states=states)


def _require_plain(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder from which transformers would load something else than its safetensors."""
    if (folder / ADAPTER).is_file():
        raise ModelError(
            f"{folder} holds an adapter ({ADAPTER}) beside a model, and transformers loads the adapter's base in its "
            f"place; merge it with peft, or take {ADAPTER} away"
        )
    for path in paths_to(config, "transformers_weights"):
        raise ModelError(
            f"{folder / CONFIG} has transformers load other weights ({path}), which are not folded; give them the "
            f"name {WEIGHTS} and take the key away"
        )


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
