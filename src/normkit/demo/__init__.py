"""The models that ship with normkit, and a text to run them on.

Two byte-level language models of about 330,000 parameters, trained by `normkit.demo.training` on the
source of Python's standard library: `layernorm` is a GPT-2, `rmsnorm` a Llama. Same data, same seed,
same size. What they have learnt is in `training.json` beside each.
"""

from __future__ import annotations

from pathlib import Path

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
