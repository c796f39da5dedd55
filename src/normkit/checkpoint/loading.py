"""From a folder or a Hub id to a model in memory; every verb loads models here.

Only safetensors are read, only classes of transformers are built, and no code that comes with a checkpoint is run:
every key that could ask for it is removed from the configuration, and the weights are passed as tensors, so that
transformers opens no file of the checkpoint except the tokenizer's. Norms that the configuration records as replaced
are replaced again.
"""

from __future__ import annotations

import inspect as signatures
import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from normkit.checkpoint.build_model import BuiltModel, build_model, quiet_libraries, recorded, replay
from normkit.checkpoint.hub import find_model
from normkit.checkpoint.misfits import ATTRIBUTE, misfits
from normkit.checkpoint.model_folder import ADAPTER, CONFIG, read_json, read_weights, weight_files
from normkit.checkpoint.opening import read_config
from normkit.errors import InputError, KindError, ModelError
from normkit.text import clipped, quoted, shortened, typed_line

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

PROCESSOR = "preprocessor_config.json"
_SIDE = 8192
"""The most pixels of a side of an image that a processor may ask for."""

_TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel:
    """A model, ready to run, and where it came from."""

    model: Any
    """In evaluation mode. The caller gives decoder_input_ids to an encoder-decoder
    (`model.config.is_encoder_decoder`)."""
    tokenizer: Any
    """A tokenizer of transformers, or None if the checkpoint has none that could be loaded."""
    name: str
    """The folder's name, or the Hub id."""
    architecture: str
    """Name of the model's class."""
    path: Path
    """The folder that the files were read from."""
    notes: tuple[str, ...]
    """Parts that did not fit while loading, one line each."""
    processor: Any = None
    """The image processor or the feature extractor of transformers for a model that reads images or sound, or the
    processor of one that reads text beside them; the reason, as text, if it cannot be loaded."""


def media_beside(model: Any) -> str:
    """The input that a model reads beside token ids: pixel_values, input_features or input_values; "" for others."""
    takes = signatures.signature(model.forward).parameters
    known = (each for each in ("pixel_values", "input_features", "input_values") if each in takes)
    return next(known, "") if "input_ids" in takes else ""


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
    show_downloads: bool = False,
    text_only: bool = True,
    offload: bool = False,
) -> LoadedModel:
    """Load a model of transformers from a folder, or from the Hub if there is no such folder.

    Args:
        model: A model's folder, the config.json or model.safetensors in it, or a Hub id "org/name[@revision]".
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16", "float16" or "float64".
        revision: Branch, tag or commit of a Hub id.
        local_files_only: Ask no server; a Hub id must be in the cache.
        show_downloads: Leave the Hub's download bars on.
        text_only: Refuse a model that reads images or sound.
        offload: As in `load`.

    Raises:
        ModelError: If the model cannot be loaded, for whatever reason; one line.
        InputError: If an argument is not one of its choices.

    Example:
        >>> from normkit import demo
        >>> load_model(str(demo.directory("rmsnorm"))).architecture
        'LlamaForCausalLM'
    """
    path, name = _folder(model, dtype, revision, local_files_only=local_files_only, show_downloads=show_downloads)
    # Before transformers is imported, so that a mistake costs a moment and not seconds.
    values, files = read_config(path, infinity=True), weight_files(path)
    with quiet_libraries():
        built, notes = _built(path, values, files, dtype, text_only=text_only, offload=offload)
        tokenizer, tokenizer_note = _tokenizer(path)
        beside = media_beside(built.model)
        processor = _processor(path, built.model) if beside or built.model.main_input_name != "input_ids" else None
    return LoadedModel(
        model=built.model,
        tokenizer=tokenizer,
        name=name or path.resolve().name or "model",
        architecture=type(built.model).__name__,
        path=path,
        notes=(*notes, *tokenizer_note),
        processor=processor,
    )


def load(path: str | PathLike[str], *, dtype: str = "auto", offload: bool = False) -> Any:
    """A model of transformers in evaluation mode, of any kind, with the norms that its folder records as replaced.

    For folders of `normkit fold` with norms that no class of transformers has. Any other checkpoint is loaded as
    transformers would load it, but from safetensors alone and without running code of its own.

    Args:
        path: A model's folder, the config.json or model.safetensors in it, or a Hub id "org/name[@revision]".
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16", "float16" or "float64".
        offload: Leave the weights in the files: accelerate reads those of each linear map or table when it is called,
            so that a model larger than memory runs, such as in `normkit.inspect`. Needs the package accelerate.

    Returns:
        The model, of its class of transformers.

    Raises:
        ModelError: If it cannot be loaded, or lacks a weight; one line. Weights that its class does not use are a
            warning.
        InputError: If dtype is not one of its choices, or the weights cannot be offloaded.
        KindError: If path is not a path.

    Example:
        >>> from normkit import demo
        >>> type(load(demo.directory("layernorm"))).__name__
        'GPT2LMHeadModel'
    """
    if not isinstance(path, str | PathLike):
        raise KindError(f"load: path must be a model's folder or a Hub id, got {path!r}")
    folder, _ = _folder(str(path), dtype, None)
    values, files = read_config(folder, infinity=True), weight_files(folder)
    with quiet_libraries():
        built, notes = _built(folder, values, files, dtype, offload=offload)
    if built.missing:
        raise ModelError(
            f"{_count(built.missing)} missing in {folder}: {shortened(built.missing)}; download it again, or load it "
            "with transformers if weights drawn at random will do"
        )
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return built.model


