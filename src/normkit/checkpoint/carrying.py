"""The files beside the weights, carried over as they are: tokenizer, generation settings, cards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from normkit.checkpoint.certificate import NAME as CERTIFICATE
from normkit.checkpoint.configuration import CONFIG
from normkit.checkpoint.weights import INDEX

# Weights in any form: those of the source would contradict the folded ones.
_WEIGHTS = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".tflite", ".ot"),
    ".npz",
}


def carried(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name below the folder and path of each file that goes along, in the order of names.

    Left behind are weights in any form with their index, config.json (it is written anew), an older certificate, and
    what is hidden. A link to a file counts as the file; one to a folder is left behind, as it may lead anywhere.
    """
    own = {folder / name for name in (CONFIG, INDEX, CERTIFICATE)}
    for path in _files(folder):
        if path not in own and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json"):
            yield str(path.relative_to(folder)), path


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from _files(path)
