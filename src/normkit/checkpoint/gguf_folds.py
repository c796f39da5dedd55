"""A folded checkpoint as a GGUF file: names by the tables of the package `gguf`, metadata from a GGUF of the source.

How llama.cpp arranges a tensor (rows of queries and keys in another order, 1 added to the gains of Gemma) is not
assumed but seen: of the arrangements that its converter knows, the one under which the unfolded tensor is the tensor of
that file. What fits under none is an error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.checkpoint.folding import Progress, write_folded
from normkit.checkpoint.opening import OpenedFolder
from normkit.checkpoint.plan import DTYPE_KEYS, FoldPlan
from normkit.checkpoint.reader import CheckpointSource, Source
from normkit.errors import InputError, ModelError
from normkit.text import quoted, shortened

Arrangement = Callable[[Tensor], Tensor]

DTYPES: Mapping[str, tuple[str, torch.dtype, int]] = {
    "float32": ("F32", torch.float32, 0),
    "float16": ("F16", torch.float16, 1),
    "bfloat16": ("BF16", torch.bfloat16, 32),
}
"""Dtype of matrices -> its name in GGUF, torch's, and the number of such a file in llama.cpp's `llama_ftype`."""

FOLD = "normkit.fold"
"""The key of what was asked for, and of what: a certificate without its plan, as JSON."""

HEAD = "output.weight"
FILE_TYPE = "general.file_type"
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Half a unit in the last place of bfloat16, of either side; blocks of two bits are a third off.
_EXACT, _QUANTIZED = 2.0**-7, 0.4
# Rows that are compared at a time.
_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A tensor of the GGUF file and where it comes from."""

    name: str
    """In the GGUF file."""
    source: str
    """In the checkpoint."""
    words: str
    """How it is arranged."""
    arrange: Arrangement


