"""What the studies measured: docs/studies.md.

python census/studies.py              run all studies with the quick budget (some 15 minutes on 2 cores), write the page
python census/studies.py --from DIR   write it from what `normkit study --all --out DIR` left
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from normkit import files
from normkit.plots.numerals import significant, spread
from normkit.report.study import headline
from normkit.study.catalogue import NAMES

PAGE = Path(__file__).parents[1] / "docs" / "studies.md"

INTRODUCTION = """\
# The published claims, rerun

What papers and introductions say of normalization, each as a number with a bound, measured on small models that are
trained on the spot. {headline}

    normkit study --all --budget quick               # what is below: {seconds} seconds of one core in all
    python census/studies.py --from normkit-study    # writes this page

Measured are medians over {seeds} paired seeds, in brackets the interval of 95 % of the bootstrap medians: with three
seeds that is their range. A condition holds where its whole interval lies within the bound, and is open where only a
part does; "shown" decides nothing. A claim is reproduced where all its conditions hold, reproduced only if ... where
those of a named regime do. What fails here, at these sizes, may hold at others: each study says where it was measured,
and `--budget full`, `--set` and `torchrun` go further.

torch {torch}, {cpu}.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, help="what `normkit study --all --out DIR` left")
    folder = parser.parse_args().folder
    if folder is not None:
        files.write_text(PAGE, page(folder))
        return
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "normkit", "study", "--all", "--out", scratch], check=True)
        files.write_text(PAGE, page(Path(scratch)))


def page(folder: Path) -> str:
    """The page as text."""
    studies = [json.loads((folder / name / "results.json").read_text(encoding="utf-8")) for name in NAMES]
    where = studies[0]["where"]
    parts = [
        INTRODUCTION.format(
            headline=headline(claim["verdict"] for study in studies for claim in study["claims"]) + ".",
            seconds=f"{sum(_seconds(folder / name) for name in NAMES):,.0f}",
            seeds=" or ".join(str(seeds) for seeds in sorted({study["settings"]["seeds"] for study in studies})),
            torch=where["torch"],
            cpu=where["cpu"],
        ),
        "| study | claim | verdict | [ledger](claims.md) |\n|---|---|---|---|\n",
        *(
            f"| [{study['study']}](#{study['study']}) | {_cell(claim['says'])} | {_verdict(claim)} "
            f"| {', '.join(claim['ledger'])} |\n"
            for study in studies
            for claim in study["claims"]
        ),
    ]
    return "".join([*parts, *map(_study, studies)])


def _seconds(folder: Path) -> float:
    """Of all finished arms together."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line).get("seconds", 0.0) for line in lines)


def _study(study: dict[str, Any]) -> str:
    lines = [f"\n## {study['study']}\n", f"{study['question']} {study['regime'].rstrip('.')}."]
    lines.append(f"Data: {study['data']}.\n")
    for claim in study["claims"]:
        lines.append(f"**{_verdict(claim)}**: {claim['says']} ({claim['source']}).\n")
        lines.append("| must hold | published | measured | holds |\n|---|---|---|---|")
        for condition in claim["conditions"]:
            holds = {True: "yes", False: "no", None: "open"}[condition["holds"]] if condition["judged"] else "shown"
            published = _cell(condition["published"] or "no number")
            lines.append(f"| {_cell(condition['says'])} | {published} | {_measured(condition)} | {holds} |")
        lines.append("")
    found = _findings(study["measurements"])
    if found:
        lines.append(f"`inspect` on the trained models: {found}.\n")
    return "\n".join(lines)


def _measured(condition: dict[str, Any]) -> str:
    median = _number(condition["median"])
    if median is None:
        return "none"
    low, high = (_number(end) for end in condition["interval"])
    return f"{significant(median)} [{spread((low or 0.0, high or 0.0))}]"


def _number(value: float | str | None) -> float | None:
    """Infinities are words in the document, for JSON has none."""
    return None if value is None or value == "nan" else float(value)


def _findings(measurements: dict[str, Any]) -> str:
    """Rule -> in how many arms, over all seeds."""
    arms: dict[str, set[str]] = {}
    probed = set()
    for paired in measurements.values():
        for arm, measured in paired.items():
            if "findings" in measured:
                probed.add(arm)
                for finding in measured["findings"]:
                    arms.setdefault(f"{finding['rule']} ({finding['severity']})", set()).add(arm)
    if not probed:
        return ""
    told = "; ".join(f"{rule} in {_names(found, probed)}" for rule, found in sorted(arms.items()))
    return told or f"no finding in any of {len(probed)} arms"


def _names(arms: set[str], probed: set[str]) -> str:
    if len(arms) == len(probed):
        return "all arms"
    return ", ".join(sorted(arms)) if len(arms) <= 4 else f"{len(arms)} of {len(probed)} arms"


def _verdict(claim: dict[str, Any]) -> str:
    return f"{claim['verdict']} {claim['only_if']}".strip()


def _cell(text: str) -> str:
    return re.sub(r"\|", r"\\|", text)


if __name__ == "__main__":
    main()
