"""An inspection as Markdown to paste into an issue: short, without colours, with all names escaped."""

from __future__ import annotations

import re

from rich.console import Console

from normkit.inspection.result import Inspection
from normkit.report.description import describe
from normkit.report.text import Norms
from normkit.text import shortened

_WIDTH = 100
_MOST_FINDINGS = 8
# Characters that Markdown or GitHub would read as markup, a mention or a link.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~@&!])")


def markdown(inspection: Inspection, origin: str) -> str:
    """The verdict, the main facts, the findings in one line each, and the table of norms in a code fence.

    Args:
        inspection: What was found.
        origin: The command and the versions that it came from, in a line.

    Returns:
        The text, ending with a line break.
    """
    report = describe(inspection)
    parts = [f"### {_plain(report.verdict.headline)}", f"{_plain(report.title)}: {_plain(report.subtitle)}"]
    parts.append("\n".join(f"- {fact.label}: {_plain(fact.value)}" for fact in report.glance) or _plain(report.source))
    lines = [
        f"- {found.severity} **{f'[{found.rule}]({found.page})' if found.page else found.rule}** "
        f"{_plain(found.title)}: {_plain(found.measured)}"
        + (f" (at {_plain(shortened(found.sites, 2))})" if found.sites else "")
        for found in report.findings[:_MOST_FINDINGS]
    ]
    if more := len(report.findings) - _MOST_FINDINGS:
        lines += [f"- and {more} more"] * (more > 0)
    parts += ["\n".join(lines)] * bool(lines)
    if report.sites.rows:
        parts.append(_fenced(_table(Norms(report.sites, report.formulas))))
    said = ", ".join(outcome.said for outcome in report.outcomes if outcome.label != "finding")
    parts += [f"{said}; {_plain(report.source)}", _plain(origin)]
    return "\n\n".join(parts) + "\n"


def _table(norms: Norms) -> str:
    console = Console(width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False, force_terminal=False)
    with console.capture() as capture:
        console.print(norms)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _fenced(text: str) -> str:
    """The text in a fence with more backticks than it contains."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _plain(text: str) -> str:
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
