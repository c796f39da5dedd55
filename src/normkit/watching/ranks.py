"""The processes that train one model: what each of them holds of it, and how their numbers become one.

Every process sends one packed vector a report, in a group of its own, and none waits for it. Sums are added, of peaks
the largest is kept. Processes that share their data, as under tensor parallelism, count the same rows: a line of a
table that is the same to the bit in several of them is counted once. A line that holds whole numbers only, of rows
that are all zero or NaN, tells nothing: it is counted once where the loss is the same too.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normkit.watching.mailbox import CopyLetter, Letter
from normkit.watching.parameters import PARAMETER_SUMS
from normkit.watching.tables import Tables, merged
from normkit.watching.tallies import ROW_SUMS, TAP_SUMS

_MOST_UNDER_WAY = 32


class Ranks:
    """One process alone.

    Attributes:
        size: Number of processes whose numbers are pooled.
        place: Of this one among them.
    """

    size = 1
    place = 0

    def shares(self, count: int) -> list[float]:
        """Of each of so many parameters, 1 over the number of processes that hold the same part of it."""
        return [1.0] * count

    def gather(self, step: int, vector: Tensor) -> Letter:
        """Send the packed tables of a step to all processes: the letter is of shape (ranks, entries)."""
        del step
        return CopyLetter(vector[None])

    def pooled(self, vectors: Tensor, tables: Tables, line: int) -> Tensor:
        """One packed vector for all processes; `line` is that of the measured step in the table "steps"."""
        del tables, line
        return vectors[0]

    def spreads(self, vectors: Tensor, tables: Tables) -> Tensor:
        """Of each parameter and of its gradient, the largest relative difference between processes: (parameters, 2)."""
        del vectors
        return torch.zeros(len(tables["parameters"]), 2, dtype=torch.float64)


class ManyRanks(Ranks):
    """Several processes with the same norms.

    Args:
        group: Of them, on the CPU, and used for nothing else.
        place: Of this process in the group.
        held: Of each process in the group, which part it holds of each parameter: processes of equal parts should hold
            the same numbers.
        compared: Of each parameter, whether they are to be compared.
    """

    def __init__(self, group: Any, place: int, held: Sequence[Sequence[Hashable]], compared: Sequence[bool]) -> None:
        self.size, self.place = len(held), place
        self._group = group
        columns = list(zip(*held, strict=True))
        own = [column[self.place] for column in columns]
        self._shares = [1 / column.count(part) for column, part in zip(columns, own, strict=True)]
        # Of each process and parameter, the first process that holds the same part.
        firsts = [[column.index(part) for part in column] for column in columns]
        self._firsts = torch.tensor(firsts, dtype=torch.long).reshape(len(columns), self.size).T
        self._compared = torch.tensor(compared, dtype=torch.bool)
        self._under_way: list[_GatheredLetter] = []

    def shares(self, count: int) -> list[float]:
        """Of each parameter, 1 over the number of processes that hold the same part of it."""
        assert count == len(self._shares)
        return self._shares

    def gather(self, step: int, vector: Tensor) -> Letter:
        """Send the packed tables of a step to all processes."""
        # Where another process has stopped sending, nothing more is sent: a later report would meet an earlier one.
        self._under_way = [letter for letter in self._under_way if not letter.has_arrived()]
        letter = _GatheredLetter(step, vector, self._group if len(self._under_way) < _MOST_UNDER_WAY else None)
        self._under_way.append(letter)
        return letter

    def pooled(self, vectors: Tensor, tables: Tables, line: int) -> Tensor:
        """One packed vector for all processes: what several of them counted alike is there once."""
        own = vectors.clone()
        by_name = tables.stacked(own)
        losses = by_name["steps"][:, line, 1]
        for keys, names in _SHARED_LINES.items():
            lines = torch.cat([by_name[name].flatten(2) for name in keys], -1)
            repeated = _repeated(lines, losses)
            for name in names:
                empty = next(table.empty for table in tables.layout if table.name == name)
                by_name[name][repeated] = empty
        vector = merged(tuple(own), tables.sums)
        # A call of the model is a call of each norm in every process.
        calls = ROW_SUMS.index("calls")
        tables.part(vector, "rows")[:, calls] = tables.stacked(vectors)["rows"][..., calls].amax(0)
        # Each loss is a mean over its own rows, and what is minimized is the mean of the losses.
        tables.part(vector, "taps")[:, TAP_SUMS.index("squares")] /= len(set(losses.view(torch.int64).tolist())) ** 2
        return vector

    def spreads(self, vectors: Tensor, tables: Tables) -> Tensor:
        """Of each parameter and of its gradient, how far those differ that should be alike."""
        sums = tables.stacked(vectors)["parameters"]
        values = {name: sums[..., place] for place, name in enumerate(PARAMETER_SUMS)}
        length = values["squares"].sqrt()
        longest = length.amax(0)
        # A sum of elements of either sign is as large as their length times the square root of how many there are.
        most = longest * values["elements"].amax(0).sqrt()
        of_gradient = values["gradient squares"].sqrt()
        spread = torch.maximum(self._spread(length, longest), self._spread(values["sum"], most))
        return torch.stack([spread, self._spread(of_gradient, of_gradient.amax(0))], -1)

    def _spread(self, values: Tensor, scale: Tensor) -> Tensor:
        """Largest difference from the first process that holds the same part, over a scale."""
        first = values.gather(0, self._firsts)
        alike = (values == first) | (values.isnan() & first.isnan()) | ~self._compared
        difference = ((values - first).abs() / scale).nan_to_num(nan=torch.inf)
        return torch.where(alike, 0.0, difference).amax(0)


_SHARED_LINES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("rows", "row peaks"): ("rows", "row peaks", "bins"),
    ("taps",): ("taps",),
    ("heads", "head peaks"): ("heads", "head peaks"),
}
"""What tells whether two processes counted the same, and the tables of which it is true then."""


def _repeated(lines: Tensor, losses: Tensor) -> Tensor:
    """Of lines (ranks, places, entries), which are those of an earlier rank again, to the bit: (ranks, places)."""
    # One 64-bit number a line: what is equal has equal ones, and of others two in 2^64 do.
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (lines.shape[-1] + 1,), generator=generator) * 2 + 1
    tells = (lines.isfinite() & (lines != lines.round())).any(-1)
    beside = torch.where(tells, 0, losses.view(torch.int64)[:, None])
    keys = (lines.contiguous().view(torch.int64) * factors[:-1]).sum(-1) + beside * factors[-1]
    ordered, order = keys.sort(dim=0, stable=True)
    again = torch.zeros_like(tells)
    again[1:] = ordered[1:] == ordered[:-1]
    return torch.zeros_like(tells).scatter(0, order, again)


class _GatheredLetter:
    """Every process's vector, on its way to every other."""

    def __init__(self, step: int, vector: Tensor, group: Any) -> None:
        self._step, self._group = step, group
        self._copy: CopyLetter | None = CopyLetter(torch.cat([vector.new_full((1,), step), vector]))
        self._received = torch.empty(0)
        self._work: Any = None
        self.has_arrived()

    def has_arrived(self, patience: float = 0.0) -> bool:
        self._send(patience)
        if self._copy is not None:
            return False
        deadline = time.monotonic() + patience
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _send(self, patience: float) -> None:
        """Once the copy is on the host, gather: a device's own queue and communicator are left to the training."""
        if self._copy is None or not self._copy.has_arrived(patience):
            return
        vector, self._copy = self._copy.read(), None
        if self._group is None:
            return
        try:
            self._received = torch.empty(dist.get_world_size(self._group), len(vector), dtype=vector.dtype)
            self._work = dist.all_gather(list(self._received), vector, group=self._group, async_op=True)
        # A process that died has closed its connections; what comes of that is not the watch's to decide.
        except RuntimeError:
            self._work = None

    def read(self) -> Tensor | None:
        if self._work is None:
            return None
        try:
            self._work.wait()
        except RuntimeError:
            return None
        # A process that left out a step sends another one's numbers.
        steps, vectors = self._received[:, 0], self._received[:, 1:]
        return vectors if bool((steps == self._step).all()) else None
