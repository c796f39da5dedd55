"""The result as Markdown: counts by kind, then each fault that was not named first, and each false alarm."""

from collections import Counter
from typing import Any

from .judging import CLEAN_OUTCOMES, FAULT_OUTCOMES


def counts(records: dict[str, dict[str, Any]], outcomes: tuple[str, ...]) -> list[str]:
    """One table: a row a kind."""
    kinds = list(dict.fromkeys(record["kind"] for record in records.values()))
    lines = [f"| kind | cases | {' | '.join(outcomes)} |", f"|---|---:|{'---:|' * len(outcomes)}"]
    for kind in [*kinds, "**all**"]:
        chosen = [record for record in records.values() if kind in (record["kind"], "**all**")]
        found = Counter(record["outcome"] for record in chosen)
        lines.append(f"| {kind} | {len(chosen)} | {' | '.join(str(found[name] or '') for name in outcomes)} |")
    return lines


def said(record: dict[str, Any]) -> str:
    """What was said first, in one line."""
    if record.get("trace"):
        return record["trace"].strip().splitlines()[-1]
    if not record["findings"]:
        return "nothing"
    finding = record["findings"][0]
    sites = ", ".join(finding.get("sites", ())[:3])
    return f"{finding.get('severity', '')} {finding['title']}; {finding.get('measured', '')} [{sites}]".replace(
        "|", "/"
    ).strip()


def details(records: dict[str, dict[str, Any]]) -> list[str]:
    """One row a case."""
    lines = ["| case | outcome | truth | planted at | said first |", "|---|---|---|---|---|"]
    for name, record in records.items():
        where = ", ".join(record.get("places", ())[:3])
        lines.append(f"| {name} | {record['outcome']} | {record['truth']} | {where} | {said(record)} |")
    return lines


def markdown(document: dict[str, Any]) -> str:
    """The whole page."""
    records = document["cases"]
    parts = {
        "Faults that a tool could see": {n: r for n, r in records.items() if not r["clean"] and r["seeable"]},
        "Faults that none could see without a reference": {
            n: r for n, r in records.items() if not r["clean"] and not r["seeable"]
        },
        "Healthy": {n: r for n, r in records.items() if r["clean"]},
    }
    lines = [
        "# The catalogue from outside",
        "",
        f"Draw {document['draw']}, {len(records)} cases, {document['seconds']} s.",
        "",
    ]
    for title, chosen in parts.items():
        lines += [f"## {title}", "", *counts(chosen, CLEAN_OUTCOMES if title == "Healthy" else FAULT_OUTCOMES), ""]
    good = ("first", "right", "quiet")
    rest = {name: record for name, record in records.items() if record["outcome"] not in good}
    return "\n".join([*lines, "## Cases that were not answered as they should be", "", *details(rest), ""])
