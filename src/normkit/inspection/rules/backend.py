"""Group E, the backend: cast order, results off their own formula, dtypes that change silently."""

from __future__ import annotations

from normkit.inspection.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""The rules of this group, in order."""
