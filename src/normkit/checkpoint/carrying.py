"""The files beside the weights, carried over as they are: tokenizer, generation settings, cards; never code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from normkit.checkpoint.certificate import NAME as CERTIFICATE
from normkit.checkpoint.configuration import CONFIG
from normkit.checkpoint.fingerprints import LONGEST_NAME, file_names, is_sound_name
from normkit.errors import ModelError
from normkit.text import quoted

# Weights in any form: those of the source would contradict the folded ones.
_WEIGHTS = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".tflite", ".ot"),
    ".npz",
}
_CODE = {".py", ".pyc", ".so"}


def carried(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name below the folder and path of each file that goes along, in the order of names.

    Left behind are weights in any form with their index, code, config.json (it is written anew), an older certificate,
    and what is hidden. A link to a file counts as the file; one to a folder is left behind, as it may lead anywhere.

    Raises:
        ModelError: If a file is called as no certificate may name it, or is a link to something outside of the folder
            and of the Hub's cache that it lies in.
    """
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        # models--org--name/snapshots/COMMIT/config.json -> ../../blobs/HASH
        roots.append(roots[0].parents[1] / "blobs")
    for name in file_names(folder):
        path = folder / name
        is_weights = path.suffix in _WEIGHTS or name.endswith(".index.json")
        if not path.is_file() or is_weights or path.suffix in _CODE or name in (CONFIG, CERTIFICATE):
            continue
        if not is_sound_name(name):
            raise ModelError(
                f"expected files that are called by at most {LONGEST_NAME} printable characters in {folder}, found "
                f"{quoted(name)}; rename it, or take it away"
            )
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in roots):
            raise ModelError(
                f"{path} is a link to {target}, outside of its folder, and is not copied; put the file in its place, "
                "or take the link away"
            )
        yield name, path


def code(names: Iterable[str]) -> list[str]:
    """Those files that are code, which is not carried over: it was not folded, and nothing is proved of it."""
    return [name for name in names if Path(name).suffix in _CODE]
