"""The files beside the weights, carried over as they are: tokenizer, generation settings, cards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from normkit.checkpoint.certificate import NAME as CERTIFICATE
from normkit.checkpoint.configuration import CONFIG
from normkit.checkpoint.fingerprints import file_names

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
    for name in file_names(folder):
        path = folder / name
        is_weights = path.suffix in _WEIGHTS or name.endswith(".index.json")
        if path.is_file() and not is_weights and name not in (CONFIG, CERTIFICATE):
            yield name, path
