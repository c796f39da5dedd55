"""The measurements of one model: the input of every rule, and the formula that is meant at each of its norms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from normkit.checkpoint.misfits import Misfit
from normkit.identification.passport import Passport, Reading
from normkit.identification.sites import OtherNorm
from normkit.measurement.baseline import Baseline, DeclaredNorm
from normkit.measurement.facts import Attention, BatchNorm, Block, ModelFacts, Site, Spectrum, place_of
from normkit.measurement.intent import Intent
from normkit.measurement.modes import ModeChange
from normkit.measurement.modulation import Modulation
from normkit.measurement.patches import Patch, Sharing
from normkit.measurement.row_leakage import Leak
from normkit.measurement.structure import Usage
from normkit.measurement.training import Training
from normkit.spec import NormSpec

Subject = Literal["norms", "other norms", "batch norms", "adaptive norms", "blocks", "attentions", "loss", "run"]
"""The subjects of rules: norms that a spec describes, other norms and two kinds of these, blocks, attention calls, the
loss of a text, a run."""

# A window of a text has dozens; a repeated token, a few and the special tokens around it.
_FEW_TOKENS = 8
# Fresh weights of 14 families have 0.94 to 1.07, four trained models 25 to 38, the two of normkit's demo 1.7 and 2.8.
_TRAINED = 1.5
# With fewer than three equal norms the agreement may be chance; where more than a quarter differ, a model has several
# kinds of norm.
_FEWEST, _MOST = 3, 0.75


@dataclass(frozen=True, kw_only=True)
class Facts(Usage):
    """All measurements of one model."""

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
    """Rows that moved when rows were changed that must not affect them; None where this was not tried."""
    shared: Mapping[str, Sharing] = field(default_factory=dict)
    """Norms that serve several places, by path."""
    batch_norms: tuple[BatchNorm, ...] = ()
    """Norms with running statistics, in forward order."""
    modes: ModeChange | None = None
    """The output with batch norms in training mode against evaluation mode; None where that was not tried."""
    modulations: tuple[Modulation, ...] | None = None
    """The modulation of the output of norms for each sample; None if it was not tried, or samples have no conditions
    of their own."""
    called: frozenset[str] = frozenset()
    """Paths of the modules that a forward pass called; empty where that was not seen."""
    patches: tuple[Patch, ...] | None = None
    """Code that replaces a library's own norm; None where that was not looked at."""
    row_scatter: float = math.nan
    """Variation of the row lengths of the model's matrices over the variation in fresh weights, as
    `weights.row_scatter` measures it; NaN if it was not measured."""
    broken: tuple[tuple[str, int], ...] = ()
    """Parameters and buffers that hold NaN or infinity, with the number of such entries; of a run that is not watched.
    """
    misfits: tuple[Misfit, ...] | None = None
    """Parts that the model's file has in another number; None where normkit did not load the model."""

    def has(self, subject: Subject) -> bool:
        """There is one to look at."""
        match subject:
            case "norms":
                return bool(self.sites)
            case "other norms":
                return bool(self.others)
            case "batch norms":
                return bool(self.batch_norms)
            case "adaptive norms":
                return bool(self.modulations)
            case "blocks":
                return bool(self.blocks)
            case "attentions":
                return bool(self.attentions)
            case "loss":
                return not math.isnan(self.model.uniform_loss)
            case "run":
                return self.training is not None

    def intended(self, site: Site) -> NormSpec | None:
        """The formula that is meant at this site; None if it is unknown.

        The declared one, else the one of the config's class, else the one of nearly all similar norms.
        """
        return self.intended_at(site.path)

    def intended_at(self, path: str) -> NormSpec | None:
        """The same at a path; no norm with a spec needs to run there."""
        if (declared := self.declared(path)) is not None:
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

    def declared(self, path: str) -> DeclaredNorm | None:
        """The declaration of the norm at a path in the intent file or the earlier run, or None."""
        return None if self.baseline is None else self.baseline.norms.get(path)

    def reading(self, path: str, name: str) -> Reading | None:
        """One reading of the identification of the norm at a path, or None."""
        passport = self.passports.get(path)
        return None if passport is None else passport.readings.get(name)

    @property
    def is_intent_known(self) -> bool:
        """There is a config whose class is known, or an intent file."""
        return self.intent is not None or self.baseline is not None

    def initial_gain(self, path: str) -> float:
        """Initial value of a norm's gain, offset included: 1 unless the config's class says otherwise."""
        return 1.0 if self.intent is None else self.intent.initial_gains.get(path, 1.0)

    def is_gain_initial(self, site: Site | BatchNorm) -> bool:
        """The site has a gain, and every entry of it is its initial value."""
        gain = site.gain
        return gain is not None and is_constant(gain) and gain.quantiles[0] == self.initial_gain(site.path)

    def is_gain_open(self, site: Site) -> bool:
        """The gain is known only as it acts: its dependence on the parameters was not found."""
        passport = self.passports.get(site.path)
        return passport is not None and "gain" in passport.undecidable

    @property
    def has_few_tokens(self) -> bool:
        """The text has too few distinct tokens to stand for any other."""
        return self.model.distinct is not None and self.model.distinct < _FEW_TOKENS

    @cached_property
    def running(self) -> frozenset[str]:
        """Paths where a norm runs: of all sites, of the norms tied to them, and of norms that no spec describes."""
        tied = (path for one in self.shared.values() for path in one.twins)
        return frozenset((*(site.path for site in self.sites), *tied, *(other.path for other in self.others)))

    def is_stock(self, *paths: str) -> bool:
        """At all these paths the module is of the config's class and runs that class's own forward."""
        return self.intent is not None and all(path in self.intent.stock for path in paths)

    def is_tied_in_stock(self, path: str, other: str) -> bool:
        """The config's class itself has one parameter for the norms at both paths."""
        return self.intent is not None and any({path, other} <= group for group in self.intent.tied)

    def is_wired_as_stock(self, *paths: str) -> bool:
        """The norms at these paths are stock, and so is the caller of each of them."""
        callers = (path.partition(":")[0] if ":" in path else path.rpartition(".")[0] for path in paths)
        return self.is_stock(*callers, *(path for path in paths if ":" not in path))

    @property
    def has_trained_matrices(self) -> bool:
        """The model's matrices are not as a distribution gave them."""
        return self.row_scatter > _TRAINED

    @property
    def is_untrained(self) -> bool:
        """Every gain and bias is exactly as initialised, and there are some."""
        return bool(self._parts) and all(part.at_initialisation for part in self._parts)

    @property
    def is_trained(self) -> bool:
        """Some gain or bias differs from its initialisation; False for a model without any."""
        return not all(part.at_initialisation for part in self._parts)

    @property
    def _parts(self) -> list[Spectrum]:
        return [part for site in self.sites for part in (site.gain, site.bias) if part is not None]


