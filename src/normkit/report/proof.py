"""The proof of a fold for a terminal: what was checked, the logits, and a summary of the certificate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from normkit.checkpoint.certificate import Certificate
from normkit.checkpoint.logits import Agreement
from normkit.checkpoint.plan import RELATIONS
from normkit.checkpoint.verification import Checked, Verification
from normkit.show.parts import Fact, Tone, Verdict, printable
from normkit.show.terminal import lines, marked
from normkit.text import counted, significant

_TONES: dict[bool | None, Tone] = {True: "good", False: "error", None: "neutral"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One check."""

    tone: Tone
    name: str
    what: str
    """What was found."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Everything that is said about a verification."""

    title: str
    """The two classes."""
    verdict: Verdict
    checks: tuple[Line, ...]
    """In the order in which they were made."""


def describe_proof(found: Verification, agreement: Agreement | None = None, tokens: str = "") -> Proof:
    """A verification in words, safe to print.

    Args:
        found: What was checked.
        agreement: Of the logits, or None.
        tokens: What they were compared on, in words.
    """
    checks = [*found.checks, *([_agreed(agreement, tokens)] if agreement else [])]
    failed = [check for check in checks if check.passed is False]
    if failed:
        verdict = Verdict(
            tone="error", headline="not proved", detail=f"{len(failed)} of {counted(len(checks), 'check')} failed"
        )
    else:
        detail = "every tensor follows from the source, bit for bit"
        verdict = Verdict(tone="good", headline="proved", detail=detail)
    title = found.source if found.source == found.result else f"{found.source} -> {found.result}"
    shown = tuple(Line(tone=_TONES[check.passed], name=check.name, what=check.what) for check in checks)
    return printable(Proof(title=title, verdict=verdict, checks=shown))


def proof_list(found: Verification, agreement: Agreement | None = None, tokens: str = "") -> RenderableType:
    """A verification as text for a terminal."""
    described = describe_proof(found, agreement, tokens)
    verdict = described.verdict
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in described.checks:
        grid.add_row(marked(line.tone, line.name), Text(line.what))
    answer = Text.assemble(marked(verdict.tone, verdict.headline), "  ", verdict.detail)
    return Group(Text(described.title, "bold"), answer, "", grid)


def certificate_lines(certificate: Certificate) -> RenderableType:
    """A summary of a certificate: how each tensor follows, what rounding left, how it loads."""
    facts = [Fact(label=label, value=value) for label, value in _certified(certificate)]
    return lines(printable(tuple(facts)))


def _agreed(agreement: Agreement, tokens: str) -> Checked:
    said = (
        f"differ by {significant(agreement.difference)} at most, of {significant(agreement.largest)}, in float64, on "
        f"{counted(agreement.tokens, 'token')} ({tokens})"
    )
    if agreement.unit:
        said += f"; moving the source's weights by half a unit in the last place: {significant(agreement.rounding)}"
    return Checked(name="logits", passed=agreement.holds, what=said)


def _certified(certificate: Certificate) -> list[tuple[str, str]]:
    found = Counter(edit["relation"] for edit in certificate.tensors.values())
    facts: list[tuple[str, str]] = [
        (name, f"{counted(found[name], 'tensor')}: {words}") for name, words in RELATIONS.items() if found[name]
    ]
    residuals = [edit["residual"] for edit in certificate.tensors.values() if "residual" in edit]
    if residuals:
        facts.append(("largest residual", f"{significant(max(residuals))} of a sum, after rounding"))
    if divisor := certificate.smallest_divisor:
        where = f"{divisor['weight']}[{divisor['coordinate']}]"
        facts.append(("smallest divisor", f"{significant(divisor['size'])}, the gain at {where}"))
    loads = certificate.reload
    facts.append(("loads", f"as {loads['class_name']}" if loads["ran"] else f"not tried: {loads['reason']}"))
    size = sum(file.size for file in certificate.result.values())
    facts.append(("files", f"{counted(len(certificate.result), 'file')}, {size:,} bytes, each with its SHA-256"))
    return facts