def write_gguf(
    plan: FoldPlan,
    opened: OpenedFolder,
    destination: Path,
    metadata: Path,
    *,
    dtype: str,
    untie: bool,
    threads: int = 1,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> list[Matched]:
    """Carry out a plan and write the result as one GGUF file, which is read back; what was written.

    Vectors are float32, as llama.cpp wants them; matrices have `dtype`. A plan for "float32" is rounded once more where
    another dtype is asked for.

    Raises:
        InputError: If the package gguf is missing, the file is there already, or the plan changes settings that the
            metadata would contradict.
        ModelError: If the metadata are of another model: a tensor has no counterpart, or is none under any arrangement.
    """
    gguf = package()
    if destination.exists():
        raise InputError(f"expected no file in {destination}, found one; give another name, or remove it")
    tie = opened.graph.family.tie
    free = {"architectures", *DTYPE_KEYS, *([tie.key] if tie else [])}
    if changed := sorted(key for key in plan.config if key.rpartition(".")[2] not in free):
        raise InputError(f"a GGUF file takes its settings from {metadata}, and this fold changes {changed[0]}")
    if plan.untie and tie is not None and "llama.cpp" in tie.ignored_by:
        raise InputError(f"llama.cpp does not read the head of a {plan.family} model; fold without --untie")
    reader = read(metadata)
    dtype, inner = gguf_dtypes(opened.source, dtype)
    matched = list(arranged(reader, opened.source, metadata, opened.graph.is_tied))
    with tempfile.TemporaryDirectory(dir=destination.absolute().parent, prefix=f".{destination.name}.") as above:
        folder = Path(above) / "folded"
        certificate = write_folded(
            *(plan, opened, folder),
            untie=untie,
            dtype=inner,
            max_memory=max_memory,
            threads=threads,
            resume=False,
            progress=progress,
        )
        folded = CheckpointSource(folder)
        head = f"{tie.head}.weight" if tie else ""
        if plan.untie and head in folded.tensors:
            matched.append(Matched(name=HEAD, source=head, words="as it is", arrange=_as_it_is))
        partial = Path(above) / destination.name
        asked = dataclasses.replace(certificate, plan={}, tensors={}, reload={}, result={}, smallest_divisor=None)
        _write(gguf, reader, partial, folded, matched, dtype, json.dumps(asked.to_json(), sort_keys=True))
        _check(reader, partial, folded, matched, dtype)
        folded.close()
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.link(partial, destination)
    return matched


def gguf_dtypes(source: Source, asked: str) -> tuple[str, str]:
    """The dtype of the matrices of a GGUF file, and the one with which a plan for it is made.

    Raises:
        InputError: If the source's own is asked for, and it has several, or one that GGUF lacks.
    """
    found = {info.dtype for info in source.tensors.values() if len(info.shape) > 1}
    own = _STORED.get(next(iter(found)), "") if len(found) == 1 else ""
    if asked == "same" and not own:
        raise InputError(
            f"expected one of {', '.join(DTYPES)} as the dtype: the source holds {', '.join(sorted(found))}"
        )
    return (own, "same") if asked in ("same", own) else (asked, "float32")


def package() -> Any:
    """The package gguf.

    Raises:
        InputError: If it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise InputError(
            'GGUF files need the package gguf, which is not installed: pip install "normkit[ports]"'
        ) from None
    return gguf


def read(path: Path) -> Any:
    """A reader of a GGUF file.

    Raises:
        ModelError: If it cannot be read as one.
    """
    try:
        return package().GGUFReader(path)
    except Exception as error:  # the package raises errors of many types
        raise ModelError(f"{path} is no GGUF file that can be read: {quoted(str(error))}") from error


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How the tensors of a GGUF file are called, and how llama.cpp's converter may have arranged them."""

    names: Any
    """The table of the package gguf."""
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, reader: Any, path: Path) -> Naming:
        """The names by the settings of a file.

        Raises:
            ModelError: If it is not one whole file of an architecture that gguf knows.
        """
        gguf = package()
        fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        architecture = str(fields.get("general.architecture", ""))
        known = next((number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
        try:
            blocks, heads = (int(fields[f"{architecture}.{key}"]) for key in ("block_count", "attention.head_count"))
            kv_heads = int(fields.get(f"{architecture}.attention.head_count_kv", heads))
        except (KeyError, ValueError, TypeError):
            known = None
        if known is None or min(blocks, heads, kv_heads) < 1 or fields.get("split.count", 1) not in (0, 1):
            raise ModelError(f"expected one whole GGUF file of an architecture that gguf knows, {path} is none")
        return cls(names=gguf.get_tensor_name_map(known, blocks), heads=heads, kv_heads=kv_heads)

    def name(self, tensor: str) -> str:
        """The name of a tensor of a checkpoint in the file; "" if the table lacks it."""
        ending = next((each for each in (".weight", ".bias") if tensor.endswith(each)), "")
        found = self.names.get_name(tensor.removesuffix(ending))
        return "" if found is None else found + ending

    def choices(self, name: str, shape: tuple[int, ...]) -> dict[str, Arrangement]:
        """The arrangements that a tensor of the file may have, by their words."""
        found: dict[str, Arrangement] = {"as it is": _as_it_is}
        heads = self.kv_heads if ".attn_k." in name else self.heads
        if len(shape) == 1:
            found["1 added"] = lambda values: values.to(torch.float64) + 1.0
        if (".attn_q." in name or ".attn_k." in name) and shape[0] % (2 * heads) == 0:
            found["rotary halves interleaved"] = lambda values: (
                values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            )
        return found


def arranged(reader: Any, source: Source, metadata: Path, is_tied: bool) -> Iterator[Matched]:
    """The tensors of a GGUF file with those of the source, each seen to be the same under one arrangement.

    Raises:
        ModelError: If a tensor has no counterpart, or is none under any arrangement.
    """
    naming = Naming.of(reader, metadata)
    held = {tensor.name: tensor for tensor in reader.tensors}
    left = dict.fromkeys(held)
    for name in source.tensors:
        there = naming.name(name)
        if there == HEAD and is_tied:
            continue
        if there not in held:
            raise ModelError(f"expected {name} in {metadata}, as {there or 'a tensor that gguf knows'}, found none")
        del left[there]
        yield _seen(held[there], name, source, naming, metadata)
    if left:
        raise ModelError(f"expected a counterpart of each tensor of {metadata}, {shortened(list(left))} have none")


def _seen(tensor: Any, name: str, source: Source, naming: Naming, metadata: Path) -> Matched:
    """The arrangement under which a tensor of the source is that of the GGUF file."""
    gguf, info, step = package(), source.tensors[name], _ROWS
    rows, choices = info.matrix[0], naming.choices(tensor.name, info.shape)
    if [int(axis) for axis in tensor.shape[::-1]] != [*info.shape]:
        raise ModelError(f"{name} has the shape {info.shape}, {tensor.name} of {metadata} another one")
    if "rotary halves interleaved" in choices:
        step = rows
    data, squares, size = tensor.data.reshape(rows, -1), dict.fromkeys(choices, 0.0), 0.0
    for start in range(0, rows, step):
        here = source.rows(name, start, min(start + step, rows)).to(torch.float32)
        there = torch.from_numpy(gguf.dequantize(data[start : start + step], tensor.tensor_type).copy())
        there = there.reshape(here.shape).to(torch.float64)
        size += float(there.square().sum())
        for words, arrange in choices.items():
            shaped = here[0] if len(info.shape) == 1 else here
            squares[words] += float((arrange(shaped).reshape(here.shape) - there).square().sum())
    errors = {words: (square / size) ** 0.5 if size else square for words, square in squares.items()}
    words = min(errors, key=lambda each: errors[each])
    if errors[words] > (_EXACT if tensor.tensor_type.name in _STORED else _QUANTIZED):
        raise ModelError(
            f"{tensor.name} of {metadata} is not {name} of the source ({errors[words]:.2g} off); give a GGUF of it"
        )
    return Matched(name=tensor.name, source=name, words=words, arrange=choices[words])


def _write(gguf: Any, reader: Any, path: Path, folded: Source, matched: list[Matched], dtype: str, asked: str) -> None:
    """Write the file: the metadata of the reader with another file type, what was asked for, and the tensors."""
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", FILE_TYPE, FOLD):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(DTYPES[dtype][2])
    writer.add_string(FOLD, asked)
    for each in matched:
        shape = folded.tensors[each.source].shape
        kind = "F32" if len(shape) == 1 else DTYPES[dtype][0]
        size = 4 if kind == "F32" else 2
        count = int(torch.Size(shape).numel())
        stored = [*shape[:-1], shape[-1] * size] if kind == "BF16" else list(shape)
        form = (
            torch.empty(0, dtype={"F32": torch.float32, "F16": torch.float16, "BF16": torch.uint8}[kind]).numpy().dtype
        )
        writer.add_tensor_info(each.name, stored, form, count * size, kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in matched:
        writer.write_tensor_data(_stored(each, folded, dtype).numpy())
    writer.close()


def as_stored(values: Tensor, dtype: str, name: str) -> Tensor:
    """An arranged tensor of the result as it is written: float32 or float16, or the bytes of bfloat16.

    Raises:
        InputError: If the dtype does not hold its values.
    """
    if values.dim() == 1:
        return values.to(torch.float32)
    rounded = values.to(DTYPES[dtype][1]).contiguous()
    if not bool(rounded.isfinite().all()):
        raise InputError(f"{name} exceeds what {dtype} holds; choose bfloat16 or float32")
    return rounded.view(torch.uint8) if rounded.dtype == torch.bfloat16 else rounded


def _stored(matched: Matched, folded: Source, dtype: str) -> Tensor:
    info = folded.tensors[matched.source]
    whole = folded.rows(matched.source, 0, info.matrix[0]).reshape(info.shape)
    return as_stored(matched.arrange(whole), dtype, matched.source)


def differing_keys(written: Any, reader: Any) -> list[str]:
    """The keys of a file's metadata that another file has not, or has with another value; but for its file type."""
    return [
        name
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
        and name not in (FILE_TYPE, FOLD)
        and (name not in written.fields or written.fields[name].contents() != field.contents())
    ]


def _check(reader: Any, path: Path, folded: Source, matched: list[Matched], dtype: str) -> None:
    """Read the file that was written: each tensor has its bits, each key but the file type that of the metadata."""
    written = read(path)
    tensors = {tensor.name: tensor for tensor in written.tensors}
    faults = [
        each.name
        for each in matched
        if _stored(each, folded, dtype).numpy().tobytes() != tensors[each.name].data.tobytes()
    ] + differing_keys(written, reader)
    if faults:
        raise ModelError(f"{path.name} was not written as it should be: {shortened(faults)}; check the disk")


def _as_it_is(values: Tensor) -> Tensor:
    return values
