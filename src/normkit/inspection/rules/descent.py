"""Group F, the run: gradients over depth, spikes, updates, the optimizer's eps, weights before a norm."""

from __future__ import annotations

from normkit.inspection.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""The rules of this group, in order."""
