"""The processes that train one model: what each of them holds of it, and how their numbers become one.

Every process sends one packed vector for each report, in a group used for nothing else, and none waits for another.
Sums are added, of peaks the largest is kept. Processes that share their data, as under tensor parallelism, count the
same rows: a line of a table that is the same to the bit in several of them is counted once. A line of whole numbers
only, of rows that are all zero or NaN, shows no such thing: it is counted once where the loss is the same too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from normkit.identification.sharding import is_distributed, local, whole
from normkit.identification.sites import NormSite
from normkit.measurement.row_counters import GRADIENT_SUMS, ROW_SUMS, Table, Tables
from normkit.watching.parameters import PARAMETER_SUMS


class Pending(Protocol):
    """Numbers on their way to the host."""

    def is_ready(self, patience: float = 0.0) -> bool:
        """Whether they can be read without waiting, or after at most so many seconds."""

    def read(self) -> Tensor | None:
        """The numbers, in float64 on the CPU; None if they were lost."""


class AsyncCopy:
    """The copy of one tensor to the host; the tensor may be changed as soon as the copy is made."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.Event | None = None
        if values.device.type == "cpu":
            self._values = values.detach().clone()
            return
        # A copy to pageable memory would wait for the device.
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
        self._values = pinned.copy_(values.detach(), non_blocking=True)
        self._event = torch.Event(values.device)
        self._event.record()

    def is_ready(self, patience: float = 0.0) -> bool:
        """Whether the copy is complete; any patience waits until it is."""
        if self._event is None:
            return True
        if patience:
            self._event.synchronize()
        return bool(self._event.query())

    def read(self) -> Tensor:
        """The copied numbers."""
        return self._values.double()


class CopyQueue:
    """Pending numbers in the order in which they were put in, each with its training step.

    Example:
        >>> queue = CopyQueue()
        >>> queue.put(3, AsyncCopy(torch.ones(2)))
        >>> [(step, values.tolist()) for step, values in queue.take_ready()]
        [(3, [1.0, 1.0])]
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Pending]] = deque()

    def __len__(self) -> int:
        """How many have not been taken out."""
        return len(self._pending)

    def put(self, step: int, values: Pending) -> None:
        """Append the numbers of a step."""
        self._pending.append((step, values))

    def take_ready(self, patience: float = 0.0) -> Iterator[tuple[int, Tensor]]:
        """Take out the oldest entries that are ready, or become ready in so many seconds; lost ones are skipped."""
        while self._pending and self._pending[0][1].is_ready(patience):
            step, pending = self._pending.popleft()
            values = pending.read()
            if values is not None:
                yield step, values


_MOST_PENDING = 32


class Ranks:
    """One process alone."""

    size = 1
    """Number of processes whose numbers are pooled."""
    place = 0
    """Place of this process among them."""

    def shares(self, count: int) -> list[float]:
        """For each of so many parameters, 1 over the number of processes that hold the same part of it."""
        return [1.0] * count

    def gather(self, step: int, vector: Tensor) -> Pending:
        """Send the packed tables of a step to all processes: what arrives has shape (ranks, entries)."""
        del step
        return AsyncCopy(vector[None])

    def pooled(self, vectors: Tensor, tables: Tables, line: int) -> Tensor:
        """One packed vector for all processes; `line` is that of the measured step in the table "steps"."""
        del tables, line
        return vectors[0]

    def spreads(self, vectors: Tensor, tables: Tables) -> Tensor:
        """The largest relative difference between processes of each parameter and its gradient: (parameters, 2)."""
        del vectors
        return torch.zeros(len(tables["parameters"]), 2, dtype=torch.float64)


class ManyRanks(Ranks):
    """Several processes with the same norms.

    Args:
        group: Their group, on the CPU, used for nothing else.
        place: Place of this process in the group.
        held: For each process in the group, which part it holds of each parameter: processes of equal parts should hold
            the same numbers.
        compared: For each parameter, whether it is to be compared.
    """

    def __init__(self, group: Any, place: int, held: Sequence[Sequence[Hashable]], compared: Sequence[bool]) -> None:
        self.size, self.place = len(held), place
        self._group = group
        columns = list(zip(*held, strict=True))
        own = [column[self.place] for column in columns]
        self._shares = [1 / column.count(part) for column, part in zip(columns, own, strict=True)]
        # For each process and parameter, the first process that holds the same part.
        firsts = [[column.index(part) for part in column] for column in columns]
        self._firsts = torch.tensor(firsts, dtype=torch.long).reshape(len(columns), self.size).T
        self._compared = torch.tensor(compared, dtype=torch.bool)
        self._pending: list[_Gathered] = []

    def shares(self, count: int) -> list[float]:
        """For each parameter 1 over the number of processes that hold the same part of it."""
        assert count == len(self._shares)
        return self._shares

    def gather(self, step: int, vector: Tensor) -> Pending:
        """Send the packed tables of a step to all processes."""
        # Once another process has stopped sending, nothing more is sent: a later report would meet an earlier one.
        self._pending = [each for each in self._pending if not each.is_ready()]
        gathered = _Gathered(step, vector, self._group if len(self._pending) < _MOST_PENDING else None)
        self._pending.append(gathered)
        return gathered

    def pooled(self, vectors: Tensor, tables: Tables, line: int) -> Tensor:
        """One packed vector for all processes: rows that several of them counted alike count once."""
        own = vectors.clone()
        by_name = tables.stacked(own)
        losses = by_name["steps"][:, line, 1]
        for keys, names in _SHARED_LINES.items():
            lines = torch.cat([by_name[name].flatten(2) for name in keys], -1)
            repeated = _repeated(lines, losses)
            for name in names:
                empty = next(table.empty for table in tables.layout if table.name == name)
                by_name[name][repeated] = empty
        vector = tables.merged(own)
        # One call of the model is one call of each norm in every process.
        calls = ROW_SUMS.index("calls")
        tables.part(vector, "rows")[:, calls] = tables.stacked(vectors)["rows"][..., calls].amax(0)
        # Each loss is a mean over its own rows, and the mean of the losses is minimized.
        squares = tables.part(vector, "activation gradients")[:, GRADIENT_SUMS.index("squares")]
        squares /= len(set(losses.view(torch.int64).tolist())) ** 2
        return vector

    def spreads(self, vectors: Tensor, tables: Tables) -> Tensor:
        """How far those parameters, and their gradients, differ that should be alike."""
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
    ("activation gradients",): ("activation gradients",),
    ("heads", "head peaks"): ("heads", "head peaks"),
}
"""Tables that show whether two processes counted the same rows, and the tables for which it is true then."""


def _repeated(lines: Tensor, losses: Tensor) -> Tensor:
    """Which of the lines (ranks, places, entries) repeat those of an earlier rank to the bit: (ranks, places)."""
    # One 64-bit number for each line: equal lines have equal numbers, and two others only once in 2^64.
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (lines.shape[-1] + 1,), generator=generator) * 2 + 1
    tells = (lines.isfinite() & (lines != lines.round())).any(-1)
    beside = torch.where(tells, 0, losses.view(torch.int64)[:, None])
    keys = (lines.contiguous().view(torch.int64) * factors[:-1]).sum(-1) + beside * factors[-1]
    ordered, order = keys.sort(dim=0, stable=True)
    again = torch.zeros_like(tells)
    again[1:] = ordered[1:] == ordered[:-1]
    return torch.zeros_like(tells).scatter(0, order, again)


class _Gathered:
    """Every process's vector, on its way to every other."""

    def __init__(self, step: int, vector: Tensor, group: Any) -> None:
        self._step, self._group = step, group
        self._copy: AsyncCopy | None = AsyncCopy(torch.cat([vector.new_full((1,), step), vector]))
        self._received = torch.empty(0)
        self._work: Any = None
        self.is_ready()

    def is_ready(self, patience: float = 0.0) -> bool:
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
        """Gather once the copy is on the host: the device's own queue and communicator are left to the training."""
        if self._copy is None or not self._copy.is_ready(patience):
            return
        vector, self._copy = self._copy.read(), None
        if self._group is None:
            return
        try:
            self._received = torch.empty(dist.get_world_size(self._group), len(vector), dtype=vector.dtype)
            self._work = dist.all_gather(list(self._received), vector, group=self._group, async_op=True)
        # A process that died has closed its connections; the training, not the watch, decides what follows.
        except RuntimeError:
            self._work = None

    def read(self) -> Tensor | None:
        if self._work is None:
            return None
        try:
            self._work.wait()
        except RuntimeError:
            return None
        # A process that left out a step sends the numbers of another step.
        steps, vectors = self._received[:, 0], self._received[:, 1:]
        return vectors if bool((steps == self._step).all()) else None