def _folder(
    model: str,
    dtype: str,
    revision: str | None,
    *,
    local_files_only: bool = False,
    show_downloads: bool = False,
) -> tuple[Path, str]:
    """`find_model`, with a check of the dtype and of the name, which is shown."""
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not (model + Path(model).expanduser().resolve().name).isprintable():
        raise ModelError(f"expected a printable path in UTF-8, got {model!a}; rename the folder")
    return find_model(model, revision, local_files_only=local_files_only, show_downloads=show_downloads)


def _built(
    folder: Path,
    values: dict[str, Any],
    files: list[Path],
    dtype: str,
    *,
    text_only: bool = False,
    offload: bool = False,
) -> tuple[BuiltModel, tuple[str, ...]]:
    """The model with its recorded norms, and one note for each thing that did not fit."""
    import torch

    from normkit.checkpoint.offloading import build_offloaded

    norms = recorded(values, folder / CONFIG)
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    if offload:
        built = build_offloaded(values, files, folder, text_only=text_only, dtype=wanted)
    else:
        built = build_model(values, read_weights(files), folder, text_only=text_only, dtype=wanted)
    model, name = built.model, type(built.model).__name__
    if built.mismatched:
        weight, given, expected = built.mismatched[0]
        more = f" (and {len(built.mismatched) - 1} more)" if len(built.mismatched) > 1 else ""
        raise ModelError(
            f"{weight} in {folder} has shape {given}, {CONFIG} asks for {expected}{more}; "
            "weights and configuration belong to different models"
        )
    if {parameter for parameter, _ in model.named_parameters()} <= set(built.missing):
        raise ModelError(f"no weight in {folder} fits {name}; {CONFIG} belongs to another model")
    replay(model, norms, folder / CONFIG)
    setattr(model, ATTRIBUTE, misfits(built))
    notes = []
    if weights := values.get("transformers_weights"):
        notes.append(f"{CONFIG} has transformers load {quoted(weights)}: {files[0].name} is read in its place")
    if (folder / ADAPTER).is_file():
        notes.append(f"the adapter of {ADAPTER} is not applied")
    if name != built.asked:
        notes.append(f"the head of {built.asked} has no weights: {name} is loaded without it")
    if built.missing:
        missing = f"{_count(built.missing)} missing in the checkpoint and initialised at random"
        notes.append(f"{missing}: {shortened(built.missing)}")
    if built.unexpected:
        notes.append(
            f"{_count(built.unexpected)} in the checkpoint but not used by {name}: {shortened(built.unexpected)}"
        )
    return built, tuple(notes)


def _tokenizer(folder: Path) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer, or None; and a note where one is there and cannot be loaded."""
    import transformers
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    # transformers creates an empty tokenizer for a folder without one.
    if not _has_tokenizer(folder):
        return None, ()
    try:
        name = get_tokenizer_config(str(folder), local_files_only=True).get("tokenizer_class")
        # transformers 5 writes this name for a class that has another name in 4.
        renamed = name == "TokenizersBackend" and transformers.__version__.startswith("4.")
        class_ = transformers.PreTrainedTokenizerFast if renamed else transformers.AutoTokenizer
        tokenizer = class_.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        tokenizer("a")
    except Exception as error:
        return None, (f"its tokenizer cannot be loaded ({typed_line(error)})",)
    return tokenizer, ()


def _has_tokenizer(folder: Path) -> bool:
    return any(file.is_file() for pattern in _TOKENIZERS for file in folder.glob(pattern))


def _processor(folder: Path, model: Any) -> Any:
    """The processor that makes a model's input of images or of sound; if it cannot be loaded, the reason."""
    import transformers

    beside = media_beside(model)
    is_image = "pixel_values" in (model.main_input_name, beside)
    named: dict[str, Any] = {}
    for file in (PROCESSOR, "processor_config.json"):
        if (folder / file).is_file():
            found = read_json(folder / file)
            part = found.get("image_processor" if is_image else "feature_extractor", found)
            named |= {**found, **part} if isinstance(part, dict) else {}
    if not named:
        return f"it has no {PROCESSOR}; save the processor of the model beside it"
    if beside and not _has_tokenizer(folder):
        return "it has no tokenizer; save the processor of the model beside it"
    if sizes := [size for key in ("size", "crop_size", "pad_size") for size in _sizes(named.get(key)) if size > _SIDE]:
        return f"its {PROCESSOR} asks for images of {sizes[0]} pixels a side, expected at most {_SIDE}; correct it"
    if (length := named.get("image_seq_length")) and not 0 < length <= _SIDE:
        return f"its processor makes {length} tokens of an image, expected at most {_SIDE}; correct it"
    kinds = [named.get(key) for key in ("image_processor_type", "feature_extractor_type", "processor_class")]
    if named.get("auto_map") and not all(
        hasattr(transformers, str(kind).removesuffix("Fast")) for kind in kinds if kind
    ):
        return "its processor is code that comes with the model, which is never run; give a processor of transformers"
    auto = transformers.AutoImageProcessor if is_image else transformers.AutoFeatureExtractor
    auto = transformers.AutoProcessor if beside else auto
    try:
        return auto.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each processor checks its values in its own way
        return (
            f"its {PROCESSOR} cannot be used ({clipped(typed_line(error), 160)}); save the model's own processor there"
        )


def _sizes(size: Any) -> list[int]:
    if isinstance(size, dict) and "shortest_edge" in size:
        # A limit from above beside it, in some processors as an area, makes no image larger.
        size = {key: value for key, value in size.items() if key != "longest_edge"}
    values = size.values() if isinstance(size, dict) else size if isinstance(size, list) else [size]
    return [value for value in values if isinstance(value, int)]


def _count(names: list[str]) -> str:
    return f"{len(names)} weight is" if len(names) == 1 else f"{len(names)} weights are"
