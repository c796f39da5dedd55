"""What a loaded model is run on: the user's text, the text that ships, or token ids at random."""

from __future__ import annotations

from pathlib import Path

from normkit import demo
from normkit.checkpoint.loading import LoadedModel
from normkit.cli.texts import Batches, from_random_ids, from_text
from normkit.errors import InputError


def batches_for(
    loaded: LoadedModel,
    path: str | None,
    words: str | None,
    *,
    length: int | None,
    max_tokens: int,
    batch_size: int,
) -> Batches:
    """Batches for a model.

    Args:
        loaded: The model; without a tokenizer it gets token ids at random.
        path: Of the user's text, "-" for stdin, or None.
        words: What was read there, or None.
        length: Tokens a window; None is 256.
        max_tokens: Tokens in all.
        batch_size: Windows a batch.

    Raises:
        InputError: If there is a text and no tokenizer for it, or nothing of it can be used.
    """
    if loaded.tokenizer is None:
        if path is not None:
            raise InputError(f"{loaded.name} has no tokenizer for the text {path}; add its files, or leave out --text")
        return from_random_ids(loaded.model, length=length, max_tokens=max_tokens, batch_size=batch_size)
    if words is None or path is None:
        words, name = demo.text(), "demo text"
    else:
        name = "stdin" if path == "-" else Path(path).name
    return from_text(
        words, name, loaded.model, loaded.tokenizer, length=length, max_tokens=max_tokens, batch_size=batch_size
    )
