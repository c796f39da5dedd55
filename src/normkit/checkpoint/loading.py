"""The one way from what a user calls a model to a model in memory.

Only safetensors are read, only classes of transformers are built, and no code that comes with a
checkpoint is run: the configuration is stripped of every key that could ask for it, and the weights
are handed over as tensors, so that transformers opens no file of the checkpoint but the tokenizer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from normkit.checkpoint import hub
from normkit.checkpoint.configuration import CONFIG, body_class, first_line, model_class, read_config
from normkit.checkpoint.silence import silence
from normkit.checkpoint.weights import INDEX, WEIGHTS, listed, read_weights, weight_files
from normkit.errors import InputError, ModelError

DTYPES = ("auto", "float32", "bfloat16", "float16")

_TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel:
    """A model ready to run, and where it came from.

    Attributes:
        model: In evaluation mode. An encoder-decoder (`model.config.is_encoder_decoder`) must be given
            decoder_input_ids by the caller.
        tokenizer: Of transformers, or None if the checkpoint has none that could be loaded.
        name: The folder's name, or the Hub id.
        architecture: Name of the model's class.
        path: The folder that the files were read from.
        notes: What did not fit while loading, one line each.
    """

    model: Any
    tokenizer: Any
    name: str
    architecture: str
    path: Path
    notes: tuple[str, ...]


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
    show_downloads: bool = False,
) -> LoadedModel:
    """Load a model of transformers from a folder, or from the Hub where no such folder is.

    Args:
        model: A model's folder, the config.json or model.safetensors in it, or a Hub id "org/name[@revision]".
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        revision: Branch, tag or commit of a Hub id.
        local_files_only: Ask no server; a Hub id must be in the cache.
        show_downloads: Leave the Hub's download bars on.

    Raises:
        ModelError: If nothing can be loaded, whatever the reason; one line.
        InputError: If an argument is not one of its choices.

    Example:
        >>> from normkit import demo
        >>> load_model(str(demo.directory("rmsnorm"))).architecture
        'LlamaForCausalLM'
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    path, name = _local_folder(model), ""
    if path is None:
        name, revision = hub.split_identifier(model, revision)
        _require_transformers()
        with silence(downloads=show_downloads):
            path = hub.fetch(name, revision, local_files_only=local_files_only)
    elif revision is not None:
        raise InputError(f"a revision belongs to a Hub id, and {model!r} is a folder; leave out the revision")
    # Before transformers is imported, so that a slip costs a moment and not seconds.
    values, files = read_config(path), weight_files(path)
    _require_transformers()
    with silence():
        built, notes = _build(path, values, files, dtype)
        tokenizer, tokenizer_note = _tokenizer(path)
    return LoadedModel(
        model=built,
        tokenizer=tokenizer,
        name=name or path.resolve().name or "model",
        architecture=type(built).__name__,
        path=path,
        notes=(*notes, *tokenizer_note),
    )


def _local_folder(model: str) -> Path | None:
    path = Path(model).expanduser()
    if not (model + path.resolve().name).isprintable():
        raise ModelError(f"expected a printable path in UTF-8, got {model!a}; rename the folder")
    if model and path.is_dir():
        return path
    if path.is_file():
        if path.name in (CONFIG, WEIGHTS, INDEX):
            return path.parent
        raise ModelError(f"expected a model directory or the {CONFIG} or {WEIGHTS} in it, got the file {model}")
    return None


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise ModelError('loading a model needs transformers, which is not installed; pip install "normkit[hf]"')


def _build(folder: Path, values: dict[str, Any], files: list[Path], dtype: str) -> tuple[Any, tuple[str, ...]]:
    config, class_ = model_class(values, folder)
    weights = read_weights(files)
    model, missing, unexpected = _load(class_, config, weights, dtype, folder)
    notes = []
    body = body_class(config)
    if missing and body not in (None, class_) and not any(_within_body(name, model) for name in missing):
        model, missing, unexpected = _load(body, config, weights, dtype, folder)
        notes.append(f"the head of {class_.__name__} has no weights: {type(model).__name__} is inspected without it")
    if {name for name, _ in model.named_parameters()} <= set(missing):
        raise ModelError(f"no weight in {folder} fits {type(model).__name__}; {CONFIG} belongs to another model")
    if missing:
        notes.append(f"{_count(missing)} missing in the checkpoint and initialised at random: {listed(missing)}")
    if unexpected:
        notes.append(
            f"{_count(unexpected)} in the checkpoint but not used by {type(model).__name__}: {listed(unexpected)}"
        )
    return model, tuple(notes)


def _load(
    class_: Any, config: Any, weights: dict[str, Any], dtype: str, folder: Path
) -> tuple[Any, list[str], list[str]]:
    """The model, the names of missing weights, and those of unexpected ones."""
    import torch

    try:
        # Weights that are missing are drawn at random: from a fixed seed, and without touching the caller's.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, report = class_.from_pretrained(
                None,
                config=config,
                state_dict=dict(weights),
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # a configuration can fail in as many ways as there are models
        raise ModelError(f"transformers cannot build {class_.__name__} from {folder}: {first_line(error)}") from error
    if wrong := sorted(report["mismatched_keys"]):
        name, given, expected = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ModelError(
            f"{name} in {folder} has shape {tuple(given)}, {CONFIG} asks for {tuple(expected)}{more}; "
            "weights and configuration belong to different models"
        )
    return model.eval(), sorted(report["missing_keys"]), sorted(report["unexpected_keys"])


def _within_body(name: str, model: Any) -> bool:
    return name.startswith(f"{model.base_model_prefix}.") or not model.base_model_prefix


def _tokenizer(folder: Path) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer, or None; and a note where one is there and cannot be loaded."""
    from transformers import AutoTokenizer

    # transformers makes up an empty one for a folder that has none.
    if not any(file.is_file() for pattern in _TOKENIZERS for file in folder.glob(pattern)):
        return None, ()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        tokenizer("a")
    except Exception as error:
        return None, (f"its tokenizer cannot be loaded ({first_line(error)})",)
    return tokenizer, ()


def _count(names: list[str]) -> str:
    return f"{len(names)} weight is" if len(names) == 1 else f"{len(names)} weights are"
