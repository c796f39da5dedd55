"""The two sides of a comparison: what the user gave is opened into what it offers. Opening loads and runs no model."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from normkit import demo
from normkit.checkpoint.hub import find_model
from normkit.checkpoint.loading import LoadedModel, load_model, media_beside
from normkit.checkpoint.model_folder import CONFIG, INDEX, WEIGHTS
from normkit.comparison.differences import Level
from normkit.comparison.gguf_file import read_gguf
from normkit.comparison.onnx_file import OnnxModel
from normkit.comparison.recording import Recording, opened
from normkit.comparison.weights import Weights, weights_of
from normkit.errors import InputError, KindError, ModelError, NormkitError
from normkit.identification.behaviour import identify
from normkit.identification.book import Entry, PassportBook
from normkit.measurement import media
from normkit.measurement.texts import Batches, batches_for
from normkit.text import quoted, typed_line

Form = Literal[
    "folder", "safetensors", "GGUF", "ONNX", "recording", "passports", "code", "module", "arrays", "function"
]

TOKENS = 256
"""Tokens that two models run on, unless the user says how many."""

_CODE = re.compile(r"(?P<where>[^:]+):(?P<name>[A-Za-z_][\w.]*)")
_TAKEN = (
    "a model's folder, a Hub id, .safetensors, .npz, .gguf, .onnx, a recording, a passports.json or FILE.py:function"
)


def _of_tensors(what: str) -> dict[Level, str]:
    reason = f"nothing here runs {what}; a recording of its runtime has rows"
    return {"conventions": reason, "rows": reason}


def _without_tensors(reason: str) -> dict[Level, str]:
    return {"metadata": reason, "values": reason}


_OF_PASSPORTS: dict[Level, str] = {
    **_without_tensors("passports hold no tensors"),
    "rows": "passports cannot be run",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One of the two that are compared."""

    name: str
    """The name in reports."""
    given: str
    """The argument that the user gave; the same as the name for objects in memory."""
    form: Form
    """The kind of the side."""
    path: Path | None = None
    """The file or the folder that it is read from."""
    weights: Weights | None = None
    """Its tensors as they are stored."""
    model: nn.Module | None = None
    """A model that can be run."""
    load: Callable[[], LoadedModel] | None = None
    """Loads the model of a folder."""
    folder: LoadedModel | None = None
    """The model of a folder with its tokenizer, once it is loaded."""
    onnx: OnnxModel | None = None
    """An ONNX model, whose norms can be called and which can be run."""
    recording: Recording | None = None
    """The rows that entered and left its norms in a run."""
    book: PassportBook | None = None
    """The passports of its norms, if they are written down or one call shows them."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""
    lacking: Mapping[Level, str] = field(default_factory=dict)
    """Level -> why it does not offer what is looked at there."""

    @property
    def runs(self) -> bool:
        """A model would have to be run to look at its norms."""
        return self.load is not None or self.model is not None or self.onnx is not None

    def loaded(self) -> Side:
        """This side with the model of its folder in memory, if it has one.

        Raises:
            ModelError: If it cannot be loaded.
        """
        if self.load is None or self.model is not None:
            return self
        loaded = self.load()
        return replace(self, model=loaded.model, folder=loaded, notes=(*self.notes, *loaded.notes))


def open_side(
    given: Any,
    *,
    shape: Any = None,
    dtype: str = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
    show_downloads: bool = False,
) -> Side:
    """Open one side of a comparison.

    Args:
        given: A path, a Hub id or code as `compare` takes them, an `nn.Module`, a mapping of arrays, a function, a
            `PassportBook` or a `Recording`.
        shape: Of an input of a single norm, which is identified; None for a model.
        dtype: As `load_model` takes it.
        revision: Branch, tag or commit of a Hub id.
        local_files_only: Ask no server.
        show_downloads: Leave the Hub's download bars on.

    Raises:
        ModelError: If there is no such model, or a file is damaged.
        InputError: If a file cannot be used, or code cannot be run.
        KindError: If it is something else.
    """
    if isinstance(given, str | Path):
        if _CODE.fullmatch(str(given)) and not Path(given).exists():
            return _of_object(called(str(given)), str(given), "code", shape)
        return _of_path(
            str(given),
            dtype=dtype,
            revision=revision,
            local_files_only=local_files_only,
            show_downloads=show_downloads,
        )
    form: Form = "module" if isinstance(given, nn.Module) else "function"
    return _of_object(given, _name_of(given), form, shape)


def called(given: str) -> Any:
    """The result of a function that the user names as FILE.py:function or module:function; its code is run.

    Raises:
        InputError: If there is no such function, or it fails.
    """
    if not (code := _CODE.fullmatch(given)):
        raise InputError(f"expected FILE.py:function or module:function, got {quoted(given)}; name a function")
    where, name = code["where"], code["name"]
    # Files beside it and in the working folder can be imported, as they can from a script.
    places = [str(Path(where).resolve().parent), str(Path.cwd())] if where.endswith(".py") else [str(Path.cwd())]
    before = list(sys.path)
    try:
        sys.path[:0] = places
        if where.endswith(".py"):
            if not Path(where).is_file():
                raise InputError(f"expected a file of Python before the colon of {given}, there is none")
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        function: Any = module
        for part in name.split("."):
            function = getattr(function, part)
        return function() if callable(function) and not isinstance(function, nn.Module) else function
    except NormkitError:
        raise
    except ModuleNotFoundError as error:
        raise InputError(f"cannot import {given}: {error}; give FILE.py:function or module:function") from error
    except AttributeError as error:
        raise InputError(f"cannot use {given}: {error}; name a function without arguments") from error
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise InputError(f"{given} failed: {typed_line(error)}") from error
    finally:
        sys.path[:] = before


def _name_of(given: Any) -> str:
    named = given if isinstance(given, type) or hasattr(given, "__name__") else type(given)
    return str(getattr(named, "__name__", type(given).__name__))


def _of_object(given: Any, name: str, form: Form, shape: Any) -> Side:
    """A side of what is in memory."""
    if isinstance(given, PassportBook):
        return Side(name=given.model, given=given.model, form="passports", book=given, lacking=_OF_PASSPORTS)
    if isinstance(given, Recording):
        return _of_recording(given, given.name or name, name, None)
    if isinstance(given, Mapping):
        name = name if form == "code" else "arrays"
        weights = weights_of(given, name=name)
        return Side(name=name, given=name, form="arrays", weights=weights, lacking=_of_tensors("arrays"))
    if shape is not None and callable(given):
        passport = identify(given, shape)
        features = passport.shape[-1] if passport.shape else 1
        entry = Entry(path="norm", class_name=_name_of(given), features=features, passport=passport)
        book = PassportBook(model=name, entries=(entry,), left_out={})
        lacking = {**_without_tensors("one norm is compared by what it computes"), "rows": "one norm is no model"}
        return Side(name=name, given=name, form=form, book=book, lacking=lacking)
    if isinstance(given, nn.Module):
        try:
            return Side(name=name, given=name, form=form, weights=weights_of(given, name=name), model=given)
        except ModelError as error:
            return Side(name=name, given=name, form=form, model=given, lacking=_without_tensors(str(error)))
    if callable(given):
        raise InputError(f"compare: expected the shape of an input for the norm {name}, got none; give shape=")
    raise KindError(f"compare: expected {_TAKEN}, a module, arrays or a norm, got {type(given).__name__}")


def _of_recording(recording: Recording, name: str, given: str, path: Path | None) -> Side:
    """A recording offers the parameters that it holds, too."""
    held = {
        f"{norm}.{role}": part
        for norm, rows in recording.norms.items()
        for role in ("weight", "bias")
        if (part := getattr(rows, role)) is not None
    }
    return Side(
        name=name,
        given=given,
        form="recording",
        path=path,
        weights=weights_of(held, name=name) if held else None,
        recording=recording,
        lacking={} if held else _without_tensors("the recording has no gains and biases"),
    )


def _of_path(given: str, *, dtype: str, revision: str | None, local_files_only: bool, show_downloads: bool) -> Side:
    """A side of a file, of a folder or of a model on the Hub."""
    if (side := file_side(given)) is not None:
        return side
    path = Path(given).expanduser()
    if path.suffix in (".gguf", ".onnx", ".safetensors", ".npz", ".json", ".py") and not path.exists():
        raise InputError(f"cannot read {given}: there is no such file; give {_TAKEN}")
    if path.is_file() and path.name not in (CONFIG, WEIGHTS, INDEX):
        raise InputError(f"{given} is nothing that can be compared; give {_TAKEN}")
    folder, identifier = find_model(given, revision, local_files_only=local_files_only, show_downloads=show_downloads)
    name = identifier or folder.resolve().name or "model"
    return Side(
        name=name,
        given=given,
        form="folder",
        path=folder,
        weights=weights_of(folder, name=name),
        load=lambda: load_model(str(folder), dtype=dtype, text_only=False),
    )


def shipped(loaded: LoadedModel, length: int) -> Batches:
    """The input for the model of a folder: the text that ships in windows of a length, photographs or a signal."""
    main, text = loaded.model.main_input_name, demo.text()
    beside = media_beside(loaded.model)
    if beside and not isinstance(loaded.processor, str | None):
        sound = None if beside == "pixel_values" else ()
        return media.with_text(loaded, text, "demo text", sound=sound)
    if main == "pixel_values":
        return media.from_images(loaded, None, batch_size=TOKENS, words=text)
    if main in ("input_features", "input_values"):
        return media.from_sound(loaded, (), words=text)
    return batches_for(loaded, text, "demo text", is_own=False, length=length, max_tokens=TOKENS, batch_size=TOKENS)


def file_side(given: str | Path) -> Side | None:
    """The side of a file that is no model of transformers, told by its name; None for all else.

    Raises:
        ModelError: If the file is damaged.
        InputError: If it cannot be used.
    """
    path, given = Path(given).expanduser(), str(given)
    is_of_model = path.name in (CONFIG, WEIGHTS, INDEX) and (path.parent / CONFIG).is_file()
    if not path.is_file() or is_of_model:
        return None
    name = path.name
    if path.suffix == ".gguf":
        weights = replace(read_gguf(path), name=name)
        lacking = _of_tensors("a GGUF file")
        return Side(name=name, given=given, form="GGUF", path=path, weights=weights, lacking=lacking)
    if path.suffix == ".onnx":
        onnx = OnnxModel.open(path)
        return Side(name=name, given=given, form="ONNX", path=path, weights=replace(onnx.weights, name=name), onnx=onnx)
    if path.suffix == ".safetensors" and (recording := opened(path)) is not None:
        return _of_recording(recording, path.stem, given, path)
    if name.endswith((".safetensors", ".safetensors.index.json", ".npz")):
        form: Form = "arrays" if path.suffix == ".npz" else "safetensors"
        lacking = _of_tensors("an .npz file" if form == "arrays" else "a .safetensors file")
        return Side(name=name, given=given, form=form, path=path, weights=weights_of(path), lacking=lacking)
    if path.suffix == ".json":
        book = PassportBook.read(path)
        return Side(name=book.model, given=given, form="passports", path=path, book=book, lacking=_OF_PASSPORTS)
    return None
