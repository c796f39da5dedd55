"""Models that transformers builds from a configuration and weights; and whether all of the weights find a place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit.checkpoint import swaps
from normkit.checkpoint.configuration import body_class, check_reads_text, model_class, read_config
from normkit.checkpoint.header import TensorInfo, read_header
from normkit.checkpoint.model_folder import CONFIG, weight_files
from normkit.checkpoint.quiet_libraries import quiet_libraries
from normkit.errors import ModelError
from normkit.text import typed_line

if TYPE_CHECKING:
    from torch import Tensor


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


def build_model(
    values: dict[str, Any],
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    text_only: bool = False,
    or_body: bool = True,
    **options: Any,
) -> BuiltModel:
    """Have transformers build the model that a configuration names, and give it weights.

    Args:
        values: The result of `read_config`.
        weights: By name; on the meta device if device_map="meta" is among the options.
        folder: Named in messages.
        text_only: Refuse a class that does not read text.
        or_body: Build the same model without its head if only weights of the head are missing.
        options: Further arguments of `from_pretrained`, such as dtype.

    Raises:
        ModelError: If transformers does not know the model, or cannot build it.
    """
    config, class_ = model_class(values, folder)
    if text_only:
        check_reads_text(class_)
    built = _built(class_, config, weights, folder, options)
    body, prefix = body_class(config) if or_body else None, built.model.base_model_prefix
    is_head_missing = built.missing and prefix and not any(name.startswith(f"{prefix}.") for name in built.missing)
    if is_head_missing and body not in (None, class_):
        return _built(body, config, weights, folder, options)._replace(asked=class_.__name__)
    return built


def _built(
    class_: Any, config: Any, weights: Mapping[str, Tensor], folder: Path, options: dict[str, Any]
) -> BuiltModel:
    import torch

    try:
        # Missing weights are drawn at random: from a fixed seed, and without touching the caller's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, report = class_.from_pretrained(
                None,
                config=config,
                state_dict=dict(weights),
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # a configuration can fail in as many ways as there are models
        raise ModelError(f"transformers cannot build {class_.__name__} from {folder}: {typed_line(error)}") from error
    return BuiltModel(
        model=model.eval(),
        asked=class_.__name__,
        missing=sorted(report["missing_keys"]),
        unexpected=sorted(report["unexpected_keys"]),
        mismatched=sorted(_mismatch(found, weights, model) for found in report["mismatched_keys"]),
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
    tensors = {name: held for file in weight_files(folder) for name, held in read_header(file).items()}
    return reload_of(read_config(folder), tensors, folder)


def reload_of(values: Mapping[str, Any], tensors: Mapping[str, TensorInfo], folder: Path) -> Reload:
    """Have transformers load a checkpoint on the meta device, and replace the norms that it records as replaced.

    No weight is read and none is allocated, however large; nothing has to be written yet.

    Args:
        values: Its configuration.
        tensors: Name -> dtype and shape of its weights.
        folder: Named in messages.

    Raises:
        ModelError: If transformers cannot build the model, or its record of replaced norms does not fit it; one line.
    """
    name = values["architectures"][0]
    if find_spec("accelerate") is None:
        return Reload(class_name=name, ran=False, reason="accelerate is not installed")
    import torch

    from normkit.checkpoint.source import TORCH

    norms = swaps.recorded(values, folder / CONFIG)
    if unknown := next((tensor for tensor, held in tensors.items() if held.dtype not in TORCH), None):
        reason = f"{unknown} is {tensors[unknown].dtype}, which torch does not have"
        return Reload(class_name=name, ran=False, reason=reason)
    empty = {
        tensor: torch.empty(held.shape, dtype=TORCH[held.dtype], device="meta") for tensor, held in tensors.items()
    }
    with quiet_libraries():
        built = build_model(dict(values), empty, folder, or_body=False, device_map="meta")
    swaps.replay(built.model, norms, folder / CONFIG)
    return Reload(
        class_name=built.asked,
        missing=tuple(built.missing),
        unexpected=tuple(built.unexpected),
        mismatched=tuple(mismatched[0] for mismatched in built.mismatched),
    )
