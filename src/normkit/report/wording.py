"""The words for placements and severities."""

from __future__ import annotations

from normkit.measurement.facts import Placement
from normkit.rules.finding import Severity

PLACEMENTS: dict[Placement, str] = {
    "pre": "pre-norm",
    "post": "post-norm",
    "peri": "peri-norm",
    "output-only": "norm on the branch's output",
    "none": "no norm",
    "residual-after-norm": "residual taken after the norm",
    "unknown": "unknown",
}
"""Placement of the norms of a block -> its name in reports."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""
