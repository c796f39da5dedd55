"""The results of the studies: docs/explanation/studies, an index and one page per study.

python census/studies.py --conditions   write what is fixed before a run, one file per study; commit it, then run
python census/studies.py --from DIR     keep the results of the studies that DIR holds, and write the pages

DIR is the folder `study` that `normkit study` left, with one study or all. What a page shows of a study, with the
value of each seed, is kept in docs/explanation/studies/results. Results under other conditions than those of the
committed file are refused. A run with --first-seed is kept beside the first one: the page compares their verdicts.
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
from normkit.text import counted, significant, spread

FOLDER = Path(__file__).parents[1] / "docs" / "explanation" / "studies"
CONDITIONS = FOLDER / "conditions"
RESULTS = FOLDER / "results"

INDEX = """\
# The published claims, rerun

These pages tell you which published statements about normalization hold when someone measures them again. Each study
trains small models and compares a paper's statement with its own numbers.

**Result** of {studies} of {all_studies} that were run under the conditions below: {headline}.
{again}
    normkit study                                        # the studies, and how long each takes
    normkit study --all                                  # these
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
- {own} of the {conditions} bounds of all studies are ours: no paper states them. The tables mark them.
- The models are small. A claim that fails here may hold at another size. Each page says where it was measured;
  `--budget full`, `--set` and `torchrun` go further: see [rerun the studies](../../how-to/rerun-the-studies.md).

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
- **Machine**: torch {torch} on {cpu}.
- **Conditions**: [the file](conditions/{name}.json), sha256 `{sha256}`, {commit}.
- **Tests**: {tests} on this page, corrected together; {seeds}. [The value of each seed](results/{name}.json).
{again}- **To repeat it**: `{command}`.
- **To read the tables**: see [how to read the numbers](index.md#how-to-read-the-numbers).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conditions", action="store_true", help="write the files of conditions")
    parser.add_argument("--from", dest="folder", type=Path, help="the folder `study` that `normkit study` left")
    arguments = parser.parse_args()
    if arguments.conditions:
        for name in NAMES:
            files.write_text(CONDITIONS / f"{name}.json", load(name).conditions())
    if arguments.folder is not None:
        keep(arguments.folder)
        again = [_document(file) for file in sorted(RESULTS.glob("*-from-*.json"))]
        for name, text in pages([_document(RESULTS / f"{name}.json") for name in NAMES], again).items():
            files.write_text(FOLDER / f"{name}.md", text)


def keep(folder: Path) -> None:
    """Keep what the pages show of each study that a folder holds results of.

    Raises:
        SystemExit: If it holds none, or a study was run under other conditions than those of its committed file.
    """
    held = [name for name in NAMES if (folder / name / "results.json").exists()]
    if not held:
        raise SystemExit(f"{folder}: no study's folder with results.json in it; expected the folder `study`")
    for name in held:
        document = _document(folder / name / "results.json")
        committed = hashlib.sha256((CONDITIONS / f"{name}.json").read_bytes()).hexdigest()
        if committed != document["conditions_sha256"]:
            raise SystemExit(f"{name}: the conditions of the results are not those of its file; run it again")
        kept = shown(document)
        text = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
        files.write_text(RESULTS / _file_name(name, kept["seeds"]), text)


def shown(document: dict[str, Any]) -> dict[str, Any]:
    """The document of a study without its measurements: claims, conditions with their values, seeds and findings."""
    measurements = document["measurements"]
    kept = {name: value for name, value in document.items() if name != "measurements"}
    return {**kept, "seeds": sorted(map(int, measurements)), "findings": _findings(measurements)}


def _document(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def _file_name(name: str, seeds: list[int]) -> str:
    first = min(seeds, default=0)
    return f"{name}-from-{first}.json" if first else f"{name}.json"


def commit_of(name: str) -> str:
    """The commit that brought the conditions of a study, in words."""
    file = CONDITIONS / f"{name}.json"
    found = subprocess.run(
        ["git", "log", "-1", "--abbrev=8", "--format=%h", "--", file], cwd=FOLDER, capture_output=True, text=True
    )
    return f"commit {found.stdout.strip()}" if found.stdout.strip() else "not committed"


def pages(studies: list[dict[str, Any]], again: list[dict[str, Any]]) -> dict[str, str]:
    """The text of the index and of the page of each study, by name.

    Args:
        studies: What is kept of the studies.
        again: What is kept of further runs of some of them, with other seeds.
    """
    rows: list[str] = []
    for study in studies:
        ledger = {claim.says: ", ".join(claim.ledger) for claim in load(study["study"]).claims}
        seeds = len(study["seeds"])
        for claim in study["claims"]:
            cells = (
                f"[{study['study']}]({study['study']}.md)",
                _cell(claim["says"]),
                _verdict(claim),
                str(seeds) if seeds else "none yet",
                ledger.get(claim["says"], ""),
            )
            rows.append(f"| {' | '.join(cells)} |\n")
    judged = [
        condition
        for name in NAMES
        for claim in load(name).claims
        for condition in (claim.control, *claim.conditions)
        if condition is not None and condition.judged
    ]
    introduction = INDEX.format(
        headline=headline(claim["verdict"] for study in studies if study["seeds"] for claim in study["claims"]),
        studies=f"{sum(bool(study['seeds']) for study in studies)} studies",
        all_studies=len(NAMES),
        again=_repeated(studies, again),
        own=sum(condition.bound == "ours" for condition in judged),
        conditions=len(judged),
    )
    return {"index": introduction + "".join(rows)} | {
        study["study"]: _study(study, [other for other in again if other["study"] == study["study"]])
        for study in studies
    }


def _headline(claims: list[dict[str, Any]]) -> str:
    return headline(claim["verdict"] for claim in claims) + "."


def _study(study: dict[str, Any], again: list[dict[str, Any]]) -> str:
    lines = [
        STUDY.format(
            title=study["title"],
            question=study["question"],
            headline=_headline(study["claims"]),
            regime=study["regime"].rstrip("."),
            data=study["data"],
            torch=study["where"].get("torch", "none"),
            cpu=study["where"].get("cpu", "none"),
            name=study["study"],
            sha256=study["conditions_sha256"][:16],
            commit=commit_of(study["study"]),
            tests=study["tests"],
            seeds=_seeds(study),
            again="".join(_compared(study, other) for other in again),
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
    found = study["findings"]
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
    seeds = study["seeds"]
    if not seeds:
        return "no seed yet"
    words = f"{counted(len(seeds), 'seed')}, {seeds[0]} to {seeds[-1]}"
    return f"{words}, which are few: {study['indicative']}" if study["indicative"] else words


def _repeated(studies: list[dict[str, Any]], again: list[dict[str, Any]]) -> str:
    """One paragraph: how many verdicts other seeds confirm."""
    if not again:
        return ""
    names = {other["study"] for other in again}
    other = sum(len(_otherwise(study, run)) for study in studies for run in again if study["study"] == run["study"])
    claims = sum(len(run["claims"]) for run in again)
    return (
        f"\n{len(names)} of the studies were run a second time, with ten other seeds: {claims - other} of their "
        f"{claims} claims got the same verdict. Their pages name the others.\n"
    )


def _otherwise(study: dict[str, Any], again: dict[str, Any]) -> dict[str, str]:
    """The claims that have another verdict with other seeds, and that verdict."""
    first = {claim["says"]: _verdict(claim) for claim in study["claims"]}
    return {claim["says"]: _verdict(claim) for claim in again["claims"] if _verdict(claim) != first[claim["says"]]}


def _compared(study: dict[str, Any], again: dict[str, Any]) -> str:
    """One line: do other seeds give the same verdicts?"""
    seeds, count = again["seeds"], counted(len(again["claims"]), "claim")
    other = _otherwise(study, again)
    told = "; ".join(f'"{says}" is {verdict} there' for says, verdict in other.items())
    return (
        f"- **Again with seeds {seeds[0]} to {seeds[-1]}**: "
        + (f"other verdicts on {len(other)} of {count}: {told}" if other else f"the same verdict on {count}")
        + f". [The value of each of these seeds](results/{_file_name(study['study'], seeds)}).\n"
    )


def _command(study: dict[str, Any]) -> str:
    """What was typed."""
    usual = settings_of(load(study["study"]))
    # JSON has lists for tuples.
    changed = {name: value for name, value in study["settings"].items() if json.loads(json.dumps(usual[name])) != value}
    first = min(study["seeds"], default=0)
    options = [f"--first-seed {first}"] * bool(first) + [f"--set {name}={value}" for name, value in changed.items()]
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
