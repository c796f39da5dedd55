"""A checkpoint opened: its config.json read and checked, its class in transformers, its graph and its tensors."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from normkit.checkpoint.model_folder import ADAPTER, CONFIG, INDEX, WEIGHTS, FileState, changed, file_states, read_json
from normkit.checkpoint.plan import FoldPlan
from normkit.errors import KindError, ModelError
from normkit.models.expansion import expand
from normkit.models.family import declared_family, declared_types
from normkit.models.graph import Graph
from normkit.models.nearest import nearest_families
from normkit.text import quoted, typed_line

if TYPE_CHECKING:
    from torch import nn

    from normkit.checkpoint.reader import CheckpointSource, Source
    from normkit.identification.offloading import Stored

# Keys with which a configuration could make transformers fetch code, load other files or replace layers.
_REFUSED = {
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "fusion_config",
    "kernel_config",
    "transformers_weights",
}

_MOST_LAYERS = 10_000
"""The most layers, or experts of a layer, of a model that is built from its configuration."""


def read_config(folder: Path, *, infinity: bool = False) -> dict[str, Any]:
    """The configuration of a model folder, checked to name a model type and an architecture.

    Args:
        folder: The model's folder.
        infinity: Accept numbers that are not finite, which transformers 4 wrote for Mamba 2; they cannot be written
            as JSON again.

    Raises:
        ModelError: If there is no configuration, it is not JSON, lacks one of the two, or says that the weights are
            quantized.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(f"expected a model directory with a {CONFIG}, found none in {folder}; give a model's folder")
    config = read_json(path, infinity=infinity)
    architectures = config.get("architectures")
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelError(f'{path} names no model_type; add the one of the model\'s family, as in "model_type": "gpt2"')
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(f'{path} names no architecture; add the model\'s class, as in "architectures": ["GPT2Model"]')
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (quantized := part.get("quantization_config")):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else None
            how = "" if method is None else f" ({quoted(method)})"
            raise ModelError(
                f"{folder} is quantized{how}, and quantized weights are not read; give the model that it was made from"
            )
    return config


