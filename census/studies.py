"""The results of the studies: docs/explanation/studies, an index and one page per study.

python census/studies.py --conditions   write what is fixed before a run, one file per study; commit it, then run
python census/studies.py --from DIR     write the pages from the folder that `normkit study --all` left

A page is refused if the conditions of its results are not those of the committed file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

from normkit import files
from normkit.study.catalogue import NAMES, load, settings_of
from normkit.study.report import headline
from normkit.study.result import BOUNDS
from normkit.study.running import not_run
from normkit.text import counted, significant, spread

FOLDER = Path(__file__).parents[1] / "docs" / "explanation" / "studies"
CONDITIONS = FOLDER / "conditions"

INDEX = """\
# The published claims, rerun

These pages tell you which published statements about normalization hold when someone measures them again. Each study
trains small models and compares a paper's statement with its own numbers.

**Result** of {studies} of {all_studies} that were run under the conditions below: {headline}.
The column of seeds says which verdicts are older or still to come.

    normkit study --all                              # these: {seconds} seconds on a machine that others used too
    python census/studies.py --from normkit-out/study    # writes these pages

## How to read the numbers

- A measured value is the mean over the seeds. All variants of one seed start from the same weights and see the
  same batches, so that differences are paired. The brackets hold the 95 % interval of Student's t. Where a run
  diverged, the value is the median, and its interval that of the order statistics.
- **Conditions were fixed first.** Each page names the file of its conditions, its sha256 and the commit of the file.
- A condition **holds** if its mean lies within the bound. It is **open** if the seeds do not decide. All conditions of
  a page are tested together: the p-values are corrected (Holm), so that the chance of one wrong decision on a page is
  at most 5 %. A number that is **shown** has no bound and decides nothing.
- **Seeds** counts those within the bound. **Effect** is the distance of the mean from the bound in standard deviations
  over the seeds.
- "As good as" is a test of equivalence: the difference must be less than a quarter of what having a norm at all changes
  on the same task.
- A claim is **reproduced** if all its conditions hold, and **reproduced only if ...** if those of one regime do. It is
  **not testable here** if its positive control does not hold.
- {own} of {conditions} bounds are ours: no paper states them. The tables mark them.
- The models are small. A claim that fails here may hold at another size. Each page says where it was measured;
  `--budget full`, `--set` and `torchrun` go further: see [rerun the studies](../../how-to/rerun-the-studies.md).

Measured with torch {torch} on {cpu}.

![Gradient of the last MLP over the depth: level in Post-LN, falling like 1/sqrt(L) in Pre-LN](../../study.svg)

## All claims

| study | claim | verdict | seeds | [ledger](../claims.md) |
|---|---|---|---|---|
"""

STUDY = """\
# {title}

{question} This study asks it of small models.

- **Result**: {headline}
- **Measured on**: {regime}.
- **Data**: {data}.
- **Conditions**: [the file](conditions/{name}.json), sha256 `{sha256}`, {commit}.
- **Tests**: {tests} on this page, corrected together; {seeds}.
- **To repeat it**: `{command}`.
- **To read the tables**: see [how to read the numbers](index.md#how-to-read-the-numbers).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conditions", action="store_true", help="write the files of conditions")
    parser.add_argument("--from", dest="folder", type=Path, help="the folder `study` that `normkit study --all` left")
    arguments = parser.parse_args()
    if arguments.conditions:
        for name in NAMES:
            files.write_text(CONDITIONS / f"{name}.json", load(name).conditions())
    if arguments.folder is not None:
        write(arguments.folder)


def write(folder: Path) -> None:
    """Write the pages of all studies that a folder holds results of, and the index of all.

    The page of another study stays as it is; a study without a page gets one that says "not run".
    """
    studies = [_results(folder, name) for name in NAMES if (folder / name / "results.json").exists()]
    studies += [
        _not_run(name) for name in NAMES if not (FOLDER / f"{name}.md").exists() and not (folder / name).exists()
    ]
    for study in studies:
        committed = hashlib.sha256((CONDITIONS / f"{study['study']}.json").read_bytes()).hexdigest()
        if committed != study["conditions_sha256"]:
            raise SystemExit(f"{study['study']}: the conditions of the results are not those of its file; run it again")
    for name, text in pages(studies, sum(_seconds(folder / study["study"]) for study in studies)).items():
        files.write_text(FOLDER / f"{name}.md", text)


def _results(folder: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / name / "results.json").read_text(encoding="utf-8"))
    return document


def _not_run(name: str) -> dict[str, Any]:
    study = load(name)
    return not_run(study, settings_of(study), "not run yet").to_json()


def _kept(name: str) -> list[tuple[str, str]]:
    """The claims and verdicts of a page that stays as it is."""
    page = FOLDER / f"{name}.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    return re.findall(r"^## (.*)\n\n\*\*(.*?)\*\*\.", text, flags=re.MULTILINE)


def commit_of(name: str) -> str:
    """The commit that brought the conditions of a study, in words."""
    file = CONDITIONS / f"{name}.json"
    found = subprocess.run(["git", "log", "-1", "--format=%h", "--", file], cwd=FOLDER, capture_output=True, text=True)
    return f"commit {found.stdout.strip()}" if found.stdout.strip() else "not committed"


