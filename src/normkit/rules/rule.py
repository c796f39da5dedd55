"""Rules, the facts that they look at, and their answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from normkit.identification.passport import Passport
from normkit.identification.sites import OtherNorm
from normkit.measurement.baseline import Baseline
from normkit.measurement.facts import Attention, Block, ModelFacts, Site
from normkit.measurement.handwritten import HandwrittenNorm
from normkit.measurement.intent import Intent
from normkit.measurement.patches import InputHook, Patch
from normkit.measurement.quantities import RowStatistics
from normkit.measurement.row_leakage import Leak
from normkit.measurement.sharing import Sharing
from normkit.measurement.training import Training
from normkit.rules.finding import Severity
from normkit.rules.likes import Majority, majorities
from normkit.spec import NormSpec
from normkit.text import counted

# A reader checks a few sites; the rest are in the site table.
_MOST_LINES = 6
# A window of a text has dozens; a repeated token, a few and the special tokens around it.
_FEW_TOKENS = 8
# Fresh weights of 14 families have 0.94 to 1.07, four trained models 25 to 38, the two of normkit's demo 1.7 and 2.8.
_TRAINED = 1.5
# The same rows, counted twice in float64.
_SAME_ROWS = 1e-9

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""


CAUSES = ("F16", "F17", "F18", "F19", "F20", "F21", "F22", "F23", "F24", "F26")
"""Rules on the data of a run and on interventions in it: later deviations of the run follow from these."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All measurements of one model: the input of every rule."""

    model: ModelFacts
    """The inspected model."""
    sites: tuple[Site, ...]
    """The norms, in forward order."""
    blocks: tuple[Block, ...]
    """The repeated blocks, in forward order."""
    attentions: tuple[Attention, ...]
    """The attention calls, in forward order."""
    final_norm: str | None
    """Path of the norm between the last block and what reads it, or None."""
    intent: Intent | None
    """The formulas that the model's configuration asks for, or None if they are unknown."""
    passports: Mapping[str, Passport] = field(default_factory=dict)
    """The identification of each norm, by path."""
    others: tuple[OtherNorm, ...] = ()
    """Norms that no spec describes: batch norms, gated norms and others."""
    baseline: Baseline | None = None
    """The declaration by an earlier run of this model or by the user; None without one."""
    training: Training | None = None
    """Observations of a training run, or None."""
    leaks: tuple[Leak, ...] | None = None
    """Rows that moved when others, which they should not know of, were changed; None where it was not tried."""
    shared: Mapping[str, Sharing] = field(default_factory=dict)
    """Norms that serve several places, by path."""
    ungathered: tuple[str, ...] = ()
    """Batch norms that were trained or loaded without running statistics, by path."""
    called: frozenset[str] = frozenset()
    """Paths of the modules that a forward pass called; empty where that was not seen."""
    patches: tuple[Patch, ...] | None = None
    """Code that stands where a library's own norm is expected; None where that was not looked at."""
    handwritten: tuple[HandwrittenNorm, ...] = ()
    """Places where rows are normalized by no norm that was found."""
    row_scatter: float = math.nan
    """Variation of the row lengths of the model's matrices over the variation in fresh weights, as
    `weights.row_scatter` measures it; NaN if it was not measured."""
    broken: tuple[tuple[str, int], ...] = ()
    """Parameters and buffers that hold NaN or infinity, with how many of each; of a run that is not watched."""
    unread: tuple[str, ...] = ()
    """Norms whose output nothing reads."""
    constant: tuple[str, ...] = ()
    """Branches in blocks that add the same vector to every row."""
    input_hooks: tuple[InputHook, ...] = ()
    """Norms whose input is changed by a hook before it comes in."""

    def intended(self, site: Site) -> NormSpec | None:
        """The formula that is meant at this site; None if it is unknown.

        The declared one, else the one of the config's class, else the one of nearly all similar norms.
        """
        return self.intended_at(site.path)

    def intended_at(self, path: str) -> NormSpec | None:
        """The same at a path; no norm with a spec needs to run there."""
        if self.baseline is not None and (declared := self.baseline.norms.get(path)) is not None:
            return declared.spec
        if self.intent is not None and path in self.intent.specs:
            return self.intent.specs[path]
        return self._majorities[path].spec if path in self._majorities else None

    def source_at(self, path: str) -> str:
        """The source of the meant formula: the file that declares it, the config, or the similar norms."""
        if self.baseline is not None and path in self.baseline.norms:
            return self.baseline.source or "the intent file"
        if (self.intent is None or path not in self.intent.specs) and path in self._majorities:
            return self._majorities[path].words
        return "the config"

    @cached_property
    def _majorities(self) -> Mapping[str, Majority]:
        undecided = {path for path, passport in self.passports.items() if passport.undecidable}
        return majorities(self.sites, [other.path for other in self.others], undecided)

    @property
    def is_intent_known(self) -> bool:
        """There is a config whose class is known, or an intent file."""
        return self.intent is not None or self.baseline is not None

    def initial_gain(self, path: str) -> float:
        """Initial value of a norm's gain, offset included: 1 unless the config's class says otherwise."""
        return 1.0 if self.intent is None else self.intent.initial_gains.get(path, 1.0)

    def has(self, subject: Subject) -> bool:
        """There is one to look at."""
        match subject:
            case "norms":
                return bool(self.sites)
            case "other norms":
                return bool(self.others)
            case "blocks":
                return bool(self.blocks)
            case "attentions":
                return bool(self.attentions)
            case "run":
                return self.training is not None

    def is_gain_open(self, site: Site) -> bool:
        """The gain is known only as it acts: its dependence on the parameters was not found."""
        passport = self.passports.get(site.path)
        return passport is not None and "gain" in passport.undecidable

    @property
    def has_few_tokens(self) -> bool:
        """The text has too few distinct tokens to stand for any other."""
        return self.model.distinct is not None and self.model.distinct < _FEW_TOKENS

    @property
    def running(self) -> frozenset[str]:
        """Paths where a norm runs: those of all sites, of what is tied to them, and of norms that no spec describes."""
        tied = (path for one in self.shared.values() for path in one.twins)
        return frozenset((*(site.path for site in self.sites), *tied, *(other.path for other in self.others)))

    def is_stock(self, *paths: str) -> bool:
        """At all these paths the module is of the config's class and runs that class's own forward."""
        return self.intent is not None and all(path in self.intent.stock for path in paths)

    def is_tied_in_stock(self, path: str, other: str) -> bool:
        """The config's class itself has one parameter for the norms at both paths."""
        return self.intent is not None and any({path, other} <= group for group in self.intent.tied)

    def is_wired_as_stock(self, *paths: str) -> bool:
        """The norms at these paths are stock, and so is what calls each of them."""
        callers = (path.partition(":")[0] if ":" in path else path.rpartition(".")[0] for path in paths)
        return self.is_stock(*callers, *(path for path in paths if ":" not in path))

    @property
    def has_trained_matrices(self) -> bool:
        """The model's matrices are not as a distribution gave them."""
        return self.row_scatter > _TRAINED

    @property
    def is_untrained(self) -> bool:
        """Every gain and bias is exactly as initialised, and there are some."""
        parameters = [part for site in self.sites for part in (site.gain, site.bias) if part is not None]
        return bool(parameters) and all(part.at_initialisation for part in parameters)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A rule's answer when something is wrong; all sites of one cause are one hit."""

    severity: Severity
    sites: tuple[str, ...]
    """Paths it applies to, in forward order."""
    measured: str
    """The measured value, in words with its unit."""
    evidence: tuple[str, ...]
    """A line for each of the most telling sites."""


