"""Results of comparing a model with its reference, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from normkit.comparison.divergence import Divergence
from normkit.comparison.effects import Observed
from normkit.comparison.pairing import Change, MatchedBy
from normkit.identification.book import Entry
from normkit.inspection.result import plain

Owner = Literal["model", "reference"]

_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class ParameterChange:
    """A gain or bias that is not the reference's."""

    role: str
    """"weight" or "bias"."""
    difference: float | None
    """Largest difference of what acts (the offset included) over the largest magnitude in the reference; None where the
    reference is a file, which holds only digests."""
    swapped_with: str | None = None
    """Path of the model's norm that has this one's of the reference, and the other way round; or None."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A norm beside the one of the reference that it stands for."""

    entry: Entry
    reference: Entry
    """The norm of the reference."""
    matched_by: MatchedBy
    """"path", or "order"."""
    changes: tuple[Change, ...]
    """Conventions in which they differ."""
    undecided: Mapping[str, str]
    """Convention -> why it could not be compared."""
    parameters: tuple[ParameterChange, ...]
    """Parameters in which they differ."""
    observed: Observed | None = None
    """The rows that arrive at the norm and what the two formulas make of them; None where nothing differs or nothing
    could be run."""
    with_parameters: bool = True
    """`observed` is with gain and bias; False where the reference's are not at hand."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        specs = (each.passport.spec for each in (self.entry, self.reference))
        formula, other = (None if spec is None else str(spec) for spec in specs)
        return {
            "path": self.entry.path,
            "reference_path": self.reference.path,
            "matched_by": self.matched_by,
            "class_name": self.entry.class_name,
            "reference_class_name": self.reference.class_name,
            "formula": formula,
            "reference_formula": other,
            "changes": [asdict(change) for change in self.changes],
            "undecided": dict(self.undecided),
            "parameters": [asdict(change) for change in self.parameters],
            "observed": None if self.observed is None else asdict(self.observed),
            "with_parameters": self.with_parameters,
        }


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """A norm without counterpart."""

    path: str
    """Its path."""
    owner: Owner
    """The owner: "model" or "reference"."""
    class_name: str
    """Class of the module."""
    reason: str = ""
    """Why, where it is not merely that there is none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Result of `compare`."""

    model: str
    """Name of the model."""
    reference: str
    """Name of its reference."""
    source: str
    """The input of the runs, in words."""
    pairs: tuple[Pair, ...]
    """The norms that were paired, in the model's forward order."""
    unmatched: tuple[Unmatched, ...]
    """The norms without a counterpart."""
    left_out: Mapping[str, tuple[str, str]]
    """Path -> what the model and the reference do there, where no spec describes either; not compared."""
    divergence: Divergence
    """The first difference of the two runs."""

    @property
    def differs(self) -> bool:
        """A convention differs, a norm has no counterpart, or the two runs differ by more than rounding."""
        return bool(self.unmatched or self.divergence.birth or any(pair.changes for pair in self.pairs))

    @property
    def changed(self) -> tuple[Pair, ...]:
        """The pairs in which a convention differs, the one with the largest effect first."""
        found = [pair for pair in self.pairs if pair.changes]
        return tuple(sorted(found, key=lambda pair: -(pair.observed.worst if pair.observed else -1.0)))

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary with a `schema_version`; NaN and infinity as strings."""
        values = plain(
            {
                "schema_version": _SCHEMA,
                "model": self.model,
                "reference": self.reference,
                "source": self.source,
                "differs": self.differs,
                "divergence": self.divergence,
                "pairs": [pair.to_json() for pair in self.pairs],
                "unmatched": self.unmatched,
                "left_out": dict(self.left_out),
            }
        )
        assert isinstance(values, dict)
        return values
