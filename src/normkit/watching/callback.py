"""The common part of the callbacks of `transformers.Trainer` and of Lightning: options and findings of a watch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from normkit.errors import InputError
from normkit.inspection.result import Inspection
from normkit.measurement.baseline import Baseline
from normkit.rules.finding import Finding
from normkit.watching.watcher import Watch, watch


class WatchingCallback:
    """The watch of the newest training; `_begins` is the method of a Trainer that begins one."""

    _begins: ClassVar[str]

    def __init__(
        self,
        *,
        every: int = 25,
        batch: Any = None,
        out: str | Path | None = None,
        intent: Baseline | str | Path | None = None,
        name: str = "",
        say: Callable[[str], None] | None = None,
    ) -> None:
        options = {"every": every, "batch": batch, "out": out, "intent": intent, "name": name, "say": say}
        self._watch: Callable[..., Watch] = partial(watch, **options)
        self._run: Watch | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The faults as far as has been measured, worst first."""
        return self.inspection().findings

    def inspection(self) -> Inspection:
        """Everything measured of the newest training, judged.

        Raises:
            InputError: If none has begun.
        """
        if self._run is None:
            raise InputError(f"nothing was trained yet; give the callback to a Trainer and call its {self._begins}()")
        return self._run.inspection()
