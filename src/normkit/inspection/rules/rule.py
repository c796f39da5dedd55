"""What a rule is, what it may look at, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from normkit.identification.passport import Passport
from normkit.identification.sites import OtherNorm
from normkit.inspection.baseline import Baseline
from normkit.inspection.intent import Intent
from normkit.inspection.leaks import Leak
from normkit.inspection.result import Attention, Block, ModelFacts, Severity, Site
from normkit.inspection.training import Training
from normkit.spec import NormSpec

# A reader checks a few sites; the rest are in the site table.
_MOST_LINES = 6

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that was measured on one model: the input of every rule.

    Attributes:
        model: What was inspected.
        sites: The norms, in forward order.
        blocks: The repeated blocks, in forward order.
        attentions: The attention calls, in forward order.
        final_norm: Path of the norm between the last block and what reads it, or None.
        intent: What the model's configuration asks for, or None if that is unknown.
        passports: What was found out about each norm, by path.
        others: Norms that no spec describes: batch norms, gated norms and others.
        baseline: What an earlier run of this model was seen to do, or what the user declared; None without one.
        training: What was seen of a training run, or None.
        leaks: Rows that moved when others, which they should not know of, were changed; None where it was not tried.
    """

    model: ModelFacts
    sites: tuple[Site, ...]
    blocks: tuple[Block, ...]
    attentions: tuple[Attention, ...]
    final_norm: str | None
    intent: Intent | None
    passports: Mapping[str, Passport] = field(default_factory=dict)
    others: tuple[OtherNorm, ...] = ()
    baseline: Baseline | None = None
    training: Training | None = None
    leaks: tuple[Leak, ...] | None = None

    def intended(self, site: Site) -> NormSpec | None:
        """What the config's class computes at this site, or None if that is unknown."""
        return self.intent.specs.get(site.path) if self.intent is not None else None

    @property
    def is_untrained(self) -> bool:
        """Every gain and bias is exactly as initialised, and there are some."""
        parameters = [part for site in self.sites for part in (site.gain, site.bias) if part is not None]
        return bool(parameters) and all(part.at_initialisation for part in parameters)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A rule's answer when something is wrong; all sites of one cause are one hit.

    Attributes:
        severity: How bad.
        sites: Paths it applies to, in forward order.
        measured: The measured value, in words with its unit.
        evidence: A line for each of the most telling sites.
    """

    severity: Severity
    sites: tuple[str, ...]
    measured: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class NotChecked:
    """A rule's answer when it cannot decide.

    Attributes:
        reason: Why, in a few words.
    """

    reason: str


Outcome = Hit | NotChecked | None
"""None: checked, and clean."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that goes wrong with norms, and how to see it.

    Attributes:
        id: As in "A1": the letter is the group.
        title: What is wrong, in one line.
        severity: The worst it reports.
        threshold: What the measured value is held against.
        source: Where the threshold and the fault come from.
        why: Why it matters.
        remedy: What to do, most likely cure first.
        confirm: How to confirm it.
        check: Looks at the facts.
    """

    id: str
    title: str
    severity: Severity
    threshold: str
    source: str
    why: str
    remedy: tuple[str, ...]
    confirm: str
    check: Callable[[Facts], Outcome]


NO_INTENT = NotChecked("there is no stock transformers class and config to tell what was intended")
"""The answer of a rule that needs the intent."""

NO_TRAINING = NotChecked("it shows in training only: nk.watch, or normkit inspect --train-step")
"""The answer of a rule that needs a training run."""

NO_BASELINE = NotChecked("nothing declares what was meant: give an intent file with --intent or intent=")
"""The answer of a rule that needs a declared intent or an earlier run."""


def worst(severities: Sequence[Severity]) -> Severity:
    """The worst of some severities."""
    return min(severities, key=SEVERITIES.index)


def shortened(lines: Sequence[str], noun: str = "norm") -> tuple[str, ...]:
    """The first lines, and how many more there are."""
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    return (*lines[:_MOST_LINES], f"and {counted(len(lines) - _MOST_LINES, f'more {noun}')}")


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 norm", "3 norms"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(share: float) -> str:
    """A share in per cent, with three digits; whole where that takes more."""
    return f"{100 * share:.3g} %" if share < 10 else f"{100 * share:.0f} %"
