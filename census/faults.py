"""Faults planted in clean models and runs, and what is reported: docs/explanation/faults.md.

python census/faults.py            write the page (some 12 minutes on one core)
python census/faults.py --check    say whether the page is up to date
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from normkit.inspection.result import Inspection
from pages import settle

# The injector is a part of the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

import injected_runs
import injection
import subjects
from clean_models import Clean, clean_models
from injected_runs import RUN_FAULTS
from injection import FAULTS, Trial

Result = TypeVar("Result")

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "faults.md"
SEEDS, RUN_SEEDS, HEALTHY_SEEDS = (8331,), (1941, 6231), (2762, 1953, 7226)
HEALTHY_STEPS = 100

NOT_CLEAN = {
    "cpmant": "F1; its class draws weights with a deviation of 1, and attention logits do start at 200",
    "sam_vision_model": "A1; its class draws weights with a deviation of 1e-10, and rows do start below eps",
    "sam_hq_vision_model": "the same",
    "mobilevit": "C16, F3; the rows of its first convolutions do shrink to 1e-24 and to 0, as its class draws weights",
}
"""Stock models in which what is found is so, and what that is."""

INTRODUCTION = """\
# Faults planted, and what is reported

This page shows how many planted faults normkit names and places, and how often it blames a healthy model.

Each fault of the catalogue that can be seen from a model or a run is planted in clean tiny models, at a place drawn at
random, and the model is inspected, or trained for {steps} steps under a watch. The injector (`tests/injection.py`,
`tests/injected_runs.py`) was written by another hand than the rules.

    python census/faults.py           # writes this page
    python census/faults.py --check   # says whether it is up to date

The catalogue has a fault for each rule: this page shows that no rule broke. How many faults have no rule is shown by
[a catalogue written without reading the rules](outside.md).

**Named**: the first finding of the report is that of the rule, or of one of the rules, in the second column.
**Placed**: named, and the finding's sites are the planted ones and no others; of what is felt by all that follows (NaN,
and faults of a run), the planted one first; of what strikes in one step of a run, "where it began" names that step and
place. Models of transformers are held to their config's class, plain ones and the studies' own transformer to an intent
file written before the fault, and "bare" ones to nothing.

Of the 51 faults of the catalogue four have no rule: gains that a rewriting tool took without their offset (it takes
model and rewrite side by side: `normkit compare A B`), query and key norms that each rank takes alone (it
takes runs of two sizes), a residual added in 16 bits before the statistics (the sum is inside no module), and the drift
of the output's logsumexp (not measured). E7, E8, C7 and F6 take several processes or long runs: their tests plant them.
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a clean model or a healthy run was said to have.

    Attributes:
        group: What kind it is.
        name: Which.
        alarms: Rule and severity of what is no note.
        notes: Number of notes.
        error: Why it could not be inspected, or "".
    """

    group: str
    name: str
    alarms: tuple[str, ...] = ()
    notes: int = 0
    error: str = ""


def main() -> None:
    torch.set_num_threads(1)
    import transformers  # noqa: F401

    subjects.quiet()
    with warnings.catch_warnings(action="ignore"):
        text = page(static_trials(), run_trials(), list(clean_reports()), list(healthy_reports()))
    settle(PAGE, text, check="--check" in sys.argv[1:])


def static_trials() -> list[Trial]:
    """Every fault in every family that it can befall."""
    return list(_told("faults", [lambda f=f, n=n, s=s: injection.attempt(f, n, s) for f, n, s in _cases()]))


def _cases() -> list[tuple[injection.Fault, str, int]]:
    return [(fault, family, seed) for fault in FAULTS for family in fault.families for seed in SEEDS]


def run_trials() -> list[Trial]:
    """Every fault of a run, in both architectures."""
    cases = [(fault, twin, seed) for fault in RUN_FAULTS for twin in fault.twins for seed in RUN_SEEDS]
    return list(_told("runs", [lambda f=f, t=t, s=s: injected_runs.attempt(f, t, s) for f, t, s in cases]))


def clean_reports() -> Iterable[Report]:
    """All clean models."""
    return _told("clean models", [lambda clean=clean: _clean_report(clean) for clean in clean_models()])


def _clean_report(clean: Clean) -> Report:
    try:
        return _report(clean.group, clean.name, clean.inspected())
    # Any family's own code runs here, on inputs that an inspection shortens.
    except (RuntimeError, ValueError, TypeError) as error:
        return Report(group=clean.group, name=clean.name, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def healthy_reports() -> Iterable[Report]:
    """Runs of the architectures that ship with their own recipe, cut short; and of all with the faults' recipe."""
    own = {"rate": 6e-3, "warmup": 100, "batch": 16, "window": 256, "steps": HEALTHY_STEPS, "every": 25}
    runs = [
        lambda name=name, twin=twin, seed=seed, changes=changes: _report(
            name, f"{twin}, seed {seed}", injected_runs.healthy(twin, seed, **changes)
        )
        for name, twins, seeds, changes in (
            ("own recipe", injected_runs.TWINS, HEALTHY_SEEDS[:2], own),
            ("the faults' recipe", injected_runs.ALL, HEALTHY_SEEDS, {}),
        )
        for twin in twins
        for seed in seeds
    ]
    return _told("healthy runs", runs)


