"""The page of the survey of other people's norms, from its recorded runs: docs/wild.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from wild_libraries.rows import AGREES, CHOICE, LARGE_ERROR, MEAN, NOT_RUN, OWN_SOURCE, UNDECIDED, VERDICTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "wild.md"
RESULTS = Path(__file__).parent / "wild_libraries" / "results"
REPORTS = ROOT / "docs" / "wild" / "reports"

HEAD = """\
# Found in the wild

{total} norms of {libraries} libraries. {looked} were called and held against a source that is not their own code: an
equation of a paper, the library's documentation, or the reference implementation of the model; {missing} could not be
run. **{agrees} agree.** `nk.identify` found what each computes by calling it; no name and no comment was believed.

    python census/wild.py    # each group in an environment of its own; writes this page

{counts}

**How it was looked at.** *run*: the installed code was called. *transcribed*: the library does not run on a CPU, or is
no Python; its lines at the named commit were written down in PyTorch or NumPy and that was called, so the row shows the
formula and not the compiled code. *not run*: the row says why.

**How it was judged.** A paper states a formula and no roundings, so roundings are compared only where the source states
them. A choice that a library states is a difference and no fault. A difference that nobody could explain from a
source is *undecided*. The text in brackets behind a formula says where 16-bit inputs are rounded.

## Finds, each with a program and a report

{finds}

{sections}
## Digits lost where the mean is large

The formula of these is what it should be. They compute the variance as mean(x^2) - mean(x)^2, or lose its digits in
another way, where others sum the squares about the mean. Each centred norm was called on float32 rows with a mean of
{mean:g} standard deviations; its outputs, of a size of about 3, were held against float64. torch.nn.LayerNorm is 2e-3
off there; these are more than {limit:g} off. Flax says so of its default, and has a switch, `use_fast_variance`.

{far}

## Every implementation

| library | class or function | how | computes | should compute, by | verdict |
|---|---|---|---|---|---|
{rows}

## Installed versions

| group | libraries | rows | seconds | environment |
|---|---|---:|---:|---|
{groups}
"""


def documents() -> dict[str, dict[str, Any]]:
    """The recorded run of each group, by its name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def page() -> str:
    """The page as text."""
    recorded = documents()
    rows = [
        row
        | {"version": document["versions"].get(row["library"], "")}
        | ({"how": "not run"} if row["verdict"] == NOT_RUN else {})
        for document in recorded.values()
        for row in document["rows"]
    ]
    rows.sort(key=lambda row: row["library"].lower())
    return HEAD.format(
        total=len(rows),
        looked=sum(row["verdict"] != NOT_RUN for row in rows),
        missing=sum(row["verdict"] == NOT_RUN for row in rows),
        libraries=len({row["library"] for row in rows}),
        agrees=sum(row["verdict"] == AGREES for row in rows),
        counts=counts(rows),
        finds="\n".join(finds()),
        mean=MEAN,
        limit=LARGE_ERROR,
        sections="".join(section(rows, verdict) for verdict in (OWN_SOURCE, CHOICE, UNDECIDED)),
        far="\n".join(
            f"- **{row['library']}** {named(row)}, `{row['origin']}`: {row['far']}" for row in rows if row["far"]
        ),
        rows="\n".join(map(line, rows)),
        groups="\n".join(group_line(name, document) for name, document in recorded.items()),
    )


def counts(rows: Sequence[dict[str, Any]]) -> str:
    """How many rows have each verdict, agreements first, by how they were looked at."""
    found = Counter((row["verdict"], row["how"]) for row in rows)
    ways = ("run", "transcribed")
    lines = ["| verdict | rows | run | transcribed |", "|---|---:|---:|---:|"]
    for verdict in VERDICTS:
        numbers = [found[verdict, way] for way in ways]
        total = sum(number for (each, _), number in found.items() if each == verdict)
        lines.append(f"| {verdict} | {total} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def finds() -> list[str]:
    """The reports below docs/wild/reports, bugs first, one line each: where, what, and what it does to a model."""
    lines = {}
    for path in sorted(REPORTS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        told = dict(re.findall(r"^\| (verdict|effect) \| (.*) \|$", text, re.MULTILINE))
        parts = [f"[{title}](wild/reports/{path.name})", *([told["verdict"]] if told else [])]
        line = f"- {', '.join(parts)}{': ' + told['effect'] if 'effect' in told else ''}"
        lines[line] = told.get("verdict", "~").split()[0]
    return sorted(lines, key=lines.__getitem__)


def section(rows: Iterable[dict[str, Any]], verdict: str) -> str:
    """The rows of a verdict as a list, "" without any."""
    lines = [
        f"- **{row['library']}** {named(row)}, `{row['origin']}`: {row['remark']}"
        for row in rows
        if row["verdict"] == verdict
    ]
    return "\n".join([f"## {verdict.capitalize()}", "", *lines, "", ""]) if lines else ""


def named(row: dict[str, Any]) -> str:
    """The name of an implementation and its variant."""
    return f"`{row['name']}`" + (f" ({row['variant']})" if row["variant"] else "")


def line(row: dict[str, Any]) -> str:
    """One row of the long table."""
    remark = "; ".join(filter(None, (row["remark"], f"with a large mean {row['far']}" if row["far"] else "")))
    remark = f": {remark}" if remark else ""
    undecided = f" (open: {', '.join(row['open'])})" if row["open"] else ""
    repository, _, commit = row["repository"].partition("@")
    at = f"{repository} {commit[:8]}, {row['origin']}" if repository else row["origin"]
    cells = (
        f"{row['library']} {row['version']}".strip(),
        f"{named(row)}<br>`{at}`",
        row["how"],
        row["found"] + undecided if row["verdict"] != NOT_RUN else "",
        # A formula has a value for each field, also for those that the source does not state.
        row["source"] if row["verdict"] == AGREES else f"{row['expected']}, {row['source']}",
        f"{row['verdict']}{remark}",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def group_line(name: str, document: dict[str, Any]) -> str:
    """One group: its versions and its time."""
    versions = ", ".join(f"{library} {version}" for library, version in document["versions"].items())
    cells = (name, f"Python {document['python']}, {versions}", len(document["rows"]), document["seconds"])
    return f"| {' | '.join(map(str, cells))} | {document['environment']} |"
