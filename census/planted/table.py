"""The tables of a judged run, in Markdown: python table.py EXPECTED.json OUT.json VERDICTS.json"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

ORDER = ("found first", "found later", "misplaced", "misnamed", "missed", "silent", "crash")


def short(counts: Counter) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items(), key=lambda item: ORDER.index(item[0])))


def placements(document: dict) -> str:
    counted = Counter(block["placement"] for block in document["blocks"])
    return ", ".join(f"{n} {name}" for name, n in counted.most_common()) or "no blocks"


def main() -> None:
    expected, results, verdicts = (json.loads(Path(name).read_text()) for name in sys.argv[1:4])
    families = list(dict.fromkeys(said["family"] for said in expected.values()))
    print("| family | norms found | batch norms | blocks | rows | clean model | planted faults that can be seen |")
    print("|---|---|---|---|---|---|---|")
    for family in families:
        held = [i for i, said in expected.items() if said["family"] == family]
        at = f"{family}/clean"
        if at not in expected or family == "runs":
            continue
        said, result = expected[at], results.get(at, {})
        document = result.get("document")
        faults = Counter(
            verdicts[i]["verdict"] for i in held if expected[i]["sort"] in ("fault", "other") and i in verdicts
        )
        first = faults.pop("found first", 0)
        told = f"{first} of {first + sum(faults.values())} first" + (f" ({short(faults)})" if faults else "")
        unseen = Counter(verdicts[i]["verdict"] for i in held if expected[i]["sort"] == "unseeable" and i in verdicts)
        told += f"; {sum(unseen.values())} that cannot be seen: " + ", ".join(unseen) if unseen else ""
        if document is None:
            print(f"| {family} | - | - | - | - | {verdicts.get(at, {}).get('verdict')} | {told} |")
            continue
        rows = ", ".join(
            row for row, _ in Counter(site["row"] for site in document["sites"] if site["row"]).most_common()
        )
        print(
            f"| {family} | {len(document['sites'])} of {said['sites']} | {len(document['batch_norms'])} of "
            f"{said['batch_norms'] or 0} | {placements(document)} | {rows or '-'} | "
            f"{verdicts[at]['verdict']} | {told} |"
        )
    print()
    for sort in ("clean", "oddity", "fault", "other", "unseeable"):
        for part in ("models", "runs"):
            counted = Counter(
                v["verdict"]
                for i, v in verdicts.items()
                if v["sort"] == sort and (v["family"] == "runs") == (part == "runs")
            )
            if counted:
                print(f"- {sort}, {part}: {sum(counted.values())} cases: {dict(counted.most_common())}")


if __name__ == "__main__":
    main()
