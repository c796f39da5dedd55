"""A study taken through its arms and seeds: what is finished is read, what is left is measured, all is judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from normkit.errors import InputError, LostRankError
from normkit.study import corpus
from normkit.study.document import document
from normkit.study.judging import decide
from normkit.study.place import Place, require_device
from normkit.study.ranks import ALONE, Ranks
from normkit.study.result import Arm, Paired, Settings, Study, StudyResult
from normkit.study.settings import check_seeds
from normkit.study.store import Finished, Store
from normkit.study.trial import Outcome, Trial
from normkit.study.workers import Crew

Progress = Callable[[str, float, float], None]
"""Called with what goes on in words, the work that is done, and all the work, both in the unit of `Arm.cost`."""

_PACKAGES = {"sklearn": "scikit-learn"}


def run(
    study: Study,
    settings: Settings | None = None,
    *,
    out: Path | None = None,
    seeds: int | None = None,
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
        study: What to run.
        settings: All of its settings; those of the quick budget if None.
        out: Folder in which the study gets one of its own name, with all that was measured; None keeps nothing.
        seeds: How many, from 0; those of the settings if None.
        jobs: Arms that are measured at a time, each in a process of its own; one is measured in this process.
        threads: Torch's, of each.
        resume: Go on with what the folder holds.
        device: Where models and batches are.
        dtype: Of both.
        progress: Called as the work goes on.
        crew: Who measures, where several studies share the processes; `jobs` and `threads` are its own then.
        ranks: The processes that share each batch; all of them call this alike, the first writes.

    Raises:
        InputError: If a package or the device is missing, the settings or the folder cannot be used, or there is no
            room; what was finished is kept.
        LostRankError: If another of the processes has ended.
    """
    settings = study.quick if settings is None else settings
    settings = {**settings, "seeds": check_seeds(settings["seeds"] if seeds is None else seeds)}
    _require_packages(study)
    require_device(device)
    arms = study.arms(settings)
    with Crew(jobs, threads) as own:
        crew = own if crew is None else crew
        place = Place(device=device, dtype=dtype, threads=crew.threads, ranks=ranks)
        sitting = _Sitting(study, settings, arms, place, None if out is None else out / study.name, resume=resume)
        try:
            return sitting.take(crew, progress or (lambda _words, _done, _all: None))
        finally:
            sitting.close()


def not_run(study: Study, settings: Settings, why: str) -> StudyResult:
    """The result of a study of which nothing could be measured.

    Args:
        study: Which.
        settings: With which it was to be run.
        why: In a line.
    """
    decided = tuple(decide(claim, {}) for claim in study.claims)
    return StudyResult(
        study=study, settings=settings, measured={}, decided=decided, seconds=0.0, where={}, trouble={"every arm": why}
    )


