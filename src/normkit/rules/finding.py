"""The answer of the rules on a model: findings, and the status of each rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
Status = Literal["clean", "finding", "not checked", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something is wrong, or may be: what, where, how much, why it matters and what to do."""

    rule: str
    """Identifier of the rule, as in "A1"."""
    title: str
    """One line."""
    severity: Severity
    """One of "error", "warning" and "note"."""
    sites: tuple[str, ...]
    """Paths it applies to, in forward order; all sites of one cause are one finding."""
    measured: str
    """The measured value, in words with its unit."""
    threshold: str
    """The limit that the rule compares with."""
    source: str
    """Source of the threshold."""
    evidence: tuple[str, ...]
    """One line for each site or the most telling ones."""
    why: str
    """Consequence of the fault."""
    remedy: tuple[str, ...]
    """Remedies, the most likely first."""
    confirm: str
    """The test that confirms the remedy."""
    page: str = ""
    """Address of the rule's page in the documentation."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one rule, clean rules included."""

    rule: str
    """Identifier of the rule."""
    title: str
    """The fault that the rule looks for."""
    status: Status
    """"clean", "finding", "not checked", or "not applicable" where there was nothing to look at."""
    reason: str = ""
    """Why it was not checked or not applicable; empty otherwise."""
    needs_run: bool = False
    """Not checked, as it shows only in a training run or a training step."""
