"""A study in words: its claims with their numbers, for a terminal and as a page; and the page over several studies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding

from normkit.files import write_bytes, write_text
from normkit.show.html import html_page
from normkit.show.parts import Column, Fact, Section, Table, Tone, printable
from normkit.show.parts import Verdict as Answer
from normkit.show.terminal import Words, answer, headed, marked
from normkit.study.arm_context import Setting
from normkit.study.figures import study_drawing
from normkit.study.result import Decided, StudyResult, Verdict
from normkit.text import count_spread, counted, significant, spread

_HERE = Path(__file__).parent
_TONES: dict[Verdict, Tone] = {
    "reproduced": "good",
    "reproduced only if": "note",
    "not reproduced": "warning",
    "undecided": "neutral",
    "not testable here": "neutral",
    "not run": "neutral",
}
# In the order in which they are counted.
_COUNTED: dict[Verdict, str] = {
    **{verdict: verdict for verdict in _TONES},
    "reproduced only if": "reproduced in a regime only",
}
_COLUMNS = (
    Column("says", "must hold"),
    Column("published", "published"),
    Column("measured", "measured", numeric=True),
    Column("interval", "95 % interval", numeric=True),
    Column("within", "seeds", numeric=True),
    Column("holds", "holds"),
    Column("source", "source of the bound"),
)


def describe_study(result: StudyResult) -> Section:
    """The words of a study, safe to print: claims, where they hold, the norms of the runs, how to run it again."""
    study = result.study
    facts = [Fact("data", study.data)]
    corrected = f"{counted(result.tests, 'test')}; all decisions together are wrong with a chance of at most 5 % (Holm)"
    facts += [Fact("tests", corrected), Fact("sha256 of the conditions", study.conditions_sha256)]
    facts.append(Fact("seeds", ", ".join(map(str, result.measured)) or "none"))
    chosen = {name: value for name, value in result.settings.items() if name != "seeds"}
    facts += [Fact(name.replace("_", " "), _setting(value)) for name, value in chosen.items()]
    facts += [Fact(name, words) for name, words in result.where.items()]
    changed = [
        f"--set {name}={_setting(value).replace(' ', '')}"
        for name, value in chosen.items()
        if value != study.quick.get(name)
    ]
    command = " ".join([f"normkit study {study.name} --seeds {len(result.measured)}", *changed])
    claims = Section(
        id="claims",
        title=": ".join(filter(None, (result.indicative, headline(_verdicts([result]))))),
        sections=tuple(map(_claim, result.decided)),
        facts=tuple(Fact(arm, why) for arm, why in result.trouble.items()),
    )
    parts = [claims, Section(id="regime", title="Where this holds", notes=(study.regime,), facts=tuple(facts))]
    if probed := _probed(result):
        parts.append(Section(id="probe", title="The norms of the runs", facts=probed))
    parts.append(Section(id="again", title="Run it again", notes=(command,)))
    return printable(
        Section(
            id=study.name,
            title=study.title,
            gist=study.question,
            sections=tuple(parts),
            remarks=(_computed(result.seconds),),
        )
    )


def summary(results: Sequence[StudyResult]) -> RenderableType:
    """Published and measured values, one row per condition, and the verdict of each claim, for 100 columns."""
    parts: list[RenderableType] = []
    for page in map(describe_study, results):
        parts += [Words.assemble((page.title, "bold"), f"  {page.gist}"), ""]
        claims = page.sections[0]
        for claim in claims.sections:
            grid = headed(2, "dim")
            grid.add_column("must hold", ratio=3)
            grid.add_column("published", ratio=2)
            grid.add_column("measured", justify="right", no_wrap=True)
            grid.add_column("95 % interval", justify="right", no_wrap=True)
            grid.add_column("seeds", justify="right", no_wrap=True)
            grid.add_column("holds", no_wrap=True)
            for row in claim.tables[0].rows:
                grid.add_row(*(Words(cell.text) for cell in row[:-1]))
            body = Group(Words(f"{claim.title} ({claim.source})"), grid)
            parts += [*([answer(claim.verdict)] if claim.verdict else []), Padding(body, (0, 0, 1, 2))]
        for fact in claims.facts:
            parts.append(marked("neutral", f"not run: {fact.label}: {fact.value}"))
        if claims.facts:
            parts.append("")
    few = [len(result.measured) for result in results if result.indicative]
    seeds = counted(few[0], "seed") if len(set(few)) == 1 else f"{count_spread(few)} seeds"
    warning = f"indicative, {seeds}: " if few else ""
    return Group(*parts, Words(f"{warning}{headline(_verdicts(results))}", "bold"))


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
    described = describe_study(result)
    text = html_page(_HERE / "study.html", kind="study", start="claims", study=described, figures=drawings)
    return write_text(folder / "index.html", text)


def write_index(results: Sequence[StudyResult], folder: Path) -> Path:
    """Write the page over several studies, which links to the page of each, and return its path."""
    text = html_page(
        _HERE / "studies.html",
        kind="study",
        start="studies",
        studies=[describe_study(result) for result in results],
        headline=headline(_verdicts(results)),
        footer=_computed(sum(result.seconds for result in results)),
    )
    return write_text(folder / "index.html", text)


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


def _claim(decided: Decided) -> Section:
    """A claim with its verdict, and the regime if it holds in one only."""
    rows = []
    for judged in (*([decided.control] if decided.control else []), *decided.conditions):
        condition = judged.condition
        says = f"control: {condition.says}" if judged is decided.control else condition.says
        holds = {True: "yes", False: "no", None: "open"}[judged.holds] if condition.judged else "shown"
        numbers = ["none", ""]
        if not math.isnan(judged.middle):
            numbers = [significant(judged.middle), spread((judged.low, judged.high))]
        within = f"{judged.within}/{len(judged.values)}" if condition.judged else ""
        rows.append([says, condition.published_and_bound, *numbers, within, holds, condition.source])
    headline = f"{decided.verdict} {decided.only_if}".strip()
    return Section(
        title=decided.claim.says,
        source=decided.claim.source,
        verdict=Answer(tone=_TONES[decided.verdict], headline=headline),
        tables=(Table.of("Conditions", _COLUMNS, rows),),
    )


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
    return tuple(Fact(words, "all arms" if len(of) == len(found) else "; ".join(of)) for words, of in arms.items())


def _setting(value: Setting) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _computed(seconds: float) -> str:
    duration = f"{seconds:.1f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
    return f"Computed in {duration} of one thread."
