"""The models of the demo as folders: the GPT-2 that ships, and a copy in which one tensor is wrong."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load, save

from normkit import demo, files

HEALTHY, FAULTY = "gpt2", "gpt2-converted"

_TAKEN, _PLACE = "transformer.h.2.ln_1.weight", "transformer.h.3.ln_1.weight"


def write_twins(folder: Path) -> tuple[Path, Path]:
    """Write two folders that load and run alike: "gpt2-converted", with one wrong tensor, and "gpt2", which is right.

    The wrong tensor is the gain of one norm. It holds the gain of the norm one block earlier, as a converter writes it
    whose index is off by one: every name and every shape is right.

    Args:
        folder: Of both; it is made.

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
    for name in (FAULTY, HEALTHY):
        for file in demo.directory("layernorm").iterdir():
            content = file.read_bytes()
            if name == FAULTY and file.suffix == ".safetensors":
                weights = load(content)
                content = save({**weights, _PLACE: weights[_TAKEN].clone()}, {"format": "pt"})
            files.write_bytes(folder / name / file.name, content)
    return folder / FAULTY, folder / HEALTHY
