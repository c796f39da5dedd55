"""The page of the catalogue from outside, from its recorded runs: docs/explanation/outside.md.

python census/outside_page.py                         write the page
python census/outside_page.py --check                 say whether it is up to date
python census/outside_page.py --record FILE.json RUN  keep a result of census/outside/run.py as "first" or "second"
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from normkit import files
from pages import settle

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "outside.md"
RESULTS = Path(__file__).parent / "outside" / "results"
TRAINED = RESULTS / "trained_models.txt"
RUNS = {"before": "the tree before", "first": "first run", "second": "after mending, new draw"}
"""Recorded runs, oldest first, and what the page calls them."""

INTRODUCTION = """\
# Faults planted by someone who has not read the rules

How many faults of other people does normkit find? This page answers for a catalogue whose author had not read the
rules, their code, their tests or their list of faults: **{found} were named first and placed on the first run.**

[The page of faults](faults.md) plants faults for which a rule exists. It shows that no rule broke, and cannot show a
rule that is missing. This catalogue (`census/outside`) was written from the specification of norms alone: each field of
a norm's definition, each place in a block, each way in which loading, converting, an optimizer or a dataset goes wrong.
Each case states its truth before its run.

    python census/outside/run.py --draw 1 --out result.json --models FOLDER
    python census/outside_page.py          # writes this page from census/outside/results

FOLDER holds the folders `smollm2`, `gemma3` and `qwen05`: SmolLM2-135M-Instruct, Gemma 3 270M, Qwen2.5-Coder 0.5B.

- **the tree before**: draw {before[draw]}, run on the code as it was before the defects known by then were mended.
- **first run**: the same cases on the mended code, whose authors had not seen the catalogue. Quote this figure.
- **after mending, new draw**: the same kinds of fault at other places, sizes, dtypes and seeds (draw {second[draw]}),
  after the faults that the first run had missed were looked at.

Placed means that the finding's first place is the planted one. Between the run on the old code and the first run the
judging was corrected, not the cases; both are judged by the corrected one.

A number counts the cases in which the first finding names the fault and its place; for a fault that none can see, the
cases in which the report says that it was not checked, or blames nothing wrongly; for a healthy case, silence or at
most a note.
**found**: another finding names it. **missed**: findings, none of them about the fault. **silence**: no finding.
"""


KEPT = ("kind", "truth", "clean", "seeable", "outcome")
"""What is kept of a case, beside its first finding or the last line of its traceback."""


def record(result: Path, run: str) -> None:
    """Keep what the page states of a result, without the paths of the machine."""
    document = json.loads(result.read_text(encoding="utf-8"))
    cases = {}
    for name, case in document["cases"].items():
        finding = next(iter(case["findings"]), None)
        said = f"{finding['title']}; {finding.get('measured', '')}".strip("; ") if finding else "nothing"
        said = case["trace"].strip().splitlines()[-1] if case.get("trace") else said
        cases[name] = {key: case[key] for key in KEPT} | {"said": said}
    kept = {"draw": document["draw"], "seconds": document["seconds"], "cases": cases}
    files.write_text(RESULTS / f"{run}.json", json.dumps(kept, indent=1) + "\n")


def documents() -> dict[str, dict[str, Any]]:
    """The recorded runs by name."""
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in RUNS}


def groups(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Cases by what is asked of a tool: to name a fault, to say that it cannot know, or to stay silent."""
    cases = [*document["cases"].values()]
    return {
        "Faults that a tool can see": [case for case in cases if not case["clean"] and case["seeable"]],
        "Faults that none can see without a reference": [
            case for case in cases if not case["clean"] and not case["seeable"]
        ],
        "Healthy models, runs and norms": [case for case in cases if case["clean"]],
    }


def counts(cases: list[dict[str, Any]]) -> str:
    """The outcomes of some cases in one cell."""
    found = Counter(case["outcome"] for case in cases)
    good = sum(found.pop(name, 0) for name in ("first", "right", "quiet")) + found["note"]
    rest = ", ".join(f"{number} {outcome}" for outcome, number in found.most_common() if number)
    return f"{good} of {len(cases)}" + (f" ({rest})" if rest else "")


def rows(runs: dict[str, dict[str, Any]]) -> list[str]:
    """For each group a table: one row per kind of fault, one column per run."""
    lines = []
    for group in groups(runs["first"]):
        by_run = [groups(document)[group] for document in runs.values()]
        lines += [
            f"## {group}",
            "",
            f"| kind | {' | '.join(RUNS[name] for name in runs)} |",
            f"|---|{'---|' * len(runs)}",
        ]
        for kind in [*dict.fromkeys(case["kind"] for case in by_run[1]), "**all**"]:
            chosen = ([case for case in cases if kind in (case["kind"], "**all**")] for cases in by_run)
            lines.append(f"| {kind} | {' | '.join(map(counts, chosen))} |")
        lines.append("")
    return lines


def missed(document: dict[str, Any]) -> list[str]:
    """What the last run did not answer as it should, case by case."""
    lines = [
        "## Not answered as it should be, in the last run",
        "",
        "| case | outcome | truth | said first |",
        "|---|---|---|---|",
    ]
    for name, case in document["cases"].items():
        if case["outcome"] not in ("first", "right", "quiet", "note"):
            lines.append(f"| {name} | {case['outcome']} | {case['truth']} | {case['said'].replace('|', '/')} |")
    return lines


def trained() -> list[str]:
    """The findings in whole trained models without a fault, as census/trained_models.py printed them."""
    lines = ["## Whole trained models without a fault", "", "`python census/trained_models.py FOLDER`:", ""]
    return [*lines, *(f"    {line}" for line in TRAINED.read_text(encoding="utf-8").splitlines()), ""]


def page() -> str:
    """The page as text."""
    runs = documents()
    found = counts(groups(runs["first"])["Faults that a tool can see"]).partition(" (")[0]
    return "\n".join([INTRODUCTION.format(**runs, found=found), *rows(runs), *trained(), *missed(runs["second"]), ""])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(Path(sys.argv[2]), sys.argv[3])
    else:
        settle(PAGE, page(), check="--check" in sys.argv)
