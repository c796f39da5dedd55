"""The model of a verb, and the text, images or sound that the user gave for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import click

from normkit import demo
from normkit.checkpoint.loading import LoadedModel, load_model, media_beside
from normkit.errors import InputError, ModelError, NormkitError
from normkit.measurement import media, texts
from normkit.measurement.texts import Batches
from normkit.text import typed_line

# Reading stops at this many characters per token: no text needs more.
_CHARACTERS_A_TOKEN = 32
# Batches of a user's function are held together.
_MOST_BATCHES = 256


def load(
    model: str,
    *,
    dtype: str,
    local_files_only: bool,
    shown: bool,
    revision: str | None = None,
    text_only: bool = True,
    offload: bool = False,
) -> LoadedModel:
    """Load the model that the user named; stderr says so first, if progress is shown."""
    if shown:
        click.echo(f"loading {model}", err=True)
    return load_model(
        model,
        dtype=dtype,
        revision=revision,
        local_files_only=local_files_only,
        show_downloads=shown,
        text_only=text_only,
        offload=offload,
    )


def model_from_code(given: str) -> LoadedModel:
    """The model that a function of the user returns, which is run.

    Raises:
        InputError: If there is no such function, it fails, or it returns something else.
    """
    # Imported here because they bring torch.
    from torch import nn

    from normkit.comparison.sides import called

    model = called(given)
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a model of torch from {given}, got {type(model).__name__}; return an nn.Module")
    where = Path(given.rpartition(":")[0])
    name = given.rpartition("/")[2]
    return LoadedModel(model=model, tokenizer=None, name=name, architecture=type(model).__name__, path=where, notes=())


def batches_from_code(model: Any, given: str) -> Batches:
    """The batches that a function of the user returns, which is run: one, or an iterable of them, as `inspect` takes.

    Raises:
        InputError: If there is no such function, it fails, or it returns no batch.
    """
    from normkit.comparison.sides import called
    from normkit.measurement.running import arguments, batches_of

    stream, name = batches_of(called(given)), given.rpartition("/")[2]
    try:
        # A generator may have no end.
        batches = [dict(arguments(model, each)) for each in islice(stream, _MOST_BATCHES + 1)]
    except NormkitError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise InputError(f"{given} failed: {typed_line(error)}") from error
    if not batches:
        raise InputError(f"expected batches from {given}, got none; return one, or a list of them")
    source = name if len(batches) <= _MOST_BATCHES else f"the first {_MOST_BATCHES} batches of {name}"
    return Batches(batches=tuple(batches[:_MOST_BATCHES]), source=source, decode=None)


def read_text(path: str, max_tokens: int) -> str:
    """The beginning of a UTF-8 file ("-" is stdin), long enough for `max_tokens` tokens.

    Raises:
        InputError: If it cannot be read, is not UTF-8, or holds nothing but white space.
    """
    try:
        with click.open_file(path, encoding="utf-8-sig") as file:
            text = str(file.read(max_tokens * _CHARACTERS_A_TOKEN))
    except OSError as error:
        raise InputError(f"cannot read the text {path}: {error.strerror}; give a UTF-8 file, or - for stdin") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(f"expected UTF-8 in {path}, found the byte {byte:#04x}; convert the file to UTF-8") from None
    if not text.strip():
        raise InputError(f"expected a text in {path}, found {'white space' if text else 'nothing'}; give another file")
    return text


def batches_for(
    loaded: LoadedModel,
    path: str | None,
    words: str | None,
    *,
    length: int | None,
    max_tokens: int,
    batch_size: int,
    images: Path | None = None,
    sound: Sequence[Path] = (),
) -> Batches:
    """The input of a model: the text that was read at a path ("-" for stdin), images or sound; or those that ship.

    Raises:
        InputError: If something else is given than the model reads, or a file cannot be used.
        ModelError: If its tokenizer or processor cannot be used.
    """
    main = loaded.model.main_input_name
    reads = {"input_ids": "--text", "pixel_values": "--images", "input_features": "--audio", "input_values": "--audio"}
    option, beside = reads.get(main), reads.get(media_beside(loaded.model))
    if beside is not None:
        return _beside_text(loaded, path, words, beside, length, max_tokens, batch_size, images, sound)
    if option is None:
        raise InputError(
            f"{loaded.architecture} reads {main}, which no option gives; run nk.inspect(model, batches) on your own"
        )
    for given, is_given in (("--text", path is not None), ("--images", images is not None), ("--audio", bool(sound))):
        if is_given and given != option:
            raise InputError(f"{loaded.architecture} reads {main}: give {option} in place of {given}")
    if option == "--images":
        return media.from_images(loaded, images, batch_size=batch_size, words=demo.text())
    if option == "--audio":
        return media.from_sound(loaded, sound, words=demo.text())
    return _text(loaded, path, words, length=length, max_tokens=max_tokens, batch_size=batch_size)


def _beside_text(
    loaded: LoadedModel,
    path: str | None,
    words: str | None,
    option: str,
    length: int | None,
    max_tokens: int,
    batch_size: int,
    images: Path | None,
    sound: Sequence[Path],
) -> Batches:
    """The batches of a model of text with images or sound in it: both, or the text alone if only that was given."""
    wrong = "--audio" if option == "--images" else "--images"
    if sound if wrong == "--audio" else images is not None:
        raise InputError(f"{loaded.architecture} reads no {wrong[2:]}: give {option} or --text in place of {wrong}")
    is_given = images is not None or bool(sound)
    is_usable = loaded.processor is not None and not isinstance(loaded.processor, str)
    if is_given or (path is None and is_usable):
        name = "demo text" if path is None else "stdin" if path == "-" else Path(path).name
        return media.with_text(
            loaded, words or demo.text(), name, images=images, sound=None if option == "--images" else sound
        )
    try:
        batches = _text(loaded, path, words, length=length, max_tokens=max_tokens, batch_size=batch_size)
        texts.check_runs(loaded.model, batches.batches[0])
    except ModelError as error:
        if path is not None or is_usable:
            raise
        raise ModelError(f"{loaded.name} reads text with {option[2:]}: {loaded.processor}") from error
    remark = "" if path is not None else f"; no {option[2:]} beside it: {loaded.processor}"
    return replace(batches, source=batches.source + remark)


def _text(
    loaded: LoadedModel, path: str | None, words: str | None, *, length: int | None, max_tokens: int, batch_size: int
) -> Batches:
    is_own = path is not None and words is not None
    name = "demo text" if path is None else "stdin" if path == "-" else Path(path).name
    return texts.batches_for(
        loaded,
        words if is_own and words else demo.text(),
        name,
        is_own=is_own,
        length=length,
        max_tokens=max_tokens,
        batch_size=batch_size,
    )
