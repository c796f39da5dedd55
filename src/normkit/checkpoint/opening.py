"""An opened checkpoint: configuration, graph and tensors; and the configuration after a plan."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from normkit.checkpoint.configuration import paths_to, read_config
from normkit.checkpoint.model_folder import ADAPTER, CONFIG, INDEX, WEIGHTS, FileState, file_states
from normkit.checkpoint.plan import FoldPlan
from normkit.checkpoint.source import CheckpointSource, ModelSource, changed
from normkit.errors import KindError, ModelError
from normkit.models import catalogue
from normkit.models.expansion import expand
from normkit.models.graph import Graph


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """A checkpoint on disk. As a context manager it closes its files."""

    folder: Path
    config: Mapping[str, Any]
    """Its config.json."""
    graph: Graph
    """Its norms, readers and writers."""
    source: CheckpointSource
    """Its tensors."""
    states: Mapping[str, FileState]
    """The states of all files below the folder, by name, before the first of them was read."""

    def require_same(self, beside: Collection[str]) -> None:
        """Raise ModelError if the configuration, a file of weights or one of `beside` has changed, is gone, or is new.

        Args:
            beside: Names of the files, as they are now, that matter as well.
        """
        names = {CONFIG, INDEX, *(file.name for file in self.source.files), *beside}
        now = file_states(self.folder)
        for name in sorted(names):
            if now.get(name) != self.states.get(name):
                raise ModelError(changed(self.folder / name))

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.source.close()


def open_checkpoint(folder: Path) -> Opened:
    """Read headers and configuration of a model folder, and derive which tensors read and write what.

    Raises:
        ModelError: If it is not the folder of a model of a declared family, is quantised, pickled or damaged, or holds
            something that its family's file does not declare.
    """
    if not folder.is_dir():
        raise ModelError(f"expected the folder of a model, got {folder}; fetch it first, then give its folder")
    # A folder without a configuration may be anything, and large.
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
    """Raise ModelError if transformers would load something else than the folder's safetensors."""
    if (folder / ADAPTER).is_file():
        raise ModelError(
            f"{folder} holds an adapter ({ADAPTER}) beside a model, and transformers loads the adapter's base in its "
            f"place; merge it with peft, or remove {ADAPTER}"
        )
    for path in paths_to(config, "transformers_weights"):
        raise ModelError(
            f"{folder / CONFIG} has transformers load other weights ({path}), which are not folded; rename them to "
            f"{WEIGHTS} and remove the key"
        )


def open_model(model: nn.Module) -> tuple[Graph, dict[str, Any], ModelSource]:
    """The graph of a model in memory, its configuration, and its tensors.

    Raises:
        KindError: If it is not a model of transformers.
        ModelError: If its family is not declared, or it holds something that its family's file does not declare.
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


def folded_config(config: Mapping[str, Any], plan: FoldPlan) -> dict[str, Any]:
    """The configuration with the keys that a plan sets, and without those that it removes."""
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
