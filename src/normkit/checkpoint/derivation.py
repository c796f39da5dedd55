"""Every tensor of a result made anew from the source, a chunk at a time, and held against what the files say."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normkit.checkpoint.applying import MadeVector, Outcome, contents, vectors
from normkit.checkpoint.header import read_header
from normkit.checkpoint.layout import FileLayout, output_info
from normkit.checkpoint.plan import Edit, Plan, Relation
from normkit.checkpoint.source import CheckpointSource
from normkit.checkpoint.workers import Workers
from normkit.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """A tensor that is not what its source makes of it.

    Attributes:
        name: Of the tensor.
        what: Its first element that differs, what is there and what follows from the source; or why none follows.
    """

    name: str
    what: str


@dataclass(kw_only=True)
class Derived:
    """What came of making all tensors anew.

    Attributes:
        tensors: How many there are of each relation.
        elements: Their elements.
        deviations: By relation, in the order of the files.
        residuals: Of each sum, as `Written` has them.
    """

    tensors: Counter[Relation] = field(default_factory=Counter)
    elements: Counter[Relation] = field(default_factory=Counter)
    deviations: dict[Relation, list[Deviation]] = field(default_factory=dict)
    residuals: dict[str, float] = field(default_factory=dict)


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


def derive(
    plan: Plan,
    source: CheckpointSource,
    layouts: Sequence[FileLayout],
    folder: Path,
    *,
    workers: Workers,
) -> Derived:
    """Make every tensor of some files anew and compare it, bit for bit, with what lies there.

    Args:
        plan: What becomes of each tensor.
        source: What it is made from.
        layouts: Files of the result; their sizes are right.
        folder: Of the result.
        workers: Threads; they count the bytes that are compared.

    Raises:
        ModelError: If gains or biases cannot be made, or a file cannot be read to its end.
    """
    new = vectors(plan, source, threads=workers.threads)
    derived = Derived()
    with ExitStack() as opened:
        tasks = []
        for layout in layouts:
            descriptor = os.open(folder / layout.name, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            for edit, start in zip(layout.edits, layout.starts[:-1], strict=True):
                tasks.append(_Comparison(edit, source, new, descriptor, start, workers))
        deviations = workers.map([task.run for task in tasks])
    for task, deviation in zip(tasks, deviations, strict=True):
        relation = task.edit.relation
        derived.tensors[relation] += 1
        derived.elements[relation] += math.prod(output_info(task.edit, source).shape)
        if deviation is not None:
            derived.deviations.setdefault(relation, []).append(deviation)
        if relation == "sum":
            derived.residuals[task.edit.name] = task.outcome.residual
    return derived


class _Comparison:
    """One tensor of the result and the edit that makes it."""

    def __init__(
        self,
        edit: Edit,
        source: CheckpointSource,
        new: Mapping[str, MadeVector],
        descriptor: int,
        start: int,
        workers: Workers,
    ) -> None:
        self.edit, self.outcome = edit, Outcome()
        self._source, self._new = source, new
        self._descriptor, self._start, self._workers = descriptor, start, workers

    def run(self) -> Deviation | None:
        """What is wrong with it, or None."""
        offset = self._start
        first, differing = "", 0
        try:
            for chunk in contents(self.edit, self._source, self._new, self.outcome):
                expected = chunk.contiguous().flatten()
                width = expected.element_size()
                stored = self._read(expected.numel() * width, offset).view(expected.dtype)
                unequal = _unequal(stored, expected)
                if unequal is not None:
                    if not first:
                        place = (offset - self._start) // width + int(unequal[0])
                        first = self._described(place, stored[unequal[0]], expected[unequal[0]])
                    differing += len(unequal)
                offset += expected.numel() * width
                self._workers.step(expected.numel() * width)
        except ModelError as error:
            return Deviation(name=self.edit.name, what=str(error))
        if not differing:
            return None
        more = f" (and {differing - 1:,} more of its elements)" if differing > 1 else ""
        return Deviation(name=self.edit.name, what=first + more)

    def _read(self, size: int, offset: int) -> Tensor:
        read = torch.empty(size, dtype=torch.uint8)
        room = memoryview(read.numpy().data)
        while room.nbytes:
            count = os.preadv(self._descriptor, [room], offset)
            if count == 0:
                raise ModelError(f"{self.edit.name} ends at byte {offset} of its file, which became shorter")
            room, offset = room[count:], offset + count
        return read

    def _described(self, place: int, stored: Tensor, expected: Tensor) -> str:
        index = np.unravel_index(place, output_info(self.edit, self._source).shape)
        where = ", ".join(str(int(axis)) for axis in index)
        return f"{self.edit.name}[{where}] is {stored.item()!r}, {expected.item()!r} follows from the source"


def _unequal(stored: Tensor, expected: Tensor) -> Tensor | None:
    """The places of two flat tensors whose bits differ, or None."""
    left, right = stored.view(torch.uint8).numpy(), expected.view(torch.uint8).numpy()
    if np.array_equal(left, right):
        return None
    width = expected.dtype.itemsize
    return torch.from_numpy((left != right).reshape(-1, width).any(1).nonzero()[0])


def _header_fault(layout: FileLayout, path: Path) -> str:
    """What a header says that it should not."""
    try:
        found = read_header(path)
    except ModelError as error:
        return str(error)
    expected = {edit.name: edit.dtype for edit in layout.edits}
    if absent := [name for name in expected if name not in found]:
        return f"{layout.name} lacks {absent[0]}"
    if strangers := [name for name in found if name not in expected]:
        return f"{layout.name} holds {strangers[0]!a}, which does not follow from the source"
    if wrong := [name for name in found if found[name].dtype != expected[name]]:
        return f"{wrong[0]} in {layout.name} is {found[wrong[0]].dtype}, {expected[wrong[0]]} follows from the source"
    return f"the header of {layout.name} gives another order, other shapes or other texts than follow from the source"
