"""Group E, many processes: replicated norms that drift apart, gradients never reduced, an observer that is wrong."""

from __future__ import annotations

from normkit.inspection.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""The rules of this group, in order."""
