"""A study taken through its arms and seeds: finished arms are read, the others are measured, the claims are judged."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from normkit.errors import InputError, LostRankError
from normkit.study import corpus
from normkit.study.arm_context import Settings
from normkit.study.catalogue import check_seeds
from normkit.study.ranks import ALONE, Ranks
from normkit.study.result import Arm, Study, StudyResult, decide
from normkit.study.store import Finished, Store
from normkit.study.workers import ArmRun, Crew
from normkit.text import dtype_name, first_line, own_version

Progress = Callable[[str, float, float], None]
"""Called with the present work in words, the work that is done, and all the work, both in the unit of `Arm.cost`."""

_PACKAGES = {"sklearn": "scikit-learn"}


def run(
    study: Study,
    settings: Settings | None = None,
    *,
    out: Path | None = None,
    seeds: int | None = None,
    first_seed: int = 0,
    jobs: int = 1,
    threads: int = 1,
    resume: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    crew: Crew | None = None,
    ranks: Ranks = ALONE,
) -> StudyResult:
    """Measure every arm with every seed, and judge the study's claims.

    The result does not depend on `jobs`, nor on how often the study was interrupted and resumed.

    Args:
        study: A study.
        settings: All of its settings; those of the quick budget if None.
        out: Folder in which the study makes one of its own name for everything that it measures; None keeps nothing.
        seeds: How many; those of the settings if None.
        first_seed: Of them.
        jobs: Arms measured at a time, each in a process of its own; a single one is measured in this process.
        threads: Torch's, for each arm.
        resume: Continue with what the folder holds.
        device: Of models and batches.
        dtype: Of models and batches.
        progress: Called as the work goes on.
        crew: Processes that several studies share; its own `jobs` and `threads` replace the arguments.
        ranks: The processes that share each batch; all of them make the same call, the first writes.

    Raises:
        InputError: If a package or the device is missing, the settings or the folder cannot be used, or the disk is
            full; finished arms are kept.
        LostRankError: If another of the processes has ended.
    """
    settings = study.quick if settings is None else settings
    settings = {**settings, "seeds": check_seeds(settings["seeds"] if seeds is None else seeds)}
    for name in ("scipy", *study.needs):
        if find_spec(name) is None:
            package = _PACKAGES.get(name, name)
            raise InputError(f'{study.name} needs {package}, which is not installed: pip install "normkit[study]"')
    require_device(device)
    arms, all_seeds = study.arms(settings), range(first_seed, first_seed + settings["seeds"])
    folder = None if out is None else out / study.name
    trouble: dict[str, str] = {}
    with Crew(jobs, threads) as own, ExitStack() as stack:
        crew = own if crew is None else crew
        where = describe_machine(device, dtype, crew.threads, ranks)
        store: Store | None = None
        finished: dict[tuple[int, str], Finished] = {}
        if folder is not None:
            store, finished = _opened(folder, study, settings, all_seeds, where, resume, ranks)
        if store is not None:
            stack.callback(store.close)
        left = [
            ArmRun(
                measure=study.measure,
                arm=arm,
                seed=seed,
                settings=settings,
                device=device,
                dtype=dtype,
                # A rank that does not write still restores the checkpoints of the first.
                checkpoints=folder if store is None else store.checkpoint_folder(arm.name, seed),
                curves=None if store is None else store.curve_folder(arm.name, seed),
                ranks=ranks,
            )
            for seed in all_seeds
            for arm in arms
            if (seed, arm.name) not in finished
        ]
        # The longest runs are begun first, so that no process has one left at the end.
        left.sort(key=lambda run: -run.arm.cost)
        counter = _ProgressCounter(arms, len(all_seeds), left, progress or (lambda _words, _done, _all: None))
        with closing(crew.perform(left, counter.report)) as outcomes:
            for each, outcome in outcomes:
                counter.end(each)
                if outcome.error:
                    trouble[f"{each.arm.name} [seed {each.seed}]"] = outcome.error
                    continue
                measured = finished[each.seed, each.arm.name] = Finished(json.loads(outcome.text), outcome.seconds)
                if store is not None:
                    store.keep(each.arm.name, each.seed, measured)
        paired = {
            seed: {arm.name: finished[seed, arm.name].measurement for arm in arms if (seed, arm.name) in finished}
            for seed in all_seeds
        }
        paired = {seed: found for seed, found in paired.items() if found}
        result = StudyResult(
            study=study,
            settings=settings,
            measured=paired,
            decided=decide(study.claims, paired),
            seconds=sum(each.seconds for each in finished.values()),
            where=where,
            trouble=dict(sorted(trouble.items())),
        )
        if store is not None:
            store.write_results(result.to_json())
        return result


def _opened(
    folder: Path,
    study: Study,
    settings: Settings,
    seeds: range,
    where: Mapping[str, str],
    resume: bool,
    ranks: Ranks,
) -> tuple[Store | None, dict[tuple[int, str], Finished]]:
    """The folder and its finished arms: the first of several processes reads and sends them, or its error, to all."""
    store, message = None, None
    if ranks.writes:
        configuration = {
            "study": study.name,
            "settings": dict(settings),
            "where": where,
            "packages": {name: version(_PACKAGES.get(name, name)) for name in ("numpy", *study.needs)},
            "text": _digest_of_text(),
        }
        try:
            store = Store(folder, configuration, study.arms(settings), resume=resume)
            kept = store.finished(seeds).items()
            message = json.dumps([[*key, each.measurement, each.seconds] for key, each in kept]).encode()
        except InputError as error:
            ranks.shared(json.dumps(str(error)).encode())
            if store is not None:
                store.close()
            raise
    content = json.loads(ranks.shared(message) or b"[]")
    if isinstance(content, str):
        raise LostRankError(content)
    return store, {(seed, arm): Finished(measured, seconds) for seed, arm, measured, seconds in content}


def not_run(study: Study, settings: Settings, why: str) -> StudyResult:
    """The result of a study of which nothing could be measured, with the reason in one line."""
    decided = decide(study.claims, {})
    return StudyResult(
        study=study, settings=settings, measured={}, decided=decided, seconds=0.0, where={}, trouble={"every arm": why}
    )


def require_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        InputError: If torch does not know it, or does not find one.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)
        raise InputError(f"cannot compute on the device {device!r}: {reason}; --device cpu always works") from None


def describe_machine(device: str, dtype: torch.dtype, threads: int, ranks: Ranks) -> dict[str, str]:
    """Everything about the machine that decides the bits of the numbers, in words."""
    on_cuda = torch.device(device).type == "cuda"
    words = {
        "normkit": own_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if on_cuda else device,
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "dtype": dtype_name(dtype),
        "threads": str(threads),
    }
    return words if ranks.size == 1 else {**words, "processes": str(ranks.size)}


class _ProgressCounter:
    """Adds up the work that is done."""

    def __init__(self, arms: tuple[Arm, ...], seeds: int, left: list[ArmRun], progress: Progress) -> None:
        self._progress = progress
        self._all, self._count = seeds * sum(arm.cost for arm in arms), seeds * len(arms)
        self._done, self._ended = self._all - sum(run.arm.cost for run in left), self._count - len(left)
        self._shares: dict[tuple[int, str], float] = {}
        self._show("")

    def report(self, run: ArmRun, share: float) -> None:
        """Count a part of a run; the share starts from 0 again with each training run of the arm."""
        place = run.seed, run.arm.name
        self._shares[place] = max(self._shares.get(place, 0.0), share * run.arm.cost)
        self._show(f"{run.arm.name} [seed {run.seed}]")

    def end(self, run: ArmRun) -> None:
        self._shares.pop((run.seed, run.arm.name), None)
        self._done += run.arm.cost
        self._ended += 1
        self._show("")

    def _show(self, now: str) -> None:
        words = f"{self._ended} of {self._count} arms"
        self._progress(f"{words}, {now}" if now else words, self._done + sum(self._shares.values()), self._all)


@cache
def _digest_of_text() -> str:
    """SHA-256 of the text of the standard library, on which many studies train."""
    return corpus.read().digest
