"""Models that transformers builds from a configuration and weights; and whether all of the weights find a place.

Norms that no class of transformers has are recorded in config.json under the key "normkit": {"schema_version": 1,
"norms": {path: spec}}. To open such a checkpoint, build the stock class, load its weights, and replace each named norm
by `normkit.Norm`. The record can ask for nothing else, and whatever does not fit is an error.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit.checkpoint.model_folder import CONFIG, weight_files
from normkit.checkpoint.opening import body_class, check_reads_text, model_class, read_config
from normkit.errors import ModelError, SpecError
from normkit.spec import NormSpec
from normkit.text import clipped, typed_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normkit.checkpoint.reader import TensorInfo

KEY = "normkit"
SCHEMA_VERSION = 1

_PARAMETERS = ("weight", "bias")


class BuiltModel(NamedTuple):
    """A model that transformers built, and which weights did not fit; the lists are sorted."""

    model: Any
    """Holds the weights that fitted; missing ones were drawn at random."""
    asked: str
    """Name of the class in the configuration; the model has another class if the weights lack the head."""
    missing: list[str]
    """Names of weights that the checkpoint lacks."""
    unexpected: list[str]
    """Names of weights that the class does not use."""
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    """(name, shape in the checkpoint, shape in the class) of each weight where these differ."""
    head: str = ""
    """Path of the output embedding, if it is not tied and the checkpoint, of a model with a head, lacks its weights."""


def build_model(
    values: dict[str, Any],
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    view: Path | None = None,
    text_only: bool = False,
    or_body: bool = True,
    **options: Any,
) -> BuiltModel:
    """Have transformers build the model that a configuration names, and give it weights.

    Args:
        values: The result of `read_config`.
        weights: By name; on the meta device if device_map="meta" is among the options, or if there is a `view`.
        folder: Named in messages.
        view: A folder with nothing but the weights, which transformers then reads itself.
        text_only: Refuse a class that does not read text.
        or_body: Build the same model without its head if only weights of the head are missing.
        options: Further arguments of `from_pretrained`, such as dtype.

    Raises:
        ModelError: If transformers does not know the model, or cannot build it.
    """
    config, class_ = model_class(values, folder)
    if text_only:
        check_reads_text(class_)
    built = _built(class_, config, weights, folder, view, options)
    body, prefix = body_class(config) if or_body else None, built.model.base_model_prefix
    is_head_missing = built.missing and prefix and not any(name.startswith(f"{prefix}.") for name in built.missing)
    if is_head_missing and body not in (None, class_):
        return _built(body, config, weights, folder, view, options)._replace(asked=class_.__name__, head=built.head)
    return built


def _built(
    class_: Any, config: Any, weights: Mapping[str, Tensor], folder: Path, view: Path | None, options: dict[str, Any]
) -> BuiltModel:
    import torch

    try:
        # Missing weights are drawn at random: from a fixed seed, and without touching the caller's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, report = class_.from_pretrained(
                None if view is None else str(view),
                config=config,
                **({"state_dict": dict(weights)} if view is None else {}),
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # a configuration can fail in as many ways as there are models
        raise ModelError(f"transformers cannot build {class_.__name__} from {folder}: {typed_line(error)}") from error
    # transformers counts no tied weight as missing. The file of a body names no weight with the prefix.
    missing, prefix = set(report["missing_keys"]), f"{model.base_model_prefix}."
    output = model.get_output_embeddings() if any(name.startswith(prefix) for name in weights) else None
    heads = (path for path, module in model.named_modules() if module is output and f"{path}.weight" in missing)
    return BuiltModel(
        model=model.eval(),
        asked=class_.__name__,
        missing=sorted(missing),
        unexpected=sorted(report["unexpected_keys"]),
        mismatched=sorted(_mismatch(found, weights, model) for found in report["mismatched_keys"]),
        head=next(heads, ""),
    )


def _mismatch(
    found: str | tuple[str, Any, Any], weights: Mapping[str, Tensor], model: Any
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """A weight with its two shapes. transformers 4 gives only the model's name of it, maybe with another prefix."""
    if isinstance(found, str):
        given = next(
            held for name, held in weights.items() if f".{name}".endswith(f".{found}") or found.endswith(f".{name}")
        )
        return found, tuple(given.shape), tuple(model.state_dict()[found].shape)
    name, given, asked = found
    return name, tuple(given), tuple(asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reload:
    """The report of transformers on loading a folder."""

    class_name: str
    """The class that the configuration names."""
    missing: tuple[str, ...] = ()
    """Names of weights that the folder lacks."""
    unexpected: tuple[str, ...] = ()
    """Names of weights that the class does not use."""
    mismatched: tuple[str, ...] = ()
    """Names of weights of another shape."""
    ran: bool = True
    """Whether it was tried."""
    reason: str = ""
    """Why it was not tried."""


def reload_check(folder: Path) -> Reload:
    """Return the report of transformers on a folder with a configuration and safetensors.

    Raises:
        ModelError: If transformers cannot build the model, or its record of replaced norms does not fit it; one line.
    """
    from normkit.checkpoint.reader import read_header

    tensors = {name: held for file in weight_files(folder) for name, held in read_header(file).items()}
    return reload_of(read_config(folder), tensors, folder)


def reload_of(values: Mapping[str, Any], tensors: Mapping[str, TensorInfo], folder: Path) -> Reload:
    """Have transformers load a checkpoint on the meta device, and replace the norms that it records as replaced.

    No weight is read and none is allocated, however large; nothing has to be written yet.

    Raises:
        ModelError: If transformers cannot build the model, or its record of replaced norms does not fit it; one line.
    """
    name = values["architectures"][0]
    if find_spec("accelerate") is None:
        return Reload(class_name=name, ran=False, reason="accelerate is not installed")
    import torch

    from normkit.checkpoint.reader import TORCH

    norms = recorded(values, folder / CONFIG)
    if unknown := next((tensor for tensor, held in tensors.items() if held.dtype not in TORCH), None):
        reason = f"{unknown} is {tensors[unknown].dtype}, which torch does not have"
        return Reload(class_name=name, ran=False, reason=reason)
    empty = {
        tensor: torch.empty(held.shape, dtype=TORCH[held.dtype], device="meta") for tensor, held in tensors.items()
    }
    with quiet_libraries():
        built = build_model(dict(values), empty, folder, or_body=False, device_map="meta")
    replay(built.model, norms, folder / CONFIG)
    return Reload(
        class_name=built.asked,
        missing=tuple(built.missing),
        unexpected=tuple(built.unexpected),
        mismatched=tuple(mismatched[0] for mismatched in built.mismatched),
    )


@contextmanager
def quiet_libraries(*, downloads: bool = False) -> Iterator[None]:
    """Keep the messages of transformers, huggingface_hub and accelerate off the terminal.

    Args:
        downloads: Leave the Hub's download bars on.
    """
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as model_logging

    level, hub_level = model_logging.get_verbosity(), hub_logging.get_verbosity()
    bars, hub_bars = model_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    offloader = logging.getLogger("accelerate")
    offloader_level = offloader.level
    offloader.setLevel(logging.CRITICAL)
    model_logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    model_logging.disable_progress_bar()  # the Hub's bars with it
    if downloads and hub_bars:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        offloader.setLevel(offloader_level)
        model_logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            model_logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()


def record(norms: Mapping[str, NormSpec]) -> dict[str, Any]:
    """The value of `KEY` in a configuration, for specs by the paths of their norms."""
    return {"schema_version": SCHEMA_VERSION, "norms": {path: spec.to_json() for path, spec in norms.items()}}


def recorded(values: Mapping[str, Any], place: object) -> dict[str, NormSpec]:
    """The specs that a configuration records, by the paths of their norms; none if there is no record.

    Raises:
        ModelError: If there is a record and it is malformed.
    """
    if KEY not in values:
        return {}
    found = values[KEY]
    if not isinstance(found, dict) or not isinstance(found.get("norms"), dict):
        raise ModelError(f"expected the norms that were replaced under {KEY!r} in {place}, found none; fold it again")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise ModelError(
            f"expected schema_version {SCHEMA_VERSION} under {KEY!r} in {place}, found "
            f"{_shown(found.get('schema_version'))}; open it with the version of normkit that wrote it"
        )
    if unknown := sorted(set(found) - {"schema_version", "norms"}):
        raise ModelError(f"expected only norms under {KEY!r} in {place}, found {_shown(unknown[0])} too; fold it again")
    return {path: _spec(path, spec, place) for path, spec in found["norms"].items()}


def replay(model: nn.Module, norms: Mapping[str, NormSpec], place: object) -> None:
    """Replace each named norm by a `normkit.Norm` with the same parameters; all are checked before the first.

    The model is changed in place and may be on the meta device.

    Raises:
        ModelError: If a path leads to no norm, or a spec does not fit the parameters there.
    """
    modules = dict(model.named_modules())
    made = {}
    for named, spec in norms.items():
        # In the oldest checkpoints of a class with a head, names lack the prefix of its body.
        path = named if named in modules else f"{getattr(model, 'base_model_prefix', '')}.{named}"
        if path not in modules:
            raise ModelError(
                f"expected {_shown(named)}, named under {KEY!r} in {place}, in {type(model).__name__}; it has no such "
                "module: the record belongs to another model"
            )
        made[path] = _made(path, modules[path], spec, place)
    for path, norm in made.items():
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, norm)


