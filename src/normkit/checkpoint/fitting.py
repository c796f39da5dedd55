"""A model that transformers builds from a configuration, and what of some weights fits it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit.checkpoint.configuration import body_class, check_reads_text, model_class
from normkit.errors import ModelError
from normkit.text import typed_line

if TYPE_CHECKING:
    from torch import Tensor


class Fit(NamedTuple):
    """A model that transformers built, and what of the checkpoint did not fit it.

    Attributes:
        model: Holds what fitted; what is missing was drawn at random.
        asked: Name of the class that the configuration names; the model is of another where its head has no weights.
        missing: Names of weights that the checkpoint lacks, sorted.
        unexpected: Names of those that the class does not use, sorted.
        mismatched: (name, shape in the checkpoint, shape that the class asks for) of each that differs, sorted.
    """

    model: Any
    asked: str
    missing: list[str]
    unexpected: list[str]
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def fit(
    values: dict[str, Any],
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    text_only: bool = False,
    or_body: bool = True,
    **options: Any,
) -> Fit:
    """Have transformers build the model that a configuration names, and give it weights.

    Args:
        values: What `read_config` returned.
        weights: By name; on the meta device where device_map="meta" is among the options.
        folder: Named in messages.
        text_only: Refuse a class that does not read text.
        or_body: Take the same model without its head where all that is missing belongs to the head.
        options: Of `from_pretrained`, as dtype.

    Raises:
        ModelError: If transformers does not know the model, or cannot build it.
    """
    config, class_ = model_class(values, folder)
    if text_only:
        check_reads_text(class_)
    found = _loaded(class_, config, weights, folder, options)
    body = body_class(config) if or_body else None
    if found.missing and body not in (None, class_) and not any(_in_body(name, found.model) for name in found.missing):
        return _loaded(body, config, weights, folder, options)._replace(asked=class_.__name__)
    return found


def _loaded(class_: Any, config: Any, weights: Mapping[str, Tensor], folder: Path, options: dict[str, Any]) -> Fit:
    import torch

    try:
        # Weights that are missing are drawn at random: from a fixed seed, and without touching the caller's.
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
    return Fit(
        model=model.eval(),
        asked=class_.__name__,
        missing=sorted(report["missing_keys"]),
        unexpected=sorted(report["unexpected_keys"]),
        mismatched=sorted(_mismatch(found, weights, model) for found in report["mismatched_keys"]),
    )


def _mismatch(
    found: str | tuple[str, Any, Any], weights: Mapping[str, Tensor], model: Any
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """A weight with its two shapes; transformers 4 names it alone, as the model does, whose prefix weights may lack."""
    if isinstance(found, str):
        given = next(
            held for name, held in weights.items() if f".{name}".endswith(f".{found}") or found.endswith(f".{name}")
        )
        return found, tuple(given.shape), tuple(model.state_dict()[found].shape)
    name, given, asked = found
    return name, tuple(given), tuple(asked)


def _in_body(name: str, model: Any) -> bool:
    return name.startswith(f"{model.base_model_prefix}.") or not model.base_model_prefix
