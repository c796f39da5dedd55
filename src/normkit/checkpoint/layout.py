"""The files of a folded checkpoint and the place of each tensor in them, known before a matrix is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.checkpoint.header import TensorInfo, header_bytes, read_metadata
from normkit.checkpoint.model_folder import INDEX, WEIGHTS, read_json
from normkit.checkpoint.plan import Edit, FoldPlan, TensorEdit
from normkit.checkpoint.source import TORCH, CheckpointSource


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A file of weights of the output; it has the name of one of the source."""

    source: Path
    """The source's file of that name."""
    edits: tuple[Edit, ...]
    """Its tensors, in the order of their bytes."""
    header: bytes
    starts: tuple[int, ...]
    """First byte of each tensor, and the size of the file at the end."""
    read: tuple[int, ...]
    """For each tensor a byte of the source's file before which nothing is needed from there on, in the same order; and
    the size of that file at the end."""

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.source.name

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.starts[-1]


def lay_out(plan: FoldPlan, source: CheckpointSource) -> tuple[FileLayout, ...]:
    """The files of the output: each tensor stays in its file, created ones go into the last.

    Within a file the tensors keep their order, except that wide dtypes come before narrow ones: readers expect the
    numbers to be aligned.
    """
    tensors = source.tensors
    place = {name: position for position, name in enumerate(tensors)}
    held: dict[Path, list[Edit]] = {file: [] for file in source.files}
    for edit in sorted(plan.edits, key=lambda edit: place.get(edit.name, len(place))):
        held[tensors[edit.name].file if edit.name in tensors else source.files[-1]].append(edit)
    return tuple(_file(file, edits, source) for file, edits in held.items())


def output_info(edit: Edit, source: CheckpointSource) -> TensorInfo:
    """Dtype and shape of the tensor that an edit makes."""
    shape = source.tensors[edit.source].shape if isinstance(edit, TensorEdit) else (edit.size,)
    return TensorInfo(edit.dtype, shape)


def index(layouts: tuple[FileLayout, ...], source: CheckpointSource) -> dict[str, Any] | None:
    """The index of a sharded checkpoint; None for a single file. Other entries of the source's index are kept."""
    if source.files[0].name == WEIGHTS:
        return None
    document = read_json(source.files[0].parent / INDEX)
    infos = {edit.name: output_info(edit, source) for layout in layouts for edit in layout.edits}
    metadata = document.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(math.prod(info.shape) for info in infos.values())
    metadata["total_size"] = sum(info.nbytes for info in infos.values())
    named = {edit.name: layout.name for layout in layouts for edit in layout.edits}
    return {**document, "metadata": metadata, "weight_map": dict(sorted(named.items()))}


def _file(file: Path, edits: list[Edit], source: CheckpointSource) -> FileLayout:
    infos = {edit.name: output_info(edit, source) for edit in edits}
    # Dtypes that torch does not have are packed, so one byte wide or less.
    edits = sorted(edits, key=lambda edit: -TORCH[edit.dtype].itemsize if edit.dtype in TORCH else -1)
    header = header_bytes({edit.name: infos[edit.name] for edit in edits}, read_metadata(file))
    starts = [len(header)]
    for edit in edits:
        starts.append(starts[-1] + infos[edit.name].nbytes)
    reached = file.stat().st_size
    read = [reached]
    for edit in reversed(edits):
        located = source.tensors.get(edit.name)
        if located is not None and located.file == file:
            reached = min(reached, located.start)
        read.append(reached)
    return FileLayout(source=file, edits=tuple(edits), header=header, starts=tuple(starts), read=tuple(reversed(read)))