def _spec(path: str, values: Any, place: object) -> NormSpec:
    reason = f"found {_shown(values)}"
    if isinstance(values, dict):
        try:
            return NormSpec.from_json(values)
        except SpecError as error:
            reason = clipped(str(error), 160)
        except OverflowError:
            reason = "found a number that no float can hold"
    raise ModelError(f"expected the spec of {_shown(path)} under {KEY!r} in {place}, {reason}; fold it again")


def _made(path: str, module: nn.Module, spec: NormSpec, place: object) -> nn.Module:
    """The norm that replaces a module."""
    from normkit.layers import Norm

    where = f"{_shown(path)}, named under {KEY!r} in {place},"
    shape = _shape(module)
    if shape is None:
        raise ModelError(
            f"expected a norm at {where} found {type(module).__name__}; the record belongs to another model"
        )
    found = {name for name in _PARAMETERS if getattr(module, name, None) is not None}
    wanted = {name for name, has in zip(_PARAMETERS, (spec.has_weight, spec.has_bias), strict=True) if has}
    if found != wanted:
        raise ModelError(
            f"expected {_listed(wanted)} in {where} found {_listed(found)}; spec and weights belong to different models"
        )
    if len(shape) != spec.rows.parameter_dim or shape[-1] % spec.rows.groups:
        raise ModelError(
            f"expected {where} to fit its spec, its shape {shape} does not: {clipped(str(spec), 160)}; fold it again"
        )
    norm = Norm(spec, shape, device="meta")
    for name in found:
        norm.register_parameter(name, getattr(module, name))
    return norm.train(module.training)


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of a norm's parameters; None for a module that is not a norm of rows."""
    has_more = next(module.children(), None) is not None or next(module.buffers(), None) is not None
    if has_more or "norm" not in type(module).__name__.lower():
        return None
    parameters = dict(module.named_parameters())
    if not set(parameters) <= set(_PARAMETERS):
        return None
    # The shape of a norm without parameters is known only if it has this attribute.
    shapes = {tuple(parameter.shape) for parameter in parameters.values()} or {
        tuple(getattr(module, "normalized_shape", ()))
    }
    shape = shapes.pop()
    return shape if shape and not shapes else None


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names, reverse=True)) or "no parameters"


def _shown(value: object) -> str:
    """Any value from a file, short and on one line."""
    return clipped(ascii(value), 160)