def stacks(paths: Iterable[str]) -> list[list[str]]:
    """Paths of blocks, those of each list by themselves: encoder and decoder are a depth each."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(path.rpartition(".")[0], []).append(path)
    return [*found.values()]


def is_constant(part: Spectrum) -> bool:
    """All entries of a gain or bias are equal."""
    return part.quantiles[0] == part.quantiles[-1]


@dataclass(frozen=True, kw_only=True)
class Majority:
    """The formula of most similar norms, which this norm does not have."""

    spec: NormSpec
    agreeing: int
    """Number of similar norms with this formula."""
    others: int

    @property
    def words(self) -> str:
        """The source of the formula, in words."""
        number = f"{self.agreeing}" if self.agreeing == self.others else f"{self.agreeing} of {self.others}"
        return f"the majority of the norms like it ({number})"


def _tail(path: str) -> str:
    """The end of the path's place: the list, its member and the norm."""
    return ".".join(place_of(path).rsplit(".", 3)[-3:])


def majorities(sites: Collection[Site], unrecognised: Iterable[str], open_at: Collection[str]) -> dict[str, Majority]:
    """The norms that differ from nearly all similar norms, by path, with the formula of those.

    Similar norms have the same name in the other blocks. Where these are fewer than three, similar norms have the role,
    the width and the class of the norm itself or of one of these.

    Args:
        sites: Norms whose specs are known.
        unrecognised: Paths of norms that no spec describes.
        open_at: Paths of sites whose spec is partly undecided: other norms are not compared with them.
    """

    def kind(site: Site) -> tuple[str, int, str]:
        return site.role, site.input.features, site.class_name

    by_path: Mapping[str, Site] = {site.path: site for site in sites}
    found = {}
    for path in (*by_path, *unrecognised):
        own = by_path.get(path)
        named = [site for site in sites if site.path != path and place_of(site.path) == place_of(path)]
        like = named
        if len(named) < _FEWEST:
            kinds = {kind(site) for site in (*named, *([] if own is None else [own]))}
            like = [site for site in sites if site.path != path and kind(site) in kinds]
        counts = Counter(site.spec for site in like if site.path not in open_at)
        spec, agreeing = next(iter(counts.most_common(1)), (None, 0))
        if spec is None or agreeing < max(_FEWEST, _MOST * len(like)):
            continue
        # Two norms of one place that agree do so by design, and so do those of one name in lists of one name.
        agreed = {site.spec for site in sites if site.path != path and _tail(site.path) == _tail(path)}
        if own is None or (own.spec != spec and own.spec not in agreed):
            found[path] = Majority(spec=spec, agreeing=agreeing, others=len(like))
    return found
