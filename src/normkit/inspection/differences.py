"""What a comparison of a model with its reference found, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from normkit.identification.book import Entry
from normkit.inspection.divergence import Divergence
from normkit.inspection.effects import Observed
from normkit.inspection.pairing import Change, MatchedBy
from normkit.inspection.result import plain

Owner = Literal["model", "reference"]

_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class ParameterChange:
    """A gain or bias that is not the reference's.

    Attributes:
        role: "weight" or "bias".
        difference: Largest difference of what acts (the offset included) over the largest magnitude in the
            reference; None where the reference is a file, which holds only digests.
        swapped_with: Path of the model's norm that has this one's of the reference, and the other way round; or None.
    """

    role: str
    difference: float | None
    swapped_with: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A norm beside the one of the reference that it stands for.

    Attributes:
        entry: The norm.
        reference: The other.
        matched_by: "path", or "order".
        changes: Conventions in which they differ.
        undecided: Convention -> why it could not be compared.
        parameters: Parameters in which they differ.
        observed: The rows that arrive at the norm and what the two formulas make of them; None where nothing
            differs or nothing could be run.
        with_parameters: `observed` is with gain and bias; False where the reference's are not at hand.
    """

    entry: Entry
    reference: Entry
    matched_by: MatchedBy
    changes: tuple[Change, ...]
    undecided: Mapping[str, str]
    parameters: tuple[ParameterChange, ...]
    observed: Observed | None = None
    with_parameters: bool = True

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
    """A norm without counterpart.

    Attributes:
        path: Its path.
        owner: Whose it is: the "model"'s or the "reference"'s.
        class_name: Class of the module.
        reason: Why, where it is not merely that there is none.
    """

    path: str
    owner: Owner
    class_name: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What `compare` found.

    Attributes:
        model: Name of the model.
        reference: Name of its reference.
        source: What was run, in words.
        pairs: The norms that were paired, in the model's forward order.
        unmatched: Those that were not.
        left_out: Path -> what the model and the reference do there, where no spec describes either; not compared.
        divergence: Where the two runs begin to differ.
    """

    model: str
    reference: str
    source: str
    pairs: tuple[Pair, ...]
    unmatched: tuple[Unmatched, ...]
    left_out: Mapping[str, tuple[str, str]]
    divergence: Divergence

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
