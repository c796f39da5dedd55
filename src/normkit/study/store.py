"""The folder of one study: what was asked for, each finished arm, a log, and the result; written so that nothing tears.

configuration.json   what decides the numbers: settings, device, versions, data
arms/ARM-SEED.json   one finished arm with one seed
runs/ARM-SEED/       what an unfinished one keeps of its training runs
curves/ARM-SEED/     a file a training run, one JSON line a step
log.jsonl            one line a finished arm, in the order of their ends
results.json         everything, without times: the same numbers are the same bytes
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.errors import InputError
from normkit.files import json_text, lock, write_text
from normkit.study.result import Arm, Measurement

SCHEMA_VERSION = 1

_CONFIGURATION = "configuration.json"
_WAY_OUT = "choose another folder with --out"
_KEPT = "; finished arms are kept: make room, then go on with --resume"
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Finished:
    """An arm that was measured with one seed.

    Attributes:
        measurement: What it gave.
        seconds: How long it took.
    """

    measurement: Measurement
    seconds: float


class Store:
    """The folder, held by this process alone until it is closed.

    Args:
        folder: Made if it is not there.
        configuration: What decides the numbers, as JSON values.
        arms: Of the study.
        resume: Whether the folder may hold a part of the study already.

    Raises:
        InputError: If it holds results and is not to be resumed, was made with another configuration or by something
            else, is in use by another process, or cannot be written to.
    """

    def __init__(
        self, folder: Path, configuration: Mapping[str, Any], arms: Sequence[Arm], *, resume: bool = False
    ) -> None:
        self.folder = folder
        self._study = str(configuration["study"])
        self._names = dict(zip((arm.name for arm in arms), _file_names(arms), strict=True))
        if not resume:
            require_new(folder)
        self._lock = _locked(folder)
        try:
            self._begin({"schema_version": SCHEMA_VERSION, **configuration})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes have the folder."""
        os.close(self._lock)

    def finished(self, seeds: int) -> dict[tuple[int, str], Finished]:
        """By seed and name of the arm, what was measured already.

        Raises:
            InputError: If a file is none that this study has written.
        """
        return {
            (seed, arm): self._read(arm, seed)
            for seed in range(seeds)
            for arm in self._names
            if self._arm_file(arm, seed).exists()
        }

    def run_folder(self, arm: str, seed: int) -> Path:
        """Where an unfinished arm may keep its training runs; it is made by who writes there."""
        return self.folder / "runs" / f"{self._names[arm]}-{seed}"

    def curve_folder(self, arm: str, seed: int) -> Path:
        """Where an arm leaves the curves of its training runs; it is made by who writes there."""
        return self.folder / "curves" / f"{self._names[arm]}-{seed}"

    def keep(self, arm: str, seed: int, finished: Finished) -> None:
        """Write what an arm gave, then its line in the log, and drop what was kept of its runs.

        Raises:
            InputError: If there is no room.
        """
        about = {"study": self._study, "arm": arm, "seed": seed, "seconds": round(finished.seconds, 3)}
        content = {"schema_version": SCHEMA_VERSION, **about, "measurement": finished.measurement}
        _write(self._arm_file(arm, seed), content)
        numbers = {name: value for name, value in finished.measurement.items() if isinstance(value, bool | int | float)}
        self._log({**about, "numbers": numbers})
        runs = self.run_folder(arm, seed)
        shutil.rmtree(runs, ignore_errors=True)
        # Another arm may keep its runs beside it.
        with suppress(OSError):
            runs.parent.rmdir()

    def write_results(self, document: Mapping[str, Any]) -> Path:
        """Write results.json.

        Raises:
            InputError: If there is no room.
        """
        return _write(self.folder / "results.json", document)

    def _arm_file(self, arm: str, seed: int) -> Path:
        return self.folder / "arms" / f"{self._names[arm]}-{seed}.json"

    def _begin(self, configuration: dict[str, Any]) -> None:
        """Hold the folder's configuration against this one; write it where there is none."""
        # Left by a process that was killed while it wrote.
        for torn in (*self.folder.glob(".*.json*.*"), *self.folder.glob("arms/.*.json.*")):
            torn.unlink(missing_ok=True)
        file = self.folder / _CONFIGURATION
        # As JSON has it: a tuple is a list.
        configuration = json.loads(json_text(configuration))
        if file.exists():
            _require_same(_read_json(file), configuration, self.folder)
        elif next(self.folder.iterdir(), None) is not None:
            raise InputError(f"{self.folder} holds files but no {_CONFIGURATION}: it is not a study's; {_WAY_OUT}")
        else:
            _write(file, configuration)

    def _read(self, arm: str, seed: int) -> Finished:
        file = self._arm_file(arm, seed)
        content = _read_json(file)
        expected = {"schema_version": SCHEMA_VERSION, "study": self._study, "arm": arm, "seed": seed}
        for name, value in expected.items():
            if content.get(name) != value:
                raise InputError(
                    f"{file} should have {name} {value!r} and has {content.get(name)!r}; delete it, and --resume "
                    "measures this arm again"
                )
        measurement, seconds = content.get("measurement"), content.get("seconds")
        if not isinstance(measurement, dict) or not isinstance(seconds, int | float):
            raise InputError(f"{file} holds no measurement; delete it, and --resume measures this arm again")
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
    """Refuse a folder that holds anything.

    Raises:
        InputError: If it does, or is a file.
    """
    if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise InputError(f"{folder} holds results already; go on with --resume, or {_WAY_OUT}")


def _locked(folder: Path) -> int:
    """A handle of the folder, made if it is not there, that no other process holds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}; {_WAY_OUT}") from None
    if not lock(handle):
        os.close(handle)
        raise InputError(f"another normkit study writes to {folder}; wait for it, or {_WAY_OUT}")
    return handle


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
        again = f"delete it, and --resume measures this arm again, or {_WAY_OUT}"
        raise InputError(
            f"{file} is damaged: it is no JSON object; {_WAY_OUT if file.name == _CONFIGURATION else again}"
        )
    return content


def _require_same(there: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    before, now = dict(_flat(there)), dict(_flat(asked))
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            raise InputError(
                f"{folder} was begun with {name} {_shown(before, name)}, and this run has {_shown(now, name)}; "
                f"--resume needs the same, or {_WAY_OUT}"
            )


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping, under its path of names."""
    for name, member in value.items():
        if isinstance(member, Mapping):
            yield from _flat(member, f"{above}{name}.")
        else:
            yield f"{above}{name}", member


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "none"


def _file_names(arms: Sequence[Arm]) -> list[str]:
    """For each arm a name of its own that every file system takes; equal ones are numbered."""
    names: list[str] = []
    for arm in arms:
        plain = re.sub(r"[^a-z0-9.+=]+", "-", arm.name.lower()).strip("-.")[:_LONGEST_NAME] or "arm"
        name, count = plain, 1
        while name in names:
            count += 1
            name = f"{plain}-{count}"
        names.append(name)
    return names
