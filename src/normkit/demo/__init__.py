"""The models that ship with normkit, and a text to run them on.

Two byte-level language models of about 330,000 parameters, trained by `normkit.demo.training` on the
source of Python's standard library: `layernorm` is a GPT-2, `rmsnorm` a Llama. Same data, same seed,
same size. What they have learnt is in `training.json` beside each.
"""

from __future__ import annotations

from pathlib import Path

from normkit import files
from normkit.errors import InputError

__all__ = ["directory", "text"]

_HERE = Path(__file__).parent
_NAMES = ("layernorm", "rmsnorm")


def directory(name: str) -> Path:
    """The folder of a shipped model, in Hugging Face format.

    Args:
        name: "layernorm" or "rmsnorm".

    Raises:
        InputError: If there is no such model.

    Example:
        >>> directory("rmsnorm").name
        'rmsnorm'
    """
    if name not in _NAMES:
        raise InputError(f"the models that ship are {' and '.join(map(repr, _NAMES))}, got {name!r}; choose one")
    return _HERE / name


def text() -> str:
    """The shipped text: prose on what a norm does to a vector, and a few Python functions.

    Neither model has seen it in training.
    """
    return (_HERE / "text.txt").read_text(encoding="utf-8")


def write_twins(folder: Path) -> tuple[Path, Path]:
    """Write two folders that load and run alike: "gpt2-converted", with one wrong tensor, and "gpt2", which is right.

    The wrong tensor is the gain of one norm. It holds the gain of the norm one block earlier, as a converter writes it
    whose index is off by one: every name and every shape is right.

    Args:
        folder: The folder above both; it is made if it is not there.

    Returns:
        The faulty folder and the healthy one.

    Raises:
        InputError: If a file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [twin.name for twin in write_twins(Path(folder))]
        ['gpt2-converted', 'gpt2']
    """
    from safetensors.torch import load, save

    faulty, healthy = folder / "gpt2-converted", folder / "gpt2"
    for file in directory("layernorm").iterdir():
        content = file.read_bytes()
        files.write_bytes(healthy / file.name, content)
        if file.suffix == ".safetensors":
            weights = load(content)
            weights["transformer.h.3.ln_1.weight"] = weights["transformer.h.2.ln_1.weight"].clone()
            content = save(weights, {"format": "pt"})
        files.write_bytes(faulty / file.name, content)
    return faulty, healthy
