"""A study in words: its claims with their numbers, for a terminal and as a page; and the page over several studies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from normkit.files import write_bytes, write_text
from normkit.show.html import html_page
from normkit.show.parts import Fact, Tone, printable
from normkit.show.terminal import marked
from normkit.study.arm_context import Setting
from normkit.study.figures import study_drawing
from normkit.study.result import Decided, Judged, StudyResult, Verdict
from normkit.text import counted, significant, spread

_HERE = Path(__file__).parent
_TONES: dict[Verdict, Tone] = {
    "reproduced": "good",
    "reproduced only if": "note",
    "not reproduced": "warning",
    "undecided": "neutral",
    "not run": "neutral",
}
_COUNTED: dict[Verdict, str] = {
    "reproduced": "reproduced",
    "reproduced only if": "reproduced in a regime only",
    "not reproduced": "not reproduced",
    "undecided": "undecided",
    "not run": "not run",
}


@dataclass(frozen=True, kw_only=True)
class ConditionText:
    """A condition with its numbers, worded."""

    says: str
    """What must hold."""
    source: str
    """Source of the bound."""
    published: str
    """What the paper reports."""
    measured: str
    """The median."""
    interval: str
    """From the lower end to the upper."""
    holds: str
    """One of "yes", "no", "open" and "shown"."""


@dataclass(frozen=True, kw_only=True)
class ClaimText:
    """A claim with its verdict, worded."""

    tone: Tone
    verdict: str
    """With the regime, if the claim holds in one only."""
    says: str
    """The claim."""
    source: str
    """Where it was published."""
    conditions: tuple[ConditionText, ...]


@dataclass(frozen=True, kw_only=True)
class StudyPage:
    """All words of a study's page."""

    name: str
    title: str
    question: str
    headline: str
    """The verdicts, counted."""
    claims: tuple[ClaimText, ...]
    trouble: tuple[Fact, ...]
    """Arms that were not run, and why."""
    regime: str
    """Where it was measured."""
    facts: tuple[Fact, ...]
    """Data, settings and machine."""
    probed: tuple[Fact, ...]
    """What `inspect` found in the trained models."""
    command: str
    """The command that runs it again."""
    footer: str
    """How long it took."""


def describe_study(result: StudyResult) -> StudyPage:
    """The words of a study's page, made safe to print."""
    study = result.study
    page = StudyPage(
        name=study.name,
        title=study.title,
        question=study.question,
        headline=headline(_verdicts([result])),
        claims=tuple(_claim(decided) for decided in result.decided),
        trouble=tuple(Fact(label=arm, value=why) for arm, why in result.trouble.items()),
        regime=study.regime,
        facts=(Fact(label="data", value=study.data), *_settings(result), *_where(result)),
        probed=_probed(result),
        command=_command(result),
        footer=f"Computed in {_duration(result.seconds)} of one thread.",
    )
    return printable(page)


def summary(results: Sequence[StudyResult]) -> RenderableType:
    """Published and measured values, one row per condition, and the verdict of each claim, for 100 columns."""
    parts: list[RenderableType] = []
    for page in map(describe_study, results):
        parts += [Text.assemble((page.title, "bold"), f"  {page.question}"), ""]
        for claim in page.claims:
            said = Text(f"{claim.says} ({claim.source})")
            parts += [marked(claim.tone, claim.verdict), Padding(Group(said, _conditions(claim)), (0, 0, 1, 2))]
        for fact in page.trouble:
            parts.append(marked("neutral", f"not run: {fact.label}: {fact.value}"))
        if page.trouble:
            parts.append("")
    return Group(*parts, Text(headline(_verdicts(results)), "bold"))


def write(result: StudyResult, folder: Path) -> Path:
    """Write index.html and its figures as SVG files into a folder.

    Returns:
        The page's path.

    Raises:
        InputError: If the folder cannot be written to.
    """
    drawings = printable(tuple(study_drawing(chart) for chart in result.charts))
    for drawing in drawings:
        write_bytes(folder / f"{drawing.name}.svg", drawing.file("svg"))
    text = _render("study.html", start="claims", page=describe_study(result), figures=drawings)
    return write_text(folder / "index.html", text)


