"""Recordings: what entered and left each norm of a run, in memory or in one file that any runtime can write.

It is a safetensors file. For each norm it holds two tensors of shape (rows, n), `<path>.input` and `<path>.output`, in
the dtypes in which they were computed; beside them, where they are known, `<path>.weight` and `<path>.bias` of shape
(n,), as they are stored, and `<path>.residual`, of the input's shape, which a fused norm adds to its input. `outputs`,
of shape (rows, vocabulary), is what the model returned, its logits, and `head`, of shape (rows, n), what its last
linear map took. Rows stand in the order of the tokens, heads within a token.

Its metadata say `format` = "normkit-recording" and `version` = "1". Welcome are `runtime`, in words; `tokens`, the
token ids as a JSON list of lists; and `order`, a JSON list of the norm paths in the order of their calls in one run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from normkit import files, reference
from normkit.checkpoint.reader import NAME, Located, TensorInfo, header_bytes, whole_header
from normkit.errors import InputError
from normkit.identification.book import Entry, PassportBook
from normkit.identification.recorded_rows import identify_rows

_FORMAT = {"format": "normkit-recording", "version": "1"}
_ROWS = ("input", "output", "residual")
_PARAMETERS = ("weight", "bias")
_FLOATS = ("F64", "F32", "F16", "BF16")
_OF_THE_MODEL = {"outputs": "(rows, vocabulary)", "head": "(rows, n)"}
"""Tensors that belong to no norm, and their shapes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedNorm:
    """The rows and the parameters of one norm."""

    input: Tensor
    """Shape (rows, n); in memory (rows, ...) where the norm takes more than one axis as a row."""
    output: Tensor
    """The rows that leave the norm, of the input's shape."""
    residual: Tensor | None = None
    """The tensor that is added to the input before it is normalized, of the input's shape."""
    weight: Tensor | None = None
    """As stored, shape (n,)."""
    bias: Tensor | None = None
    """As stored, shape (n,)."""
    calls: tuple[int, ...] = ()
    """How many of the rows each call gave, where this is known."""

    @property
    def normalized(self) -> Tensor:
        """The rows that are normalized: the input, or its sum with the residual in the residual's dtype."""
        return self.input if self.residual is None else reference.added(self.input, self.residual)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """The rows that entered and left the norms of a run, and the model's output."""

    norms: Mapping[str, RecordedNorm]
    """Path -> norm, in the order of their first calls where that is known."""
    name: str = ""
    """The model's name in reports."""
    runtime: str = ""
    """The runtime in words, such as "torch 2.13.0"; "" if the file does not say."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Token ids of the rows; () if they are not known."""
    outputs: Tensor | None = None
    """The model's output for the first tokens, of shape (rows, vocabulary); None if it was not recorded."""
    head: Tensor | None = None
    """The input of the last linear map, which makes the outputs, of shape (rows, n); None if it was not recorded."""
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    """Path of a module -> what its linear map takes, for each of the last maps that make the outputs, in their order;
    only in memory."""
    order: tuple[str, ...] = ()
    """The norms in the order of their calls in one run, each once for every call; () if it is not known."""

    def has_the_bits_of(self, other: Recording) -> bool:
        """Whether the rows, norm for norm, and the outputs are the other's to the bit; names do not count."""
        norms = [*zip(self.norms.values(), other.norms.values(), strict=False)]
        parts = [(one.normalized, two.normalized) for one, two in norms] + [
            (one.output, two.output) for one, two in norms
        ]
        if self.outputs is None or other.outputs is None or len(self.norms) != len(other.norms):
            return False
        parts.append((self.outputs, other.outputs))
        return all(one.dtype == two.dtype and torch.equal(one, two) for one, two in parts)

    @cached_property
    def book(self) -> PassportBook:
        """The passports of the norms; what rows cannot be identified from is left out, with the reason."""
        entries, left_out = [], {}
        for path, norm in self.norms.items():
            x, y = norm.normalized.flatten(1), norm.output.flatten(1)
            try:
                passport = identify_rows(x, y, norm.weight, norm.bias)
            except InputError as error:
                left_out[path] = str(error)
                continue
            if passport.spec is None:
                left_out[path] = f"{passport.verdict}: {passport.evidence[-1]}"
            else:
                features = norm.input[0].numel()
                entries.append(Entry(path=path, class_name="recorded", features=features, passport=passport))
        return PassportBook(model=self.name, entries=tuple(entries), left_out=left_out)

    @classmethod
    def read(cls, path: str | Path) -> Recording:
        """Read a file.

        Raises:
            ModelError: If the file is damaged.
            InputError: If it is no recording, or a norm's tensors do not belong together.
        """
        found = opened(path)
        if found is None:
            raise InputError(f"expected tensors named <norm path>.input and .output in {path}, found none")
        return found

    def write(self, path: str | Path) -> Path:
        """Write the file, whole or not at all; returns its path.

        Raises:
            InputError: If it cannot be written there.
        """
        tensors: dict[str, Tensor] = {}
        for name, norm in self.norms.items():
            for key in (*_ROWS, *_PARAMETERS):
                if (part := getattr(norm, key)) is not None:
                    tensors[f"{name}.{key}"] = part.flatten(1) if key in _ROWS else part
        tensors |= {key: part for key in _OF_THE_MODEL if (part := getattr(self, key)) is not None}
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        lists = {"tokens": self.tokens, "order": self.order}
        metadata = {**_FORMAT, **({"runtime": self.runtime} if self.runtime else {})}
        metadata |= {key: json.dumps(each, separators=(",", ":")) for key, each in lists.items() if each}
        # safetensors itself writes metadata in another order each time.
        header = header_bytes(
            {key: TensorInfo(NAME[part.dtype], tuple(part.shape)) for key, part in tensors.items()}, metadata
        )
        contents = (part.flatten().view(torch.uint8).numpy().tobytes() for part in tensors.values())
        return files.write_bytes(Path(path), b"".join([header, *contents]))


