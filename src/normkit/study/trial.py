"""One arm of a study measured with one seed, and what became of it."""

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
from normkit.study.laboratory import Laboratory
from normkit.study.ranks import ALONE, Ranks
from normkit.study.result import Arm, Measurement, Settings

# The share that is done is told so often at most, in seconds.
_BETWEEN_SHARES = 0.1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One arm with one seed.

    Attributes:
        measure: `Study.measure`.
        arm: What is measured.
        seed: With which.
        settings: Of the study.
        device: Where.
        dtype: Of parameters and batches.
        keep: Folder for its unfinished training runs; None keeps none.
        curves: Folder for the curves of its finished ones; None leaves none.
        ranks: The processes that share each batch.
    """

    measure: Callable[[Laboratory, Arm], Measurement]
    arm: Arm
    seed: int
    settings: Settings
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    keep: Path | None = None
    curves: Path | None = None
    ranks: Ranks = ALONE

    def perform(self, tell: Callable[[float], None]) -> Outcome:
        """Measure the arm; torch's random numbers start from the seed."""
        start = time.perf_counter()
        torch.manual_seed(self.seed)
        laboratory = Laboratory(
            settings=self.settings,
            seed=self.seed,
            device=self.device,
            dtype=self.dtype,
            tell=_seldom(tell),
            keep=self.keep,
            curves=self.curves,
            ranks=self.ranks,
        )
        text = json.dumps(_plain(self.measure(laboratory, self.arm)), allow_nan=False)
        return Outcome(text=text, seconds=time.perf_counter() - start)

    def attempt(self, tell: Callable[[float], None]) -> Outcome:
        """Measure the arm; whatever that raises is told in the outcome."""
        try:
            return self.perform(tell)
        except Exception as error:
            if os.environ.get("NORMKIT_TRACEBACK"):
                traceback.print_exc()
            return Outcome(error=in_a_line(error))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trial.

    Attributes:
        text: The measurement as JSON, so that what is read back later is the same; empty where there is none.
        seconds: How long it took.
        error: Why there is none, in a line.
    """

    text: str = ""
    seconds: float = 0.0
    error: str = ""


def in_a_line(error: Exception) -> str:
    """What a user is told of an exception."""
    if isinstance(error, NormkitError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'system'}: {error.strerror or error}"
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory ({first or 'no more is known'}); choose smaller settings, or fewer --jobs"
    return f"this is a bug of normkit: {type(error).__name__}: {first}; NORMKIT_TRACEBACK=1 shows where"


def _seldom(tell: Callable[[float], None]) -> Callable[[float], None]:
    """Pass on what is told, but not many times a second."""
    last = -math.inf

    def told(share: float) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _BETWEEN_SHARES:
            last = now
            tell(float(share))

    return told


def _plain(value: Any) -> Any:
    """A measurement as JSON has it: a number that is not finite is None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
