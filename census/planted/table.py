"""The tables of judged runs, in Markdown.

python table.py                                        what each draw in `results` found, family by family
python table.py EXPECTED.json OUT.json VERDICTS.json   norms, blocks and rows of one run beside it
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

DRAWS = ("first", "second", "third", "fourth")
RESULTS = Path(__file__).resolve().parent / "results"
CLEAN = {"right": "no finding", "right, with a note": "a note"}
ORDER = ("found first", "found later", "misplaced", "misnamed", "missed", "silent", "crash")


def short(counts: Counter) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items(), key=lambda item: (*ORDER, item[0]).index(item[0])))


def placements(document: dict) -> str:
    counted = Counter(block["placement"] for block in document["blocks"])
    return ", ".join(f"{n} {name}" for name, n in counted.most_common()) or "no blocks"


def draws() -> str:
    """The findings of each draw: for each family the visible faults, then all cases by kind."""
    held = {name: json.loads(file.read_text()) for name in DRAWS if (file := RESULTS / f"{name}.json").exists()}
    families = list(dict.fromkeys(each["family"] for cases in held.values() for each in cases.values()))
    kinds = {
        "planted faults in models": lambda v: v["sort"] == "fault" and v["family"] != "runs",
        "planted faults in runs": lambda v: v["sort"] == "fault" and v["family"] == "runs",
        "faults that are not a norm's": lambda v: v["sort"] == "other",
        "faults that cannot be seen without a reference": lambda v: v["sort"] == "unseeable",
        "clean models": lambda v: v["sort"] == "clean" and v["family"] != "runs",
        "healthy oddities": lambda v: v["sort"] == "oddity" and v["family"] != "runs",
        "healthy runs": lambda v: v["sort"] in ("clean", "oddity") and v["family"] == "runs",
    }

    def of_faults(cases: dict, family: str) -> str:
        counts = Counter(v["verdict"] for v in cases.values() if v["family"] == family and v["sort"] == "fault")
        first, whole = counts.pop("found first", 0), sum(counts.values())
        return (f"{first} of {first + whole}" + (f" ({short(counts)})" if counts else "")) if first + whole else ""

    def of_kind(cases: dict, is_of: Callable[[dict], bool]) -> str:
        counts = Counter(v["verdict"] for v in cases.values() if is_of(v))
        return ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())

    columns = " | ".join(f"{name} draw" for name in held)
    line = "|---" * (len(held) + 1) + "|"
    rows = [[family, *(of_faults(cases, family) for cases in held.values())] for family in families]
    totals = [[kind, *(of_kind(cases, is_of) for cases in held.values())] for kind, is_of in kinds.items()]
    return "\n".join(
        [
            *(f"| faults found first in | {columns} |", line),
            *(f"| {' | '.join(row)} |" for row in rows if any(row[1:])),
            *("", f"| kind | {columns} |", line),
            *(f"| {' | '.join(row)} |" for row in totals),
        ]
    )


def main() -> None:
    if not sys.argv[1:]:
        print(draws())
        return
    expected, results, verdicts = (json.loads(Path(name).read_text()) for name in sys.argv[1:4])
    print("| family | norms found | batch norms found | blocks | rows | clean model |\n|---|---|---|---|---|---|")
    for identifier, said in expected.items():
        family, _, case = identifier.partition("/")
        if case != "clean" or family == "runs":
            continue
        if (document := results[identifier]["document"]) is None:
            print(f"| {family} | | | | | {verdicts[identifier]['verdict']} |")
            continue
        rows = Counter(site["row"] for site in document["sites"] if site["row"])
        norms, batch_norms, verdict = len(document["sites"]), len(document["batch_norms"]), verdicts[identifier]["verdict"]
        print(
            f"| {family} | {norms} of {said['sites']} | {batch_norms}"
            f"{'' if said['batch_norms'] is None else ' of ' + str(said['batch_norms'])} | {placements(document)} | "
            f"{', '.join(row for row, _ in rows.most_common())} | {CLEAN.get(verdict, verdict)} |"
        )


if __name__ == "__main__":
    main()
