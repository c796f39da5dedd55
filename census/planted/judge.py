"""Judge a run by the expected truths: python judge.py EXPECTED.json OUT.json VERDICTS.json [DRAW]

A verdict is read off the findings: their place is compared with the planted one, and title, measure and evidence with
the patterns of the case. `overrides.json` beside this file holds the verdicts that a reader set, each with the
reason, by the name of the draw.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent


def near(place: str, wanted: list[str]) -> bool:
    """Whether a place is one of the planted ones, in it or around it."""
    return any(place == w or place.startswith(f"{w}.") or (w and w.startswith(f"{place}.")) for w in wanted)


def reads(finding: dict, patterns: list[str]) -> bool:
    """Whether a finding's own words name the fault."""
    words = " ".join([finding["title"], finding["measured"], *finding["evidence"]])
    return any(re.search(pattern, words, re.I) for pattern in patterns)


def ambient(result: dict | None) -> set:
    """Notes that the clean model of the family has, too."""
    found = ((result or {}).get("document") or {}).get("findings", [])
    return {(f["rule"], tuple(f["sites"])) for f in found if f["severity"] == "note"}


def judge(expected: dict, result: dict, usual: set) -> tuple[str, str]:
    """The verdict of one case, and what it rests on; `usual` are notes that the clean model has, too."""
    if "crash" in result:
        return "crash", result["crash"].strip().splitlines()[-1]
    lacking = "No module named" in result["stderr"] and result["document"] is not None  # the environment's fault
    if result["exit"] not in (None, 0, 1) and not lacking:
        return "crash", f"exit {result['exit']}: {result['stderr'].strip()[-300:]}"
    if result["document"] is None:
        return "crash", f"no report: {result['stderr'].strip()[-300:]}"
    found = result["document"]["findings"]
    heavy = [f for f in found if f["severity"] in ("error", "warning")]
    brief = "; ".join(f"{f['rule']} {f['severity']} {f['measured']} [{', '.join(f['sites'][:2])}]" for f in found)
    sort = expected["sort"]
    if sort in ("clean", "oddity"):
        if heavy:
            return "false alarm", brief
        return ("right, with a note" if found else "right"), brief
    found = [f for f in found if f["severity"] != "note" or (f["rule"], tuple(f["sites"])) not in usual]
    brief = "; ".join(f"{f['rule']} {f['severity']} {f['measured']} [{', '.join(f['sites'][:2])}]" for f in found)
    where, patterns = expected["where"], expected["patterns"]
    if sort == "unseeable":
        placed = [f for f in heavy if near((f["sites"] or [""])[0], where)] if where else heavy
        if not heavy:
            return "right", brief or "nothing above a note"
        return ("named though unseeable" if placed else "blames another"), brief
    named = [f for f in found if reads(f, patterns)]
    placed = [f for f in named if any(near(place, where) for place in f["sites"] or [""])]
    first = [f for f in found if any(near(place, where) for place in f["sites"][:1] or [""]) and reads(f, patterns)]
    if first and found and first[0] is found[0]:
        return "found first", brief
    if placed:
        return "found later", brief
    if named:
        return "misplaced", brief
    if any(near(place, where) for f in found for place in f["sites"]):
        return "misnamed", brief
    if found:
        return "missed", brief
    relevant = [c["rule"] for c in result["document"]["checks"] if c["status"].startswith("not") and not c["needs_run"]]
    return "silent", f"not checked: {' '.join(relevant)}"


def main() -> None:
    expected, results = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    overrides = json.loads((HERE / "overrides.json").read_text()).get(sys.argv[4], {}) if sys.argv[4:] else {}
    verdicts = {}
    for identifier, said in expected.items():
        if identifier not in results:
            continue
        verdict, why = judge(said, results[identifier], ambient(results.get(f"{said['family']}/clean")))
        if identifier in overrides:
            verdict, why = overrides[identifier][0], f"{overrides[identifier][1]} ({verdict} by machine) | {why}"
        verdicts[identifier] = {"sort": said["sort"], "family": said["family"], "verdict": verdict, "why": why}
    Path(sys.argv[3]).write_text(json.dumps(verdicts, indent=1))
    for identifier, given in verdicts.items():
        print(f"{given['verdict']:20} {given['sort']:9} {identifier:40} {given['why'][:230]}")
    for sort in ("clean", "oddity", "fault", "other", "unseeable"):
        print(sort, dict(Counter(v["verdict"] for v in verdicts.values() if v["sort"] == sort)))


if __name__ == "__main__":
    main()
