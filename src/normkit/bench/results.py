"""What was measured, as frozen values with JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from normkit.bench.cases import Case


@dataclass(frozen=True)
class Machine:
    """Where and when: the CPU's name, threads used, version of torch, what computed normkit's norms, date."""

    cpu: str
    threads: int
    torch: str
    kernels: str
    date: str


@dataclass(frozen=True)
class Measurement:
    """One peer in one case.

    Attributes:
        peer: Its name.
        seconds: Median time of a call.
        spread: Interquartile range of the samples over their median.
        error: Largest relative error against float64, over all that the call returns.
        worst: What has that error: "y", "dx", "dweight" and so on.
        is_wrong: The error is larger than the dtype explains.
        is_fresh: The pass is "forward-out", and the peer allocates its output, having no `out=`.
        saved_bytes: Kept for backward, parameters left out; None where there is no backward pass.
    """

    peer: str
    seconds: float
    spread: float
    error: float
    worst: str
    is_wrong: bool
    is_fresh: bool
    saved_bytes: int | None


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes:
        case: What was measured.
        floor_seconds: Median time to copy the bytes that must move.
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


@dataclass(frozen=True)
class Benchmark:
    """One run."""

    machine: Machine
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`; times in seconds, sizes in bytes."""
        return {"schema_version": 1, **dataclasses.asdict(self)}
