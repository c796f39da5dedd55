"""The folder of one study: its configuration, each finished arm, a log, and the result; no file is ever half written.

configuration.json   everything that decides the numbers: settings, device, versions, data
arms/ARM-SEED.json   one finished arm with one seed
runs/ARM-SEED/       checkpoints of the training runs of an unfinished one
curves/ARM-SEED/     one file per training run, one JSON line per step
log.jsonl            one line per finished arm, in the order of their ends
results.json         everything, without times: the same numbers are the same bytes
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.errors import InputError
from normkit.files import json_text, lock, write_text
from normkit.study.result import Arm
from normkit.study.statistics import Measurement

SCHEMA_VERSION = 1

_CONFIGURATION = "configuration.json"
_WAY_OUT = "choose another folder with --out"
_AGAIN = "delete it, and --resume measures this arm again"
_KEPT = "; finished arms are kept: make room, then go on with --resume"
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Finished:
    """An arm that was measured with one seed."""

    measurement: Measurement
    seconds: float


class Store:
    """The folder, locked by this process until it is closed.

    Args:
        folder: Made if it does not exist.
        configuration: Everything that decides the numbers, as JSON values.
        arms: The study's.
        resume: Whether the folder may hold a part of the study already.

    Raises:
        InputError: If it holds results and is not to be resumed, belongs to another configuration or another program,
            is locked by another process, or cannot be written to.
    """

    def __init__(
        self, folder: Path, configuration: Mapping[str, Any], arms: Sequence[Arm], *, resume: bool = False
    ) -> None:
        self.folder = folder
        self._study = str(configuration["study"])
        # For each arm a unique name that every file system accepts; equal names are numbered.
        self._names: dict[str, str] = {}
        for arm in arms:
            plain = re.sub(r"[^a-z0-9.+=]+", "-", arm.name.lower()).strip("-.")[:_LONGEST_NAME] or "arm"
            numbered = (f"{plain}-{count}" if count > 1 else plain for count in itertools.count(1))
            self._names[arm.name] = next(name for name in numbered if name not in self._names.values())
        if not resume:
            require_new(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}; {_WAY_OUT}") from None
        try:
            if not lock(self._lock):
                raise InputError(f"another normkit study writes to {folder}; wait for it, or {_WAY_OUT}")
            # As JSON has it: a tuple is a list.
            self._begin(json.loads(json_text({"schema_version": SCHEMA_VERSION, **configuration})))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def finished(self, seeds: Iterable[int]) -> dict[tuple[int, str], Finished]:
        """The finished arms, by seed and name.

        Raises:
            InputError: If a file was not written by this study.
        """
        return {
            (seed, arm): self._read(arm, seed)
            for seed in seeds
            for arm in self._names
            if self._arm_file(arm, seed).exists()
        }

    def checkpoint_folder(self, arm: str, seed: int) -> Path:
        """The folder of an unfinished arm's training runs; it does not exist before the first is saved."""
        return self.folder / "runs" / f"{self._names[arm]}-{seed}"

    def curve_folder(self, arm: str, seed: int) -> Path:
        """The folder of the curves of an arm's training runs; it does not exist before the first is written."""
        return self.folder / "curves" / f"{self._names[arm]}-{seed}"

    def keep(self, arm: str, seed: int, finished: Finished) -> None:
        """Write a measurement, then its line in the log, and remove the arm's checkpoints.

        Raises:
            InputError: If the disk is full.
        """
        about = {"study": self._study, "arm": arm, "seed": seed, "seconds": round(finished.seconds, 3)}
        content = {"schema_version": SCHEMA_VERSION, **about, "measurement": finished.measurement}
        _write(self._arm_file(arm, seed), content)
        numbers = {name: value for name, value in finished.measurement.items() if isinstance(value, bool | int | float)}
        self._log({**about, "numbers": numbers})
        runs = self.checkpoint_folder(arm, seed)
        shutil.rmtree(runs, ignore_errors=True)
        # Another arm may have checkpoints there.
        with suppress(OSError):
            runs.parent.rmdir()

    def write_results(self, document: Mapping[str, Any]) -> Path:
        """Write results.json.

        Raises:
            InputError: If the disk is full.
        """
        return _write(self.folder / "results.json", document)

    def _arm_file(self, arm: str, seed: int) -> Path:
        return self.folder / "arms" / f"{self._names[arm]}-{seed}.json"

    def _begin(self, configuration: dict[str, Any]) -> None:
        """Compare the folder's configuration with this one; write it if there is none."""
        # Files of a process that was killed while it wrote.
        for torn in (*self.folder.glob(".*.json*.*"), *self.folder.glob("arms/.*.json.*")):
            torn.unlink(missing_ok=True)
        file = self.folder / _CONFIGURATION
        if not file.exists():
            if next(self.folder.iterdir(), None) is not None:
                raise InputError(f"{self.folder} holds files but no {_CONFIGURATION}: it is not a study's; {_WAY_OUT}")
            _write(file, configuration)
            return
        before, now = dict(_flat(_read_json(file))), dict(_flat(configuration))
        for name in {**now, **before}:
            if before.get(name) != now.get(name):
                was, has = (
                    json.dumps(each[name], ensure_ascii=False) if name in each else "none" for each in (before, now)
                )
                raise InputError(
                    f"{self.folder} was begun with {name} {was}, and this run has {has}; --resume needs the same, or "
                    f"{_WAY_OUT}"
                )

    def _read(self, arm: str, seed: int) -> Finished:
        file = self._arm_file(arm, seed)
        content = _read_json(file)
        expected = {"schema_version": SCHEMA_VERSION, "study": self._study, "arm": arm, "seed": seed}
        for name, value in expected.items():
            if content.get(name) != value:
                raise InputError(f"{file} should have {name} {value!r} and has {content.get(name)!r}; {_AGAIN}")
        measurement, seconds = content.get("measurement"), content.get("seconds")
        if not isinstance(measurement, dict) or not isinstance(seconds, int | float):
            raise InputError(f"{file} holds no measurement; {_AGAIN}")
        return Finished(measurement, float(seconds))

    def _log(self, line: Mapping[str, Any]) -> None:
        file = self.folder / "log.jsonl"
        content = f"{json.dumps(line, ensure_ascii=False)}\n".encode()
        try:
            with file.open("ab", buffering=0) as log:
                end = log.tell()
                if log.write(content) != len(content):
                    log.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise InputError(f"cannot write {file}: {error.strerror}{_KEPT}") from None


def require_new(folder: Path) -> None:
    """Refuse a folder that is not empty.

    Raises:
        InputError: If it holds a file that is not hidden.
    """
    if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise InputError(f"{folder} holds results already; go on with --resume, or {_WAY_OUT}")


def _write(file: Path, content: Mapping[str, Any]) -> Path:
    try:
        return write_text(file, json_text(content))
    except InputError as error:
        raise InputError(f"{str(error).removesuffix(f'; {_WAY_OUT}')}{_KEPT}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; {_WAY_OUT}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        way_out = _WAY_OUT if file.name == _CONFIGURATION else f"{_AGAIN}, or {_WAY_OUT}"
        raise InputError(f"{file} is damaged: it is no JSON object; {way_out}")
    return content


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping, with its path of names."""
    for name, member in value.items():
        if isinstance(member, Mapping):
            yield from _flat(member, f"{above}{name}.")
        else:
            yield f"{above}{name}", member