class ShardedParameters:
    """The parameters of norms that are split over processes, as entries of the table "norm values".

    Their values travel with a report, so that one process reads all of them.

    Args:
        sites: The norms.
        shares: By a parameter's id, 1 over the number of processes that hold the same part of it.
    """

    def __init__(self, sites: Sequence[NormSite], shares: Mapping[int, float]) -> None:
        self._modules = [site.module for site in sites if site.module is not None]
        self._starts: dict[int, int] = {}
        self._parts: list[tuple[Any, Tensor, float]] = []
        self._size = 0
        for module in self._modules:
            for parameter in module.parameters():
                if is_distributed(parameter) and id(parameter) not in self._starts:
                    self._starts[id(parameter)] = self._size
                    positions = self._size + _held_positions(parameter)
                    self._parts.append((parameter, positions, shares.get(id(parameter), 1.0)))
                    self._size += parameter.numel()

    @property
    def table(self) -> Table:
        """The table; it has no entries where nothing is split."""
        return Table(name="norm values", shape=(self._size,))

    def write(self, table: Tensor) -> None:
        """Put in the part that this process holds."""
        for parameter, positions, share in self._parts:
            held = local(parameter).detach().flatten().to(table.dtype)
            table[positions] = held * share

    @contextmanager
    def read(self, table: Tensor) -> Iterator[None]:
        """While this lasts, the norms have the values of a pooled table as plain parameters."""

        def value(parameter: Any) -> Tensor:
            start = self._starts[id(parameter)]
            part = table[start : start + parameter.numel()]
            return part.view(parameter.shape).to(parameter.dtype)

        with ExitStack() as stack:
            for module in self._modules if self._size else ():
                stack.enter_context(whole(module, value))
            yield


def _held_positions(parameter: Any) -> Tensor:
    """The positions in the whole parameter of the elements that this process holds."""
    from torch.distributed.tensor import distribute_tensor

    positions = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
    # Without a source, each process takes its part of what it has itself.
    split: Any = distribute_tensor(positions, parameter.device_mesh, parameter.placements, src_data_rank=None)
    held: Tensor = split.to_local().flatten()
    return held
