"""Recordings: what entered and left each norm of a run, in one safetensors file that any runtime can write.

A recording holds for each norm two tensors of shape (rows, n), `<path>.input` and `<path>.output`, in the dtypes in
which they were computed; beside them, where they are known, `<path>.weight` and `<path>.bias` of shape (n,), as they
are stored, and `<path>.residual`, of the input's shape, which a fused norm adds to its input. Its metadata say
`format` = "normkit-recording" and `version` = "1"; `runtime` and `tokens`, the token ids as JSON, are welcome.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from normkit import files
from normkit.checkpoint.reader import read_header
from normkit.errors import InputError, NormkitError
from normkit.identification.book import Entry, PassportBook
from normkit.identification.finder import PARAMETERS_PER_FEATURE, may_be_norm
from normkit.identification.recorded_rows import identify_rows
from normkit.identification.state import undisturbed

_FORMAT = {"format": "normkit-recording", "version": "1"}
_ROWS = ("input", "output", "residual")
_PARAMETERS = ("weight", "bias")


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedNorm:
    """The rows and the parameters of one norm."""

    input: Tensor
    """Shape (rows, n)."""
    output: Tensor
    """Shape (rows, n)."""
    residual: Tensor | None = None
    """Shape (rows, n): added to the input before it is normalized."""
    weight: Tensor | None = None
    """As stored, shape (n,)."""
    bias: Tensor | None = None
    """As stored, shape (n,)."""

    @property
    def normalized(self) -> Tensor:
        """The rows that are normalized: the input, or its sum with the residual in the residual's dtype."""
        if self.residual is None:
            return self.input
        wide = torch.promote_types(torch.promote_types(self.input.dtype, self.residual.dtype), torch.float32)
        return (self.input.to(wide) + self.residual.to(wide)).to(self.residual.dtype)


