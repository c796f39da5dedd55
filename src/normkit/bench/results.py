"""The measurements, as frozen values with JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from normkit.bench.cases import Case
from normkit.files import finite


@dataclass(frozen=True)
class Machine:
    """The machine, the versions and the date of a benchmark."""

    cpu: str
    threads: int
    """Threads of the CPU that torch uses."""
    torch: str
    kernels: str
    """The code that computed normkit's norms."""
    date: str
    """In UTC."""
    gpu: str | None = None
    """Name of the GPU, if one was measured."""
    versions: tuple[tuple[str, str], ...] = ()
    """(package, version) of other packages that take part on a GPU."""


@dataclass(frozen=True)
class Measurement:
    """One peer in one case."""

    peer: str
    seconds: float
    """Median time of a call; on a GPU, the time that the GPU works."""
    spread: float
    """Interquartile range of the samples over their median."""
    error: float
    """Largest relative error against float64, over all that the call returns."""
    worst: str
    """The tensor with that error: "y", "dx", "dweight" and so on."""
    is_wrong: bool
    """The error is larger than the dtype explains."""
    is_fresh: bool
    """The pass is "forward-out", and the peer allocates its output because it has no `out=`."""
    saved_bytes: int | None
    """Kept for backward, without parameters; None if there is no backward pass."""
    bytes_per_second: float
    """The bytes that must move, divided by the time."""
    host_seconds: float | None = None
    """On a GPU, median time until the call returns, with an empty queue; None on the CPU."""

    @property
    def latency(self) -> float:
        """The time that each of many calls adds: of host and GPU, which work at the same time, the slower one's."""
        return max(self.seconds, self.host_seconds or 0.0)


@dataclass(frozen=True)
class Cell:
    """One case."""

    case: Case
    floor_seconds: float
    """Median time to copy the bytes that must move; on a GPU, the time that the GPU works."""
    floor_spread: float
    """Interquartile range over the median, as in `Measurement.spread`."""
    others: float | None
    """Share of the machine that other processes used meanwhile; None if the system does not say."""
    input_bytes: int
    """Bytes of x."""
    measurements: tuple[Measurement, ...]
    """One per peer that took part."""
    left_out: tuple[tuple[str, str], ...]
    """(peer, reason) of each other peer."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; an error that is not finite, as that of NaN, is null."""
        document = dataclasses.asdict(self)
        for found in document["measurements"]:
            found["error"] = finite(found["error"])
        return document


@dataclass(frozen=True)
class Benchmark:
    """One run."""

    machine: Machine
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`; times in seconds, sizes in bytes."""
        return {
            "schema_version": 2,
            "machine": dataclasses.asdict(self.machine),
            "cells": [cell.to_json() for cell in self.cells],
        }
