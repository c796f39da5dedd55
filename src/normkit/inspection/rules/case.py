"""One place that deviates, and many of them as one hit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normkit.inspection.result import Severity
from normkit.inspection.rules.rule import Hit, evidence_lines, worst


@dataclass(frozen=True)
class Case:
    """One place that deviates."""

    path: str
    severity: Severity
    """How bad."""
    effect: float
    """By how much, to sort by; of one rule's cases alike."""
    line: str
    """In words."""


def hit(cases: Sequence[Case], measured: str, noun: str = "norm") -> Hit | None:
    """Cases in forward order as one hit, lines by effect; None without a case."""
    if not cases:
        return None
    telling = sorted(cases, key=lambda case: -case.effect)
    return Hit(
        severity=worst([case.severity for case in cases]),
        sites=tuple(dict.fromkeys(case.path for case in cases)),
        measured=measured,
        evidence=evidence_lines([case.line for case in telling], noun),
    )
