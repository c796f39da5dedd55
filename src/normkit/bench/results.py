"""What was measured, as frozen values with JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from normkit.bench.cases import Case
from normkit.files import finite


@dataclass(frozen=True)
class Machine:
    """Where and when.

    Attributes:
        cpu: Its name.
        threads: Of the CPU, used by torch.
        torch: Its version.
        kernels: What computed normkit's norms.
        date: In UTC.
        gpu: The GPU's name, where one was measured.
        versions: (package, version) of what else takes part on a GPU.
    """

    cpu: str
    threads: int
    torch: str
    kernels: str
    date: str
    gpu: str | None = None
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Measurement:
    """One peer in one case.

    Attributes:
        peer: Its name.
        seconds: Median time of a call; on a GPU, of what it does there.
        spread: Interquartile range of the samples over their median.
        error: Largest relative error against float64, over all that the call returns.
        worst: What has that error: "y", "dx", "dweight" and so on.
        is_wrong: The error is larger than the dtype explains.
        is_fresh: The pass is "forward-out", and the peer allocates its output, having no `out=`.
        saved_bytes: Kept for backward, parameters left out; None where there is no backward pass.
        bytes_per_second: The bytes that must move, over the time.
        host_seconds: On a GPU, median time until the call returns, with nothing waited for; None on the CPU.
    """

    peer: str
    seconds: float
    spread: float
    error: float
    worst: str
    is_wrong: bool
    is_fresh: bool
    saved_bytes: int | None
    bytes_per_second: float
    host_seconds: float | None = None

    @property
    def latency(self) -> float:
        """What each of many calls adds: of host and GPU, which work at the same time, the slower one's."""
        return max(self.seconds, self.host_seconds or 0.0)


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes:
        case: What was measured.
        floor_seconds: Median time to copy the bytes that must move; on a GPU, of what it does there.
        floor_spread: As of a measurement.
        others: Share of the machine that other processes used meanwhile; None where the system does not say.
        input_bytes: Of x.
        measurements: One a peer that took part.
        left_out: (peer, why not) of the others.
    """

    case: Case
    floor_seconds: float
    floor_spread: float
    others: float | None
    input_bytes: int
    measurements: tuple[Measurement, ...]
    left_out: tuple[tuple[str, str], ...]

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