@contextmanager
def record(model: nn.Module, path: str | Path, *, rows: int = 512) -> Iterator[None]:
    """Record what enters and leaves each norm of a model, while the block runs, to one file.

    A module counts as a norm here if it has as few parameters as one, its output has the shape of its input, and an
    element of its output depends on the other elements of the row. Compiled models run uncompiled inside the block. The
    file is written at its end, whole or not at all; if the block raises, nothing is written.

    Args:
        model: The model; nothing of it is changed.
        path: The file, named `*.safetensors`; its folder is made.
        rows: Rows that are kept of each norm: the first of the first calls.

    Raises:
        InputError: If rows is less than 1, no norm was called, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with record(model, f"{folder}/run.safetensors"):
        ...         y = model(torch.randn(16, 4))
        ...     recording = read_recording(f"{folder}/run.safetensors")
        >>> {name: tuple(norm.input.shape) for name, norm in recording.items()}
        {'1': (16, 8)}
    """
    if rows < 1:
        raise InputError(f"rows must be at least 1, got {rows}")
    kept: dict[str, dict[str, list[Tensor]]] = {}
    tokens: list[Any] = []

    def keep(name: str, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        x = next(iter(arguments or named.values()), None)
        y = result[0] if isinstance(result, tuple) and result else result
        if not (_are_rows(x) and _are_rows(y)) or x.shape != y.shape:
            return
        found = kept.setdefault(name, {"input": [], "output": []})
        missing = rows - sum(len(part) for part in found["input"])
        if missing > 0:
            for key, value in (("input", x), ("output", y)):
                # Copied: what follows may write to the same memory.
                found[key].append(value.detach().reshape(-1, value.shape[-1])[:missing].cpu().clone())

    def read_tokens(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if isinstance(ids, Tensor) and not ids.is_floating_point() and not tokens:
            tokens.append(ids.tolist())

    handles = [model.register_forward_pre_hook(read_tokens, with_kwargs=True)]
    norms = {name: module for name, module in model.named_modules() if module is not model and may_be_norm(module)}
    for name, module in norms.items():
        handles.append(module.register_forward_hook(partial(keep, name), with_kwargs=True))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()
    kept = {name: found for name, found in kept.items() if _mixes(norms[name], found["input"][0])}
    if not kept:
        raise InputError("expected a call of the model inside `with record(...)`; no norm of it was called")
    tensors: dict[str, Tensor] = {}
    for name, found in kept.items():
        tensors |= {f"{name}.{key}": torch.cat(parts) for key, parts in found.items()}
        for key in _PARAMETERS:
            part = getattr(norms[name], key, None)
            if isinstance(part, Tensor) and part.shape == found["input"][0].shape[-1:] and not part.is_meta:
                tensors[f"{name}.{key}"] = part.detach().cpu().clone()
    described = {**_FORMAT, "runtime": f"torch {torch.__version__}"}
    if tokens:
        described["tokens"] = json.dumps(tokens[0])
    files.write_bytes(Path(path), save(tensors, described))


def _mixes(module: nn.Module, rows: Tensor) -> bool:
    """Whether it has few parameters and the first element of a row moves others, or it takes no row alone."""
    if sum(parameter.numel() for parameter in module.parameters()) > PARAMETERS_PER_FEATURE * rows.shape[-1]:
        return False
    row = rows[:1].clone()
    moved = row.clone()
    moved[0, 0] += 1 + moved[0].abs().max()
    try:
        with torch.no_grad(), undisturbed():
            here, there = (module(each.to(next(module.parameters(), each).device)) for each in (row, moved))
            return bool((here[0, 1:] != there[0, 1:]).any())
    except Exception:  # a foreign module may refuse in any way
        return True


def _are_rows(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def is_recording(path: Path) -> bool:
    """Whether a file is one of recorded rows: it has an input and an output of the same name."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    try:
        names = read_header(path).keys()
    except NormkitError:
        return False
    return any(f"{name.removesuffix('.input')}.output" in names for name in names if name.endswith(".input"))


def read_recording(path: str | Path) -> dict[str, RecordedNorm]:
    """The norms of a recording, by path, in the order of the file.

    Raises:
        ModelError: If the file is damaged.
        InputError: If it is no recording, or a norm's tensors do not belong together.
    """
    path = Path(path)
    header = read_header(path)
    norms = [name.removesuffix(".input") for name in header if name.endswith(".input")]
    if not norms:
        raise InputError(f"expected tensors named <norm path>.input and .output in {path}, found none")
    for name in norms:
        shape = header[f"{name}.input"].shape
        if len(shape) != 2 or f"{name}.output" not in header:
            raise InputError(f"{path}: {name}.input must have shape (rows, n), and {name}.output beside it")
        for key in (*_ROWS, *_PARAMETERS):
            expected = shape if key in _ROWS else shape[1:]
            if (found := header.get(f"{name}.{key}")) is not None and found.shape != expected:
                raise InputError(f"{path}: {name}.{key} must have shape {expected}, got {found.shape}")
    tensors = load_file(path)
    keys = (*_ROWS, *_PARAMETERS)
    return {name: RecordedNorm(**{key: tensors.get(f"{name}.{key}") for key in keys}) for name in norms}


def survey_recording(path: str | Path) -> PassportBook:
    """The passports of all norms of a recording; what rows cannot be identified from is left out, with the reason."""
    entries, left_out = [], {}
    for name, norm in read_recording(path).items():
        try:
            passport = identify_rows(norm.normalized, norm.output, norm.weight, norm.bias)
        except InputError as error:
            left_out[name] = str(error)
            continue
        if passport.spec is None:
            left_out[name] = f"{passport.verdict}: {passport.evidence[-1]}"
        else:
            entries.append(Entry(path=name, class_name="recorded", features=norm.input.shape[1], passport=passport))
    return PassportBook(model=Path(path).stem, entries=tuple(entries), left_out=left_out)
