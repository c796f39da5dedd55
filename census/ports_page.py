"""The page of the catalogue of ports, from its recorded runs: docs/explanation/ports.md.

python census/ports_page.py                               write the page
python census/ports_page.py --check                       say whether it is up to date
python census/ports_page.py --record OUT.json FORM.json RUN  keep a run of census/ports/run.py as "first" or "second"
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from normkit import files
from pages import settle

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "ports.md"
RESULTS = Path(__file__).parent / "ports" / "results"
RUNS = {"first": "first run", "second": "after mending, new draw"}
GOOD = ("right", "found first")
GROUPS = {
    "gguf": "GGUF files",
    "safetensors": "folders and safetensors files",
    "metadata": "settings",
    "mlx": "folders of MLX",
    "onnx": "ONNX files",
    "recording": "recordings",
    "code": "ports in code",
    "image": "norms of images, in code",
    "real": "made from real trained models",
    "python": "in Python",
    "passports": "passports",
    "identify": "one file alone: identify",
    "rows": "recorded rows: identify_rows",
    "blind": "nothing to see in what is given",
    "hostile": "damaged or unusable files",
}

HEAD = """\
# Ports judged by someone who had not seen `compare`

How often does `normkit compare` say what is wrong with somebody else's port? This page answers for a catalogue whose
author had read the task and not the code: **{good} of {cases} answered as they should be on the first run.**

Each case builds a port and its reference with random places, sizes, dtypes and seeds, and states its truth before the
run (`census/ports/truth.md`). The logits of port and reference were computed in float64 without normkit.
{healthy} of the cases are healthy and must be called so. Damaged files must be refused in a line.

    python census/ports/run.py SEED OUT.json      # NORMKIT_REAL_MODELS names the folder of the four trained models
    python census/ports/judge.py OUT.json         # truth beside output
    python census/ports_page.py                   # this page, from census/ports/results

A fault counts if the first fourteen lines name it and its place. A healthy port counts if nothing is called different.
**found**: named further below, or with exit code 0. **misnamed**: the place is right, the name is another.
**misplaced**: the name is right, the place another. A machine judges by many wordings, and a person where that is not
enough.{runs}

| kind | {names} |
|---|{lines}
"""


def record(result: Path, form: Path, run: str) -> None:
    """Keep what the page needs of a run: the truth, the verdict, and the first sentences of the answer."""
    judged = json.loads(form.read_text())
    cases = {}
    for case in json.loads(result.read_text())["cases"]:
        verdict = judged[case["id"]]
        lines = [line.strip() for line in case.get("stdout", "").splitlines() if line.strip()]
        said = [line for line in lines if line[:2] in ("x ", "i ", "+ ")] or case.get("stderr", "").splitlines()[-1:]
        cases[case["id"]] = {
            "group": case["truth"]["group"],
            "truth": case["truth"]["fault"],
            "healthy": case["truth"]["healthy"],
            "verdict": verdict["human"] or verdict["machine"],
            "said": said[0] if said else "",
        }
    files.write_text(RESULTS / f"{run}.json", files.json_text({"cases": cases}))


def page() -> str:
    """The page in Markdown."""
    runs = {
        run: json.loads((RESULTS / f"{run}.json").read_text())["cases"]
        for run in RUNS
        if (RESULTS / f"{run}.json").exists()
    }
    first = list(runs["first"].values())
    told = " Both columns are runs of the same kinds of case; the second is another draw." if len(runs) > 1 else ""
    lines = [
        HEAD.format(
            good=sum(case["verdict"] in GOOD for case in first),
            cases=len(first),
            healthy=sum(case["healthy"] for case in first),
            runs=told,
            names=" | ".join(RUNS[run] for run in runs),
            lines="---|" * len(runs),
        ).rstrip("\n")
    ]
    for group, words in [*GROUPS.items(), ("", "**all**")]:
        cells = [_cell([case for case in cases.values() if group in ("", case["group"])]) for cases in runs.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    for run, cases in runs.items():
        lines += ["", f"## {RUNS[run].capitalize()}: what was not answered as it should be", ""]
        lines += ["| case | truth | answer | judged |", "|---|---|---|---|"]
        for name, case in cases.items():
            if case["verdict"] not in GOOD:
                said, truth = (case[key].replace("|", "\\|") for key in ("said", "truth"))
                lines.append(f"| `{name}` | {truth} | {said} | {case['verdict']} |")
    return "\n".join(lines) + "\n"


def _cell(cases: list[dict[str, Any]]) -> str:
    counts = Counter(case["verdict"] for case in cases)
    rest = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common() if verdict not in GOOD)
    return f"{sum(counts[verdict] for verdict in GOOD)} of {len(cases)}" + (f" ({rest})" if rest else "")


def main() -> None:
    """Keep a run, write the page, or compare it with what would be written."""
    if sys.argv[1:2] == ["--record"]:
        record(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    settle(PAGE, page(), check=sys.argv[1:] == ["--check"])


if __name__ == "__main__":
    main()