def opened(path: str | Path) -> Recording | None:
    """The recording in a file; None if no tensor of it is named as an input of a norm is.

    Raises:
        ModelError: If the file is damaged.
        InputError: If a norm's tensors do not belong together.
    """
    path = Path(path)
    header, texts = whole_header(path)
    norms = [name.removesuffix(".input") for name in header if name.endswith(".input")]
    if not norms:
        return None
    for name in norms:
        _check(path, name, header)
    for key, shape in _OF_THE_MODEL.items():
        if (found := header.get(key)) is not None and (len(found.shape) != 2 or found.dtype not in _FLOATS):
            raise InputError(f"{path}: {key} must be floating-point of shape {shape}, got {found.dtype} {found.shape}")
    ids, order = (_read(path, texts, key) for key in ("tokens", "order"))
    if not all(isinstance(name, str) for name in order):
        raise InputError(f"{path}: the metadata's order must be a JSON list of norm paths")
    # A batch of one may stand without its outer list.
    ids = [ids] if ids and all(isinstance(each, int) for each in ids) else ids
    if not all(isinstance(row, list) and all(isinstance(each, int) for each in row) for row in ids):
        raise InputError(f"{path}: the metadata's tokens must be a JSON list of lists of token ids")
    tensors = load_file(path)

    # safetensors sorts by name, where layer 10 comes before layer 9.
    def by_number(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

    paths = dict.fromkeys([*(name for name in order if name in norms), *sorted(norms, key=by_number)])
    keys = (*_ROWS, *_PARAMETERS)
    return Recording(
        norms={name: RecordedNorm(**{key: tensors.get(f"{name}.{key}") for key in keys}) for name in paths},
        name=path.stem,
        runtime=texts.get("runtime", ""),
        tokens=tuple(map(tuple, ids)),
        outputs=tensors.get("outputs"),
        head=tensors.get("head"),
        order=tuple(name for name in order if name in norms),
    )


def _check(path: Path, name: str, header: Mapping[str, Located]) -> None:
    """Raise an error where the tensors of a norm do not belong together."""
    shape = header[f"{name}.input"].shape
    if len(shape) != 2 or f"{name}.output" not in header:
        raise InputError(f"{path}: {name}.input must have shape (rows, n), and {name}.output beside it")
    for key in (*_ROWS, *_PARAMETERS):
        expected = shape if key in _ROWS else shape[1:]
        if (found := header.get(f"{name}.{key}")) is None:
            continue
        if found.shape != expected:
            raise InputError(f"{path}: {name}.{key} must have shape {expected}, got {found.shape}")
        if found.dtype not in _FLOATS:
            raise InputError(
                f"{path}: {name}.{key} must be of floating point, got {found.dtype}; record what it stands for"
            )


def _read(path: Path, texts: Mapping[str, str], key: str) -> list[Any]:
    """A list of the metadata; empty if there is none."""
    try:
        found = files.parse_json(texts.get(key, "[]").encode())
    except InputError as error:
        raise InputError(f"{path}: the metadata's {key} is no JSON: {error}") from None
    if not isinstance(found, list):
        raise InputError(f"{path}: the metadata's {key} must be a JSON list")
    return found