def write_index(results: Sequence[StudyResult], folder: Path) -> Path:
    """Write the page over several studies, which links to the page of each, and return its path."""
    seconds = sum(result.seconds for result in results)
    text = _render(
        "studies.html",
        start="studies",
        pages=[describe_study(result) for result in results],
        headline=headline(_verdicts(results)),
        footer=f"Computed in {_duration(seconds)} of one thread.",
    )
    return write_text(folder / "index.html", text)


def _render(template: str, **words: Any) -> str:
    return html_page(_HERE / template, kind="study", **words)


def headline(verdicts: Iterable[Verdict]) -> str:
    """The verdicts of some claims, counted.

    Example:
        >>> headline(["reproduced", "undecided", "reproduced"])
        '3 claims: 2 reproduced, 1 undecided'
    """
    counts = Counter(verdicts)
    parts = [f"{counts[verdict]} {words}" for verdict, words in _COUNTED.items() if counts[verdict]]
    return f"{counted(counts.total(), 'claim')}: {', '.join(parts)}"


def _verdicts(results: Sequence[StudyResult]) -> list[Verdict]:
    return [decided.verdict for result in results for decided in result.decided]


def _claim(decided: Decided) -> ClaimText:
    return ClaimText(
        tone=_TONES[decided.verdict],
        verdict=f"{decided.verdict} {decided.only_if}".strip(),
        says=decided.claim.says,
        source=decided.claim.source,
        conditions=tuple(map(_condition, decided.conditions)),
    )


def _condition(judged: Judged) -> ConditionText:
    condition = judged.condition
    holds = {True: "yes", False: "no", None: "open"}[judged.holds] if condition.judged else "shown"
    known = not math.isnan(judged.median)
    return ConditionText(
        says=condition.says,
        source=condition.source,
        published=condition.published or "no number",
        measured=significant(judged.median) if known else "none",
        interval=spread((judged.low, judged.high)) if known else "",
        holds=holds,
    )


def _conditions(claim: ClaimText) -> RenderableType:
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    grid.add_column("must hold", overflow="fold", ratio=3)
    grid.add_column("published", overflow="fold", ratio=2)
    grid.add_column("measured", justify="right", no_wrap=True)
    grid.add_column("interval", justify="right", no_wrap=True)
    grid.add_column("holds", no_wrap=True)
    for row in claim.conditions:
        grid.add_row(row.says, row.published, row.measured, row.interval, row.holds)
    return grid


def _probed(result: StudyResult) -> tuple[Fact, ...]:
    """Each finding of `inspect` with its number of seeds -> the arms that have it."""
    found: dict[str, Counter[str]] = {}
    for paired in result.measured.values():
        for arm, measurement in paired.items():
            if "findings" in measurement:
                rules = found.setdefault(arm, Counter())
                rules.update(f"{finding['rule']} ({finding['severity']})" for finding in measurement["findings"])
    arms: dict[str, list[str]] = {}
    for arm, rules in found.items():
        words = ", ".join(f"{rule} with {counted(count, 'seed')}" for rule, count in sorted(rules.items()))
        arms.setdefault(words or "no finding", []).append(arm)
    return tuple(
        Fact(label=words, value="all arms" if len(of) == len(found) else "; ".join(of)) for words, of in arms.items()
    )


def _settings(result: StudyResult) -> tuple[Fact, ...]:
    seeds = Fact(label="seeds", value=", ".join(map(str, result.measured)) or "none")
    chosen = [(name, value) for name, value in result.settings.items() if name != "seeds"]
    return seeds, *(Fact(label=name.replace("_", " "), value=_setting(value)) for name, value in chosen)


def _where(result: StudyResult) -> tuple[Fact, ...]:
    return tuple(Fact(label=name, value=words) for name, words in result.where.items())


def _command(result: StudyResult) -> str:
    changed = [
        f"--set {name}={_setting(value).replace(' ', '')}"
        for name, value in result.settings.items()
        if name != "seeds" and value != result.study.quick.get(name)
    ]
    return " ".join([f"normkit study {result.study.name} --seeds {len(result.measured)}", *changed])


def _setting(value: Setting) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