def _check_counts(values: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError if more layers or experts are announced than any model has: each would be built."""
    for key, value in values.items():
        if isinstance(value, dict):
            _check_counts(value, folder)
        elif type(value) is int and value > _MOST_LAYERS and key.endswith(("layer", "layers", "blocks", "experts")):
            raise ModelError(f"{folder / CONFIG} says {key} = {value}, expected at most {_MOST_LAYERS}; correct it")


def paths_to(config: Mapping[str, Any], key: str, above: str = "") -> list[str]:
    """Dotted paths of a key in nested configurations; a configuration under a key with a dot is not searched."""
    found = [above + key] if key in config else []
    for name, value in config.items():
        if isinstance(value, Mapping) and "." not in name:
            found += paths_to(value, key, f"{above}{name}.")
    return found


def model_class(values: dict[str, Any], folder: Path) -> tuple[Any, type[Any]]:
    """The configuration as transformers' object, and the class to build from it.

    Raises:
        ModelError: If transformers does not know the model.
    """
    import transformers

    _check_counts(values, folder)
    config = _configuration(values, folder)
    name = values["architectures"][0]
    found: Any = getattr(transformers, name, None)
    is_known = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_known:
        raise ModelError(
            f"{folder} needs the class {quoted(name)}, which transformers {transformers.__version__} does not "
            "have; code that comes with a model is never run: give a checkpoint of a stock class"
        )
    if not isinstance(config, found.config_class or ()):
        # The configuration of a larger model may contain that of the text model.
        config = config.get_text_config()
    if not isinstance(config, found.config_class or ()):
        raise ModelError(f"{folder / CONFIG} contradicts itself: {name} is no {values['model_type']} model; correct it")
    return config, found


def check_reads_text(class_: type[Any]) -> None:
    """Raise ModelError for a class of transformers that reads images or speech."""
    if class_.main_input_name != "input_ids":
        raise ModelError(
            f"this command runs models that read text, {class_.__name__} reads {class_.main_input_name}; give a "
            "language model or a text encoder, or use normkit inspect, which runs models of images and sound as well"
        )


def body_class(config: Any) -> type[Any] | None:
    """The class of the same family without a head; None if the family has several."""
    from transformers import MODEL_MAPPING

    found = MODEL_MAPPING.get(type(config), None)
    return found if isinstance(found, type) else None


def _configuration(values: dict[str, Any], folder: Path) -> Any:
    from transformers import CONFIG_MAPPING, __version__

    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        if values.get("auto_map"):
            raise ModelError(
                f"{folder} brings its own code for model type {quoted(kind)}, and code that comes with a model is "
                f"never run; give a model whose type transformers {__version__} knows"
            )
        close = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=1)
        advice = f"did you mean {close[0]!r}?" if close else "a newer transformers may"
        raise ModelError(
            f"transformers {__version__} knows no model type {quoted(kind)}, named in {folder / CONFIG}; {advice}"
        )
    if __version__.startswith("4."):
        values = _for_transformers_4(values, folder)
    try:
        return CONFIG_MAPPING[kind].from_dict(_numbers(_without_refused(values)))
    except Exception as error:  # each family checks its values in its own way
        raise ModelError(f"{folder / CONFIG} is no {kind} configuration: {typed_line(error)}") from error


def _for_transformers_4(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with the rope_parameters of transformers 5, which 4 ignores, under the names that 4 reads.

    Raises:
        ModelError: If there are several sets of them, for which 4 has no names.
    """
    if not (paths := paths_to(values, key := "rope_parameters")):
        return values
    rope = dict(values.get(key) or {})
    if paths != [key] or any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(
            f"{folder / CONFIG} was written by transformers 5, and transformers 4 does not read its {paths[0]}; "
            "install transformers>=5"
        )
    known = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {name: value for name, value in values.items() if name != key} | known | {"rope_scaling": scaling}


def _without_refused(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_refused(value) for key, value in values.items() if key not in _REFUSED}
    return values


def _numbers(value: Any) -> Any:
    """The value with numbers that JSON lacks: transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _numbers(member) for key, member in value.items()}
    return [_numbers(member) for member in value] if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """A checkpoint in memory or on disk."""

    config: Mapping[str, Any]
    """Its config.json."""
    source: Source
    """Its tensors."""

    @cached_property
    def graph(self) -> Graph:
        """Its norms, readers and writers; of the class without a head if no head is there and no name begins with it.

        Raises:
            ModelError: If its family is not declared, or it holds something that its family's file does not declare.
        """
        shapes = {name: info.shape for name, info in self.source.tensors.items()}
        kind = str(self.config.get("model_type", ""))
        if kind not in declared_types() and (near := nearest_families(shapes)):
            raise ModelError(
                f"expected a model of one of {len(declared_types())} declared families, got model_type {quoted(kind)}, "
                f"whose readers and writers are not known and never guessed; {near}"
            )
        family = declared_family(kind)
        try:
            return expand(family, self.config, shapes)
        except ModelError:
            # sentence-transformers saves the body of a model beside the name of the class that it was trained as.
            bodies = [name for name, returned in family.classes.items() if returned]
            if not bodies or not family.prefix or any(name.startswith(family.prefix) for name in shapes):
                raise
            with suppress(ModelError):
                return expand(family, {**self.config, "architectures": bodies[:1]}, shapes)
            raise


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedFolder(Opened):
    """A checkpoint on disk. As a context manager it closes its files."""

    folder: Path
    source: CheckpointSource
    states: Mapping[str, FileState]
    """The states of all files below the folder, by name, before the first of them was read."""

    def require_same(self, beside: Collection[str]) -> None:
        """Raise ModelError if the configuration, a file of weights or one of `beside` has changed, is gone, or is new.

        These are the names of the files, as they are now, that matter as well.
        """
        names = {CONFIG, INDEX, *(file.name for file in self.source.files), *beside}
        now = file_states(self.folder)
        for name in sorted(names):
            if now.get(name) != self.states.get(name):
                raise ModelError(changed(self.folder / name))

    def __enter__(self) -> OpenedFolder:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.source.close()


def refuse_gguf(path: Path) -> None:
    """Raise ModelError if a path that is to be folded is a GGUF file."""
    if path.suffix == ".gguf" and path.is_file():
        raise ModelError(
            f"expected the folder of a model, got the GGUF file {path}, which is written and not read; fold the "
            f"checkpoint that it was made from: normkit fold SRC DST.gguf --metadata {path}"
        )


def open_checkpoint(folder: Path) -> OpenedFolder:
    """Read headers and configuration of a model folder.

    Raises:
        ModelError: If it is not the folder of a model, or is quantized, pickled or damaged.
    """
    # The configuration of a model that only runs is read without torch.
    from normkit.checkpoint.reader import CheckpointSource

    refuse_gguf(folder)
    if not folder.is_dir():
        raise ModelError(f"expected the folder of a model, got {folder}; fetch it first, then give its folder")
    # A folder without a configuration may be anything, and large.
    states = file_states(folder) if (folder / CONFIG).is_file() else {}
    config = read_config(folder)
    # transformers would load something else than the folder's safetensors.
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
    return OpenedFolder(folder=folder, config=config, source=CheckpointSource(folder), states=states)


def open_model(model: nn.Module, stored: Mapping[str, Stored] = MappingProxyType({})) -> Opened:
    """Read a model in memory: its configuration and its tensors.

    `stored` are those of its parameters that have no values now, as `normkit.identification.offloading` finds them.

    Raises:
        KindError: If it is not a model of transformers.
        ModelError: If a tensor has no values, or a dtype that safetensors does not have.
    """
    from torch import nn

    from normkit.checkpoint.reader import ModelSource

    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "to_dict"):
        raise KindError(
            f"expected a model of transformers, got {type(model).__name__}: without its config, what reads and writes "
            "is not known; give the model itself"
        )
    values: dict[str, Any] = config.to_dict() | {"architectures": [type(model).__name__]}
    return Opened(config=values, source=ModelSource(model, stored))


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