class _Sitting:
    """One time that a study is run, from what was finished before to the result."""

    def __init__(
        self,
        study: Study,
        settings: Settings,
        arms: tuple[Arm, ...],
        place: Place,
        folder: Path | None,
        *,
        resume: bool,
    ) -> None:
        self._study, self._settings, self._arms, self._place, self._folder = study, settings, arms, place, folder
        self._seeds = range(check_seeds(settings["seeds"]))
        self._store: Store | None = None
        self._finished: dict[tuple[int, str], Finished] = {}
        self._trouble: dict[str, str] = {}
        if folder is not None:
            self._open(folder, resume=resume)

    def _open(self, folder: Path, *, resume: bool) -> None:
        """Read what is finished; with several processes the first reads, and tells the others or why it cannot."""
        ranks, told = self._place.ranks, None
        if ranks.writes:
            try:
                self._store = Store(folder, self._configuration(), self._arms, resume=resume)
                finished = self._store.finished(len(self._seeds))
                told = json.dumps([[*key, each.measurement, each.seconds] for key, each in finished.items()]).encode()
            except InputError as error:
                ranks.shared(json.dumps(str(error)).encode())
                self.close()
                raise
        content = json.loads(ranks.shared(told) or b"[]")
        if isinstance(content, str):
            raise LostRankError(content)
        self._finished = {(seed, arm): Finished(measured, seconds) for seed, arm, measured, seconds in content}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def take(self, crew: Crew, progress: Progress) -> StudyResult:
        """Measure what is left, and judge."""
        # What takes longest is begun first, so that no process is left with it at the end.
        trials = sorted(self._left(), key=lambda trial: -trial.arm.cost)
        tally = _Tally(self._arms, len(self._seeds), trials, progress)
        with closing(crew.perform(trials, tally.tell)) as outcomes:
            for trial, outcome in outcomes:
                tally.end(trial)
                self._note(trial, outcome)
        result = self._result()
        if self._store is not None:
            self._store.write_results(document(result))
        return result

    def _left(self) -> list[Trial]:
        return [
            Trial(
                measure=self._study.measure,
                arm=arm,
                seed=seed,
                settings=self._settings,
                device=self._place.device,
                dtype=self._place.dtype,
                keep=self._run_folder(arm, seed),
                curves=None if self._store is None else self._store.curve_folder(arm.name, seed),
                ranks=self._place.ranks,
            )
            for seed in self._seeds
            for arm in self._arms
            if (seed, arm.name) not in self._finished
        ]

    def _run_folder(self, arm: Arm, seed: int) -> Path | None:
        """None keeps nothing; a process that does not write needs a name all the same, to be told what was kept."""
        return self._folder if self._store is None else self._store.run_folder(arm.name, seed)

    def _note(self, trial: Trial, outcome: Outcome) -> None:
        if outcome.error:
            self._trouble[f"{trial.arm.name} [seed {trial.seed}]"] = outcome.error
            return
        finished = Finished(json.loads(outcome.text), outcome.seconds)
        self._finished[trial.seed, trial.arm.name] = finished
        if self._store is not None:
            self._store.keep(trial.arm.name, trial.seed, finished)

    def _result(self) -> StudyResult:
        measured: dict[int, Paired] = {}
        for seed in self._seeds:
            paired = {
                arm.name: self._finished[seed, arm.name].measurement
                for arm in self._arms
                if (seed, arm.name) in self._finished
            }
            if paired:
                measured[seed] = paired
        return StudyResult(
            study=self._study,
            settings=self._settings,
            measured=measured,
            decided=tuple(decide(claim, measured) for claim in self._study.claims),
            seconds=sum(each.seconds for each in self._finished.values()),
            where=self._place.in_words(),
            trouble=dict(sorted(self._trouble.items())),
        )

    def _configuration(self) -> Mapping[str, object]:
        """What decides the numbers."""
        return {
            "study": self._study.name,
            "settings": dict(self._settings),
            "where": self._place.in_words(),
            "packages": {name: version(_PACKAGES.get(name, name)) for name in ("numpy", *self._study.needs)},
            "text": _digest_of_text(),
        }


class _Tally:
    """How much of the work is done."""

    def __init__(self, arms: tuple[Arm, ...], seeds: int, trials: list[Trial], progress: Progress) -> None:
        self._progress = progress
        self._all, self._count = seeds * sum(arm.cost for arm in arms), seeds * len(arms)
        self._done, self._ended = self._all - sum(trial.arm.cost for trial in trials), self._count - len(trials)
        self._shares: dict[tuple[int, str], float] = {}
        self._report("")

    def tell(self, trial: Trial, share: float) -> None:
        """A part of a trial is done; where an arm trains several times, it begins anew with each."""
        place = trial.seed, trial.arm.name
        self._shares[place] = max(self._shares.get(place, 0.0), share * trial.arm.cost)
        self._report(f"{trial.arm.name} [seed {trial.seed}]")

    def end(self, trial: Trial) -> None:
        self._shares.pop((trial.seed, trial.arm.name), None)
        self._done += trial.arm.cost
        self._ended += 1
        self._report("")

    def _report(self, now: str) -> None:
        words = f"{self._ended} of {self._count} arms"
        self._progress(f"{words}, {now}" if now else words, self._done + sum(self._shares.values()), self._all)


def _require_packages(study: Study) -> None:
    for name in study.needs:
        if find_spec(name) is None:
            package = _PACKAGES.get(name, name)
            raise InputError(f'{study.name} needs {package}, which is not installed: pip install "normkit[study]"')


@cache
def _digest_of_text() -> str:
    """Of the library's source, which many studies train on."""
    return corpus.read().digest