def pages(studies: list[dict[str, Any]], seconds: float) -> dict[str, str]:
    """The text of the index and of the page of each study, by name.

    Args:
        studies: The documents of all studies.
        seconds: How long they took on one core.
    """
    where = next((study["where"] for study in studies if study["where"]), {"torch": "none", "cpu": "none"})
    claims = [claim for study in studies for claim in study["claims"]]
    conditions = [
        each for claim in claims for each in (claim["control"], *claim["conditions"]) if each and each["judged"]
    ]
    measured = {study["study"]: study for study in studies}
    rows = []
    for name in NAMES:
        if name in measured:
            found = [(claim["says"], _verdict(claim), ", ".join(claim["ledger"])) for claim in measured[name]["claims"]]
            seeds = str(len(measured[name]["measurements"]))
        else:
            ledger = {claim.says: ", ".join(claim.ledger) for claim in load(name).claims}
            found = [(says, verdict, ledger.get(says, "")) for says, verdict in _kept(name)]
            seeds = "3, judged by their range"
        link = f"[{name}]({name}.md)"
        rows += [
            f"| {link} | {_cell(says)} | {verdict} | {'none yet' if verdict == 'not run' else seeds} | {numbers} |\n"
            for says, verdict, numbers in found
        ]
    introduction = INDEX.format(
        headline=headline(claim["verdict"] for claim in claims),
        studies=f"{len(studies)} studies",
        all_studies=len(NAMES),
        seconds=f"{seconds:,.0f}",
        own=sum(condition["bound"] == "ours" for condition in conditions),
        conditions=len(conditions),
        torch=where["torch"],
        cpu=where["cpu"],
    )
    return {"index": introduction + "".join(rows)} | {study["study"]: _study(study) for study in studies}


def _headline(claims: list[dict[str, Any]]) -> str:
    return headline(claim["verdict"] for claim in claims) + "."


def _seconds(folder: Path) -> float:
    """Of all finished arms together."""
    log = folder / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
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
            sha256=study["conditions_sha256"][:16],
            commit=commit_of(study["study"]),
            tests=study["tests"],
            seeds=_seeds(study),
            command=_command(study),
        )
    ]
    for claim in study["claims"]:
        rows = f" Decides {', '.join(claim['ledger'])} of [the ledger](../claims.md)." if claim["ledger"] else ""
        lines += [f"## {claim['says']}\n", f"**{_verdict(claim)}**. Source: {claim['source']}.{rows}\n"]
        lines.append("| must hold | published | measured | seeds | effect | holds |\n|---|---|---|---|---|---|")
        for condition in (*([claim["control"]] if claim["control"] else []), *claim["conditions"]):
            says = f"Control: {condition['says']}" if condition is claim["control"] else condition["says"]
            whose = f"; {BOUNDS[condition['bound']]}" if condition["judged"] else ""
            published = f"{condition['published'] or 'no number'}{whose}"
            seeds = f"{condition['within']}/{len(condition['values'])}" if condition["judged"] else ""
            cells = (_cell(says), _cell(published), _measured(condition), seeds, _effect(condition), _holds(condition))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    found = _findings(study["measurements"])
    if found:
        lines += ["## What `normkit inspect` says of the trained models\n", f"{found[0].upper()}{found[1:]}.\n"]
    return "\n".join(lines)


def _holds(condition: dict[str, Any]) -> str:
    """Yes, no or open, with the corrected p-value."""
    if not condition["judged"]:
        return "shown"
    p_value = condition["p_value"]
    return {True: "yes", False: "no", None: "open"}[condition["holds"]] + (
        ", p < 0.001" if p_value < 0.001 else f", p = {p_value:.2g}"
    )


def _effect(condition: dict[str, Any]) -> str:
    """The distance from the bound in standard deviations; a number without chance has none."""
    effect = _number(condition["effect_size"])
    if not condition["judged"] or effect is None or math.isinf(effect):
        return ""
    return significant(effect)


def _seeds(study: dict[str, Any]) -> str:
    """How many, which, and whether they are enough."""
    seeds = sorted(map(int, study["measurements"]))
    if not seeds:
        return "no seed yet"
    words = f"{counted(len(seeds), 'seed')}, {seeds[0]} to {seeds[-1]}"
    return f"{words}, which are few: {study['indicative']}" if study["indicative"] else words


def _command(study: dict[str, Any]) -> str:
    """What was typed."""
    usual = settings_of(load(study["study"]))
    # JSON has lists for tuples.
    changed = {name: value for name, value in study["settings"].items() if json.loads(json.dumps(usual[name])) != value}
    seeds = min(map(int, study["measurements"]), default=0)
    options = [f"--first-seed {seeds}"] * bool(seeds) + [f"--set {name}={value}" for name, value in changed.items()]
    return " ".join(["normkit study", study["study"], *options])


def _measured(condition: dict[str, Any]) -> str:
    mean = _number(condition["mean"])
    if mean is None:
        return "none"
    low, high = (_number(end) for end in condition["interval"])
    return f"{significant(mean)} [{spread((low or 0.0, high or 0.0))}]"


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