def _report(group: str, name: str, found: Inspection) -> Report:
    alarms = tuple(f"{each.rule} {each.severity}" for each in found.findings if each.severity != "note")
    return Report(group=group, name=name, alarms=alarms, notes=len(found.findings) - len(alarms))


def _told(what: str, tasks: Sequence[Callable[[], Result]]) -> Iterable[Result]:
    """The results, with a line of progress for each."""
    for done, task in enumerate(tasks, 1):
        result = task()
        sys.stderr.write(f"\r{what} {done}/{len(tasks)} ")
        yield result
    sys.stderr.write("\n")


def page(static: Sequence[Trial], runs: Sequence[Trial], clean: Sequence[Report], healthy: Sequence[Report]) -> str:
    """The whole page in Markdown."""
    trials = [*static, *runs]
    judged = [each for each in clean if not each.error and each.name not in NOT_CLEAN]
    false = [each for each in (*judged, *healthy) if each.alarms]
    parts = [
        INTRODUCTION.format(steps=injected_runs.Recipe().steps),
        f"- {len(trials)} trials of {len({trial.fault for trial in trials})} faults: "
        f"{_share(trials, 'is_named')} named, {_share(trials, 'is_found')} placed.",
        f"- {len(judged)} clean models and {len(healthy)} healthy runs: {len(false)} with an error or a warning, "
        f"{sum(bool(each.notes) for each in (*judged, *healthy))} with a note.\n",
        "## In models\n",
        _trial_table(static),
        "## In runs\n",
        _trial_table(runs),
        "## Clean models and healthy runs\n",
        _clean_table(clean, healthy),
        "## Missed\n",
        _misses(trials),
        "## False alarms\n",
        "\n".join(f"- {each.group}, {each.name}: {', '.join(each.alarms)}" for each in false) or "None.",
        "\n## Not counted\n",
        _apart(clean),
    ]
    return "\n".join(parts) + "\n"


def _trial_table(trials: Sequence[Trial]) -> str:
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.fault].append(trial)
    lines = ["| fault | rules | families | trials | named | placed |", "|---|---|---:|---:|---:|---:|"]
    for name, group in [*groups.items(), ("**all**", list(trials))]:
        rules = ", ".join(group[0].expected) if name in groups else ""
        families = len({trial.family for trial in group})
        named, found = (_share(group, what) for what in ("is_named", "is_found"))
        lines.append(f"| {name.replace('|', '/')} | {rules} | {families} | {len(group)} | {named} | {found} |")
    return "\n".join(lines) + "\n"


def _share(trials: Sequence[Trial], what: str) -> str:
    return f"{100 * sum(getattr(trial, what) for trial in trials) / len(trials):.1f} %"


def _clean_table(clean: Sequence[Report], healthy: Sequence[Report]) -> str:
    lines = ["| | number | errors or warnings | notes |", "|---|---:|---:|---:|"]
    groups: dict[str, list[Report]] = defaultdict(list)
    for each in (*clean, *healthy):
        if not each.error and each.name not in NOT_CLEAN:
            groups[each.group if each in clean else f"healthy runs, {each.group}"].append(each)
    for name, group in groups.items():
        alarmed, noted = sum(bool(each.alarms) for each in group), sum(bool(each.notes) for each in group)
        lines.append(f"| {name} | {len(group)} | {alarmed} | {noted} |")
    return "\n".join(lines) + "\n"


def _misses(trials: Sequence[Trial]) -> str:
    counts = Counter(
        (trial.fault, " then ".join(f"{rule} ({severity})" for rule, severity, _ in trial.reported[:2]) or "nothing")
        for trial in trials
        if not trial.is_found
    )
    return "\n".join(f"- {fault}: {count} times {said}" for (fault, said), count in counts.items()) + "\n" or "None.\n"


def _apart(clean: Sequence[Report]) -> str:
    lines = [f"- {name}: {reason}" for name, reason in NOT_CLEAN.items()]
    lines += [f"- {each.name}: {each.error}" for each in clean if each.error]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
