"""Group C: rows that should not know of each other. Axes, heads, time, batch, padding, ranks."""

from __future__ import annotations

from normkit.inspection.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""The rules of this group, in order."""