@dataclass(frozen=True)
class NotChecked:
    """The answer of a rule that cannot decide."""

    reason: str
    """The reason, in a few words."""
    needs_run: bool = False
    """The fault shows only in a training run or a training step."""


Outcome = Hit | NotChecked | None
"""None: checked, and clean."""


Subject = Literal["norms", "other norms", "blocks", "attentions", "run"]
"""The subjects of rules: norms that a spec describes, other norms, repeated blocks, attention calls, a run."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A fault of norms, and the check that finds it."""

    id: str
    """As in "A1": the letter is the group."""
    title: str
    """The fault, in one line."""
    severity: Severity
    """The worst severity that it reports."""
    threshold: str
    """The limits that the measured value is compared with."""
    source: str
    """Source of the threshold and of the fault."""
    why: str
    """Consequence of the fault."""
    remedy: tuple[str, ...]
    """Remedies, the most likely first."""
    confirm: str
    """The test that confirms the remedy."""
    check: Callable[[Facts], Outcome]
    """The check of the facts."""
    follows: tuple[str, ...] = ()
    """Rules that name the cause where both find something: this one is then listed behind them, unless it is worse than
    they are."""
    looks_at: tuple[Subject, ...] = ("norms",)
    """The subjects that it judges: without any of them the rule is not applicable, and not clean."""
    is_of_text: bool = False
    """The measured value depends on the text too: with too few distinct tokens the finding is a note at most."""

    @property
    def page(self) -> str:
        """Address of its page in the documentation."""
        return f"https://normkit.github.io/normkit/reference/rules/{self.id}.html"


