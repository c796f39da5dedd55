"""Every tensor of a result made again from the source, a chunk at a time, and compared with what the files hold."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from normkit.checkpoint.applying import MadeVector, contents
from normkit.checkpoint.matrices import Outcome
from normkit.checkpoint.model_folder import read_exactly
from normkit.checkpoint.plan import MEASURED, Edit, Relation
from normkit.checkpoint.reader import CheckpointSource, read_header
from normkit.checkpoint.shard import FileLayout, output_info
from normkit.errors import ModelError

if TYPE_CHECKING:
    from normkit.checkpoint.folding import Workers


@dataclass(kw_only=True)
class Derived:
    """The result of making all tensors again."""

    tensors: Counter[Relation] = field(default_factory=Counter)
    """How many tensors there are of each relation."""
    elements: Counter[Relation] = field(default_factory=Counter)
    """How many elements they have."""
    deviations: dict[Relation, list[str]] = field(default_factory=dict)
    """For each tensor that is not what follows from the source one sentence, by relation, in the order of the files."""
    residuals: dict[str, float] = field(default_factory=dict)
    """Residual of each tensor of a `MEASURED` relation, as in `Written`."""


def header_faults(layouts: Sequence[FileLayout], folder: Path) -> dict[str, str]:
    """Name -> fault, of each file whose header or size is not the one that follows from the source."""
    found = {}
    for layout in layouts:
        path = folder / layout.name
        if not path.is_file():
            found[layout.name] = f"{layout.name} is missing"
            continue
        try:
            with path.open("rb") as file:
                header = file.read(len(layout.header))
            size = path.stat().st_size
        except OSError as error:
            found[layout.name] = f"{layout.name} cannot be read: {error.strerror}"
            continue
        if header != layout.header:
            found[layout.name] = _header_fault(layout, path)
        elif size != layout.size:
            found[layout.name] = f"{layout.name} has {size:,} bytes, {layout.size:,} follow from the source"
    return found


def _header_fault(layout: FileLayout, path: Path) -> str:
    """The first difference of a header from the one that follows from the source."""
    try:
        found = read_header(path)
    except ModelError as error:
        return str(error)
    expected = {edit.name: edit.dtype for edit in layout.edits}
    if absent := [name for name in expected if name not in found]:
        return f"{layout.name} lacks {absent[0]}"
    if unexpected := [name for name in found if name not in expected]:
        return f"{layout.name} holds {unexpected[0]!a}, which does not follow from the source"
    if wrong := [name for name in found if found[name].dtype != expected[name]]:
        return f"{wrong[0]} in {layout.name} is {found[wrong[0]].dtype}, {expected[wrong[0]]} follows from the source"
    return f"the header of {layout.name} gives another order, other shapes or other texts than follow from the source"


def derive(
    vectors: Mapping[str, MadeVector],
    source: CheckpointSource,
    layouts: Sequence[FileLayout],
    folder: Path,
    *,
    workers: Workers,
) -> Derived:
    """Make every tensor of some files again and compare it, bit for bit, with the files.

    The vectors are made again already, and the sizes of the files are right. The workers count the bytes compared.

    Raises:
        ModelError: If a file cannot be read to its end.
    """
    edits: list[tuple[Edit, Outcome]] = []
    with ExitStack() as opened:
        tasks = []
        for layout in layouts:
            path = folder / layout.name
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            for edit, start in zip(layout.edits, layout.starts[:-1], strict=True):
                edits.append((edit, Outcome()))
                tasks.append(partial(_deviation, *edits[-1], source, vectors, descriptor, start, path, workers))
        deviations = workers.map(tasks)
    derived = Derived()
    for (edit, outcome), deviation in zip(edits, deviations, strict=True):
        derived.tensors[edit.relation] += 1
        derived.elements[edit.relation] += math.prod(output_info(edit, source.tensors).shape)
        if deviation is not None:
            derived.deviations.setdefault(edit.relation, []).append(deviation)
        if edit.relation in MEASURED:
            derived.residuals[edit.name] = outcome.residual
    return derived


def _deviation(
    edit: Edit,
    outcome: Outcome,
    source: CheckpointSource,
    vectors: Mapping[str, MadeVector],
    descriptor: int,
    start: int,
    path: Path,
    workers: Workers,
) -> str | None:
    """How a tensor of the result, which starts at a byte of a file, differs from what its edit makes; None if not."""
    offset, first, differing = start, "", 0
    try:
        for chunk in contents(edit, source, vectors, outcome):
            expected = chunk.contiguous().flatten()
            width = expected.element_size()
            read = torch.empty(expected.numel() * width, dtype=torch.uint8)
            read_exactly(descriptor, memoryview(read.numpy().data), offset, path)
            due = expected.view(torch.uint8).numpy()
            if not np.array_equal(read.numpy(), due):
                unequal = (read.numpy() != due).reshape(-1, width).any(1).nonzero()[0]
                if not first:
                    place = (offset - start) // width + int(unequal[0])
                    index = np.unravel_index(place, output_info(edit, source.tensors).shape)
                    where = ", ".join(str(int(axis)) for axis in index)
                    values = read.view(expected.dtype)[unequal[0]].item(), expected[unequal[0]].item()
                    first = f"{edit.name}[{where}] is {values[0]!r}, {values[1]!r} follows from the source"
                differing += len(unequal)
            offset += expected.numel() * width
            workers.step(expected.numel() * width)
    except ModelError as error:
        return str(error)
    more = f" (and {differing - 1:,} more of its elements)" if differing > 1 else ""
    return first + more if differing else None
