"""One arm of a study measured with one seed, and the outcome."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normkit.errors import NormkitError
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.definition import Arm
from normkit.study.ranks import ALONE, Ranks
from normkit.study.statistics import Measurement

# At most one report of progress in so many seconds.
_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm with one seed; it can be sent to another process."""

    measure: Callable[[ArmContext, Arm], Measurement]
    """`Study.measure`."""
    arm: Arm
    seed: int
    settings: Settings
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    checkpoints: Path | None = None
    """Folder for the checkpoints of its training runs; None saves none."""
    curves: Path | None = None
    """Folder for the curves of its finished training runs; None leaves none."""
    ranks: Ranks = ALONE
    """The processes that share each batch."""

    def perform(self, report: Callable[[float], None]) -> Outcome:
        """Measure the arm, with torch's random numbers from the seed; `report` is called with the share that is done.

        The measurement is passed on as JSON, so that it equals the one that is read back later.
        """
        start = time.perf_counter()
        torch.manual_seed(self.seed)
        context = ArmContext(
            settings=self.settings,
            seed=self.seed,
            device=self.device,
            dtype=self.dtype,
            report=_throttled(report),
            checkpoints=self.checkpoints,
            curves=self.curves,
            ranks=self.ranks,
        )
        text = json.dumps(_plain(self.measure(context, self.arm)), allow_nan=False)
        return Outcome(text=text, seconds=time.perf_counter() - start)

    def attempt(self, report: Callable[[float], None]) -> Outcome:
        """Measure the arm; any exception becomes the outcome's error."""
        try:
            return self.perform(report)
        except Exception as error:
            if os.environ.get("NORMKIT_TRACEBACK"):
                traceback.print_exc()
            return Outcome(error=in_a_line(error))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measurement of an arm, or the reason that there is none."""

    text: str = ""
    """The measurement as JSON; empty if there is none."""
    seconds: float = 0.0
    error: str = ""
    """Why there is no measurement, in one line."""


def in_a_line(error: Exception) -> str:
    """The line that tells a user about an exception."""
    if isinstance(error, NormkitError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'system'}: {error.strerror or error}"
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory ({first or 'no more is known'}); choose smaller settings, or fewer --jobs"
    return f"this is a bug of normkit: {type(error).__name__}: {first}; NORMKIT_TRACEBACK=1 shows where"


def _throttled(report: Callable[[float], None]) -> Callable[[float], None]:
    last = -math.inf

    def throttled(share: float) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _BETWEEN_REPORTS:
            last = now
            report(float(share))

    return throttled


def _plain(value: Any) -> Any:
    """A measurement as JSON has it: a number that is not finite is None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
