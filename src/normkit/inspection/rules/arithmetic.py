"""Group A, the arithmetic: homogeneity, eps under a rescale, cancellation, rows that are constant or zero."""

from __future__ import annotations

from normkit.inspection.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""The rules of this group, in order."""
