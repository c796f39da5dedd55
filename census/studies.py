"""The results of the studies: docs/explanation/studies, an index and one page per study.

python census/studies.py              run all studies with the quick budget (15 minutes on 2 cores), write the pages
python census/studies.py --from DIR   write them from the folder that `normkit study --all` left
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
from normkit.study.catalogue import NAMES
from normkit.study.report import headline
from normkit.text import significant, spread

FOLDER = Path(__file__).parents[1] / "docs" / "explanation" / "studies"

INDEX = """\
# The published claims, rerun

These pages tell you which published statements about normalization hold when someone measures them again. Each study
trains small models and compares a paper's statement with its own numbers.

**Result**: {headline}

    normkit study --all --budget quick               # everything below: {seconds} seconds of one core in all
    python census/studies.py --from normkit-out/study    # writes these pages

## How to read the numbers

- A measured value is the median over {seeds} seeds. All variants of one seed start from the same weights and see the
  same batches. The brackets hold the interval of 95 % of the bootstrap medians. With three seeds that is their range.
- A condition **holds** if its whole interval lies within the bound. It is **open** if only a part of the interval does.
  A number that is **shown** has no bound and decides nothing.
- A claim is **reproduced** if all its conditions hold, and **reproduced only if ...** if those of one regime do.
- {own} of {conditions} conditions have no published number. There the bound is ours.
- The models are small. A claim that fails here may hold at another size. Each page says where it was measured;
  `--budget full`, `--set` and `torchrun` go further: see [rerun the studies](../../how-to/rerun-the-studies.md).

Measured with torch {torch} on {cpu}.

![Gradient of the last MLP over the depth: level in Post-LN, falling like 1/sqrt(L) in Pre-LN](../../study.svg)

## All claims

| study | claim | verdict | [ledger](../claims.md) |
|---|---|---|---|
"""

STUDY = """\
# {title}

{question} This study asks it of small models.

- **Result**: {headline}
- **Measured on**: {regime}.
- **Data**: {data}.
- **To repeat it**: `normkit study {name}`.
- **To read the tables**: see [how to read the numbers](index.md#how-to-read-the-numbers).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, help="the folder `study` that `normkit study --all` left")
    folder = parser.parse_args().folder
    if folder is not None:
        write(folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "normkit", "study", "--all", "--out", scratch], check=True)
        write(Path(scratch) / "study")


def write(folder: Path) -> None:
    """Write all pages from a folder of results."""
    studies = [json.loads((folder / name / "results.json").read_text(encoding="utf-8")) for name in NAMES]
    for name, text in pages(studies, sum(_seconds(folder / name) for name in NAMES)).items():
        files.write_text(FOLDER / f"{name}.md", text)


def pages(studies: list[dict[str, Any]], seconds: float) -> dict[str, str]:
    """The text of the index and of the page of each study, by name.

    Args:
        studies: The documents of all studies.
        seconds: How long they took on one core.
    """
    where = studies[0]["where"]
    claims = [claim for study in studies for claim in study["claims"]]
    conditions = [condition for claim in claims for condition in claim["conditions"]]
    introduction = INDEX.format(
        headline=_headline(claims),
        seconds=f"{seconds:,.0f}",
        seeds=" or ".join(str(seeds) for seeds in sorted({study["settings"]["seeds"] for study in studies})),
        own=sum(not condition["published"] for condition in conditions),
        conditions=len(conditions),
        torch=where["torch"],
        cpu=where["cpu"],
    )
    rows = (
        f"| [{study['study']}]({study['study']}.md) | {_cell(claim['says'])} | {_verdict(claim)} "
        f"| {', '.join(claim['ledger'])} |\n"
        for study in studies
        for claim in study["claims"]
    )
    return {"index": introduction + "".join(rows)} | {study["study"]: _study(study) for study in studies}


def _headline(claims: list[dict[str, Any]]) -> str:
    return headline(claim["verdict"] for claim in claims) + "."


def _seconds(folder: Path) -> float:
    """Of all finished arms together."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line).get("seconds", 0.0) for line in lines)


def _study(study: dict[str, Any]) -> str:
    lines = [
        STUDY.format(
            title=study["title"],
            question=study["question"],
            headline=_headline(study["claims"]),
            regime=study["regime"].rstrip("."),
            data=study["data"],
            name=study["study"],
        )
    ]
    for claim in study["claims"]:
        rows = f" Decides {', '.join(claim['ledger'])} of [the ledger](../claims.md)." if claim["ledger"] else ""
        lines += [f"## {claim['says']}\n", f"**{_verdict(claim)}**. Source: {claim['source']}.{rows}\n"]
        lines.append("| must hold | published | measured | holds |\n|---|---|---|---|")
        for condition in claim["conditions"]:
            holds = {True: "yes", False: "no", None: "open"}[condition["holds"]] if condition["judged"] else "shown"
            published = _cell(condition["published"] or "no number")
            lines.append(f"| {_cell(condition['says'])} | {published} | {_measured(condition)} | {holds} |")
        lines.append("")
    found = _findings(study["measurements"])
    if found:
        lines += ["## What `normkit inspect` says of the trained models\n", f"{found[0].upper()}{found[1:]}.\n"]
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
