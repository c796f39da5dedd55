"""The request to `normkit study`: studies, settings, folder, device, and how many arms run at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normkit.errors import InputError

if TYPE_CHECKING:
    from normkit.study.arm_context import Settings
    from normkit.study.result import Study
    from normkit.study.settings import Budget


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request to `normkit study`."""

    studies: tuple[tuple[Study, Settings], ...]
    """Each study with all of its settings."""
    out: Path
    """The folder that holds the folders of the studies."""
    resume: bool
    device: str
    dtype: str
    """The name of a torch dtype."""

    @property
    def seconds(self) -> dict[str, float]:
        """Expected computing time of each study, from the catalogue's figure for the seeds of the quick budget."""
        from normkit.study.catalogue import CATALOGUE

        return {
            study.name: CATALOGUE[study.name].seconds * float(str(settings["seeds"])) / float(str(study.quick["seeds"]))
            for study, settings in self.studies
        }


def requested(
    names: tuple[str, ...],
    budget: Budget,
    seeds: int | None,
    changed: tuple[str, ...],
    *,
    out: Path,
    resume: bool,
    device: str,
    dtype: str,
) -> Request:
    """Check a request completely, before any time is spent on it.

    Raises:
        InputError: If a study, a setting or the device is unknown, or the folder cannot be used.
    """
    from normkit.cli.reports import require_writable
    from normkit.study.catalogue import NAMES, load
    from normkit.study.settings import assignments, settings_of

    studies = [load(name) for name in dict.fromkeys(names or NAMES)]
    texts = assignments(changed, studies)
    if seeds is not None:
        texts["seeds"] = str(seeds)
    chosen = tuple((study, settings_of(study, budget, texts)) for study in studies)

    from normkit.study.running import require_device
    from normkit.study.store import require_new

    require_writable(out)
    # Under torchrun each process gets its device later, and the first may already have begun to write.
    if not _is_one_of_many():
        require_device(device)
        for study in () if resume else studies:
            require_new(out / study.name)
    return Request(studies=chosen, out=out, resume=resume, device=device, dtype=dtype)


def _is_one_of_many() -> bool:
    return "WORLD_SIZE" in os.environ


def jobs_of(asked: int | None, threads: int, device: str) -> int:
    """How many arms are measured at a time.

    Args:
        asked: The value of --jobs, or None.
        threads: Threads of each arm.
        device: Its name in torch.

    Raises:
        InputError: If it is more than one under torchrun.
    """
    if _is_one_of_many():
        if asked not in (None, 1):
            raise InputError(f"--jobs {asked}: the processes of torchrun share every arm; leave --jobs out")
        return 1
    if asked is not None:
        return asked
    return 1 if device.startswith("cuda") else max(1, len(os.sched_getaffinity(0)) // threads)
