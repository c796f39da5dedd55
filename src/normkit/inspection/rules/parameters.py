"""Group B, the parameters in training: their start, their decay, whether they move, how their gradient is summed."""

from __future__ import annotations

from normkit.inspection.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""The rules of this group, in order."""
