"""The folder that a model argument means: on this machine, or fetched from the Hugging Face Hub into its cache."""

from __future__ import annotations

import re
from pathlib import Path

from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.model_folder import CONFIG, INDEX, WEIGHTS, shard_names
from normkit.errors import InputError, ModelError

_IDENTIFIER = re.compile(r"(?P<id>[\w-][\w.-]*(/[\w-][\w.-]*)?)(@(?P<revision>[^@\s]+))?")
# As huggingface_hub lays out its cache.
# Files that configure a model and its tokenizer; the weights follow when it is known how they are split.
_SETTINGS = ["*.json", "*.txt", "*.model", "*.tiktoken"]
_FOLDERS = ["*/*"]
_READ = "normkit compare reads {}"
# Endings of files that are models for others -> what to do with one.
_OTHERS = {".py": "or {}:NAME, a function that returns a model", **dict.fromkeys((".gguf", ".onnx", ".npz"), _READ)}
# A name without an organisation and with such an ending means a file that is not there.
_FILES = (".md", ".txt", ".json", ".py", ".safetensors", ".gguf", ".onnx", ".bin", ".pt", ".pth")


def find_model(
    model: str, revision: str | None = None, *, local_files_only: bool = False, show_downloads: bool = False
) -> tuple[Path, str]:
    """The folder of a model, and its Hub id or "".

    Args:
        model: A folder, the config.json or model.safetensors in it, or else a Hub id "org/name[@revision]".
        revision: Branch, tag or commit of a Hub id.
        local_files_only: Ask no server; a Hub id must be in the cache.
        show_downloads: Leave the Hub's download bars on.

    Raises:
        ModelError: If it is another file, or is neither on this machine nor on the Hub.
        InputError: If a revision is given for a folder, or two for a Hub id.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.name not in (CONFIG, WEIGHTS, INDEX):
            others = "" if path.suffix not in _OTHERS else f"; {_OTHERS[path.suffix].format(path.name)}"
            raise ModelError(
                f"{model} is a file and no model; give a model's folder, or its {CONFIG} or {WEIGHTS}{others}"
            )
        path = path.parent
    elif not (model and path.is_dir()):
        name, revision = split_identifier(model, revision)
        with quiet_libraries(downloads=show_downloads):
            return fetch(name, revision, local_files_only=local_files_only), name
    if revision is not None:
        raise InputError(f"a revision belongs to a Hub id, and {model!r} is a folder; leave out the revision")
    return path, ""


def split_identifier(model: str, revision: str | None) -> tuple[str, str | None]:
    """The Hub id and the revision of `org/name[@revision]`.

    Raises:
        ModelError: If it cannot be a Hub id, so is a path to nothing.
        InputError: If two different revisions are given.
    """
    match = _IDENTIFIER.fullmatch(model)
    if match is None or ("/" not in model and model.endswith(_FILES)):
        raise ModelError(f"expected a model directory or a Hub id such as org/name, got {model!r}: nothing is there")
    within = match["revision"]
    if within and revision and within != revision:
        raise InputError(f"expected one revision, got {within!r} in {model!r} and {revision!r} beside it; give one")
    return match["id"], within or revision


def fetch(identifier: str, revision: str | None, *, local_files_only: bool) -> Path:
    """The folder in the Hub's cache with a model's configuration, tokenizer and safetensors; never code or pickles.

    Raises:
        ModelError: If there is no such model, or the Hub cannot be reached; one line.
    """
    from huggingface_hub import snapshot_download

    def download(patterns: list[str]) -> Path:
        folder = snapshot_download(
            identifier,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_FOLDERS,
            local_files_only=local_files_only,
        )
        return Path(folder)

    try:
        folder = download(_SETTINGS)
        names = shard_names(folder) if (folder / INDEX).is_file() else [WEIGHTS]
        return download(names)
    except ModelError:
        raise
    except Exception as error:  # the network, the server and the cache raise errors of many types
        raise ModelError(_explanation(identifier, revision, error)) from error


def _explanation(identifier: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    missing = f"expected a model directory or a Hub id, got {identifier!r}: there is no such directory, and "
    match error:
        case errors.GatedRepoError():
            return f"{identifier} is gated: accept its terms on huggingface.co/{identifier}, then `hf auth login`"
        case errors.RevisionNotFoundError():
            return f"{identifier} has no revision {revision!r}; give a branch, a tag or a commit of it"
        case errors.RepositoryNotFoundError():
            return f"{missing}the Hub knows no such model or keeps it private; check the name, or `hf auth login`"
        case errors.OfflineModeIsEnabled() | errors.LocalEntryNotFoundError():
            return f"{missing}the Hub's cache here lacks it; check the name, or allow the network and try again"
        case _:
            return f"{missing}the Hub did not answer ({type(error).__name__}); check the name and the network"