WRONG_NORMS = ("A5", "A11", "A12", "B1", "B2", "B6", "B10", "B11", "B12", "B13", "D6", "E5")
"""Faults of single norms that change the model's output: large logits, streams and numbers follow from them."""

NO_INTENT = NotChecked("neither a config with a stock transformers class nor an intent file tells what is meant")
"""The answer of a rule that needs either."""

NO_TRAINING = NotChecked("it shows in training only: nk.watch, or normkit inspect --train-step", needs_run=True)
"""The answer of a rule that one training step can tell."""

NO_RUN = NotChecked("it takes a training run under nk.watch", needs_run=True)
"""The answer of a rule that one training step cannot tell."""

NO_OPTIMIZER = NotChecked("nothing is known of an optimizer: give it to nk.watch")
"""The answer of a rule that needs the optimizer and its groups."""

NO_TOKENS = NotChecked("tried on token ids only, and on a batch of them that the model takes")
"""The answer of a rule that needs the leaks."""

NO_BASELINE = NotChecked("nothing declares what was meant: give an intent file with --intent or intent=")
"""The answer of a rule that needs a declared intent or an earlier run."""


def same_rows(left: RowStatistics, entering: RowStatistics) -> bool:
    """The output of one place is the input of the next."""
    numbers = [(left.rms_min, entering.rms_min), (left.rms_max, entering.rms_max), (left.absmax, entering.absmax)]
    alike = all(abs(a - b) <= _SAME_ROWS * abs(b) for a, b in numbers)
    return alike and left.rows == entering.rows and left.features == entering.features


def worst(severities: Sequence[Severity]) -> Severity:
    """The worst of some severities."""
    return min(severities, key=SEVERITIES.index)


def evidence_lines(lines: Sequence[str], noun: str = "norm") -> tuple[str, ...]:
    """The first lines, and the number of the others."""
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    return (*lines[:_MOST_LINES], f"and {counted(len(lines) - _MOST_LINES, f'more {noun}')}")


@dataclass(frozen=True)
class Case:
    """A place that deviates, as a line of a finding."""

    path: str
    severity: Severity
    effect: float
    """Size of the deviation, the sort key among the cases of one rule."""
    line: str
    """The deviation in words."""


def hit(cases: Sequence[Case], measured: str, noun: str = "norm") -> Hit | None:
    """The cases as one hit: sites in forward order, lines by effect; None without a case."""
    if not cases:
        return None
    telling = sorted(cases, key=lambda case: -case.effect)
    return Hit(
        severity=worst([case.severity for case in cases]),
        sites=tuple(dict.fromkeys(case.path for case in cases)),
        measured=measured,
        evidence=evidence_lines([case.line for case in telling], noun),
    )
