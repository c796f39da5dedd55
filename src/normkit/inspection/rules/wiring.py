"""Group D, the wiring against what was declared: a norm at two places, twice in a row, in place, on the wrong side."""

from __future__ import annotations

from normkit.inspection.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""The rules of this group, in order."""
