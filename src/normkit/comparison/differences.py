"""Results of comparing a model with its reference, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from normkit.comparison.causes import Cause, causes_of, matrices
from normkit.comparison.effects import Observed
from normkit.comparison.metadata import Metadata
from normkit.comparison.pairing import Change, MatchedBy
from normkit.comparison.rows import Rows
from normkit.comparison.values import Values
from normkit.identification.book import Entry
from normkit.inspection.result import plain

Owner = Literal["port", "reference"]

Level = Literal["metadata", "values", "conventions", "rows", "wiring"]
"""The levels of a comparison, from the cheapest to the dearest."""

_SCHEMA = 2


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
    casts: tuple[Change, ...] = ()
    """Norms that round otherwise, in dtypes that do not show it; rows judge that."""
    dtypes: tuple[str, str] = ("", "")
    """The dtypes of their outputs, else of their parameters; "" where neither is known."""

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
            "casts": [asdict(change) for change in self.casts],
            "dtypes": [*self.dtypes],
        }


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """A norm without counterpart."""

    path: str
    """Its path."""
    owner: Owner
    """The owner: "port" or "reference"."""
    class_name: str
    """Class of the module."""
    reason: str = ""
    """Why, where it is not merely that there is none."""
    counterpart: str = ""
    """Path of what stands in its place in the other, where it is no norm that a spec describes; else ""."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Conventions:
    """The formulas of the norms of two sides."""

    pairs: tuple[Pair, ...] = ()
    """The norms that were paired, in the port's forward order."""
    unmatched: tuple[Unmatched, ...] = ()
    """The norms without a counterpart."""
    left_out: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Path -> what the port and the reference do there, where no spec describes either; not compared."""

    @property
    def changed(self) -> tuple[Pair, ...]:
        """The pairs in which a convention differs, the one with the largest effect first."""
        found = [pair for pair in self.pairs if pair.changes]
        return tuple(sorted(found, key=lambda pair: -(pair.observed.worst if pair.observed else -1.0)))

    @property
    def differs(self) -> bool:
        """A convention differs, or a norm has no counterpart."""
        return bool(self.unmatched or self.changed)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {
            "pairs": [pair.to_json() for pair in self.pairs],
            "unmatched": [asdict(each) for each in self.unmatched],
            "left_out": {path: list(reasons) for path, reasons in self.left_out.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Which norms stand for which, and what stands in another place than in the reference."""

    seen_in: tuple[Level, ...]
    """The levels that show something of it: "values" alone show swapped gains and norms that are missing or extra."""
    paired_by: Mapping[str, int]
    """How many norms were paired by their "path" or "name", else by a "table of names", "values", "size" or "order"."""
    missing: tuple[str, ...]
    """The reference's norms without a counterpart in the port."""
    extra: tuple[str, ...]
    """The port's norms without a counterpart in the reference."""
    causes: tuple[Cause, ...]
    """Gains that are swapped; norms that are missing, extra, not applied or applied twice; what takes another place of
    the stream, such as a head that takes what enters the final norm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Result of `compare`: one part for each level, or the reason why it was not looked at."""

    port: str
    """Name of the port."""
    reference: str
    """Name of its reference."""
    forms: tuple[str, str]
    """The kinds of the port and the reference, such as "folder" or "passports"."""
    source: str = ""
    """The input of the runs, in words; "" where nothing was run."""
    metadata: Metadata | None = None
    """The metadata beside the tensors of both: the eps of each norm."""
    values: Values | None = None
    """The relation of each stored gain and bias to the reference's."""
    conventions: Conventions = field(default_factory=Conventions)
    """The formulas of the norms of both."""
    rows: Rows = field(default_factory=Rows)
    """Two runs on the same input, row by row."""
    not_looked_at: Mapping[Level, str] = field(default_factory=dict)
    """Level -> why it was not looked at."""
    notes: tuple[str, ...] = ()
    """Remarks on what was opened."""
    folded_by: tuple[str, ...] = ()
    """The operations by which the port was folded from the reference, as its certificate says."""

    def __str__(self) -> str:
        """The causes, what was looked at and the evidence, as `normkit compare` prints them."""
        from normkit.comparison.report import describe_comparison
        from normkit.show.terminal import printed, section

        return printed(section(describe_comparison(self), most=5))

    def __repr__(self) -> str:
        return f"<Comparison of {self.port} with {self.reference}: {self.verdict}>"

    @property
    def differs(self) -> bool:
        """At one of the levels they differ by more than rounding, and by more than a runtime's way to store them.

        Norms that round in another place differ, too, though only their bits show it. What a fold changed by design
        does not count.
        """
        if self.is_fold:
            return False
        are_wrong = self.values is not None and self.values.is_right is False
        has_another_eps = self.metadata is not None and self.metadata.differs
        has_matrix = bool(self.wrong_matrices)
        shows = self.rows.birth is not None or bool(self.causes)
        return are_wrong or has_matrix or has_another_eps or self.conventions.differs or shows

    @property
    def verdict(self) -> Literal["the same", "different", "undecided"]:
        """Whether they are the same; "undecided" where what can be read allows both, or nothing can be compared.

        Undecided, too, are matrices that have other numbers than the reference's, where no rows show what that does.
        """
        if self.differs:
            return "different"
        if self.is_fold:
            return "the same"
        values = self.values
        judged = [] if values is None else [each.is_right for each in values.groups]
        judged += [] if values is None else [each.is_right for each in values.batch_norms]
        are_open = None in judged or bool(self.open_matrices)
        has_compared = judged or self.conventions.pairs
        return "undecided" if are_open or not has_compared else "the same"

    @property
    def wiring(self) -> Wiring | None:
        """Which norms stand for which, from all that was looked at; None if no norms were paired at all."""
        shows: dict[Level, bool] = {
            "values": self.values is not None and bool(self.values.tensors or self.values.missing),
            "conventions": "conventions" not in self.not_looked_at,
            "rows": "rows" not in self.not_looked_at,
        }
        if not any(shows.values()):
            return None
        values, norms = self.values, self.conventions
        pairs = {each.path: each.paired_by for each in (() if values is None else values.tensors)}
        paired_by = Counter[str]([each.matched_by for each in norms.pairs] if norms.pairs else pairs.values())
        held = [] if values is None else [(each.path, each.reference_path) for each in values.tensors]
        stored = ((), ()) if values is None else (values.extra, values.missing)
        alone: list[list[str]] = []
        for side, owner in enumerate(("port", "reference")):
            taken = {pair[side] for pair in held}
            paths = [path for name in stored[side] if (path := name.rpartition(".")[0]) not in taken]
            # A class may lack the words that begin a stored name.
            known = [each.path for each in norms.unmatched if each.owner == owner and not each.counterpart]
            known = [path for path in known if not any(f".{each}".endswith(f".{path}") for each in paths)]
            alone.append([*dict.fromkeys([*paths, *known])])
        return Wiring(
            seen_in=tuple(level for level, is_shown in shows.items() if is_shown),
            paired_by=dict(paired_by),
            missing=tuple(alone[1]),
            extra=tuple(alone[0]),
            causes=tuple(each for each in self.causes if each.level == "wiring"),
        )

    @property
    def wrong_matrices(self) -> Mapping[str, str]:
        """Name of a matrix -> what is wrong with it; none where rows agree, as those of models that were rotated do."""
        agree = "rows" not in self.not_looked_at and self.rows.compared and self.rows.birth is None
        if self.values is None or agree:
            return {}
        return {name: each for name, each in self.values.others.matrices.items() if each != "other values"}

    @property
    def open_matrices(self) -> tuple[str, ...]:
        """The reasons why a comparison without rows cannot say that all is the same, one clause for each kind."""
        if self.values is None or "rows" not in self.not_looked_at:
            return ()
        others = self.values.others
        told = [f"{matrices(names)} {words}" for words, names in others.near.items()]
        strange = [name for name, each in others.matrices.items() if each == "other values"]
        strange += [each.whole for each in others.joined if not each.turns]
        told += [f"{matrices(names)} stored as {form}, and not compared" for form, names in self.values.unread.items()]
        told += [f"{matrices(strange)} not shown to be the reference's"] if strange else []
        # A recording holds no matrices.
        told += [] if others.is_compared or "recording" in self.forms else ["no matrix was compared"]
        return tuple(told)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Why they differ, the cause before what follows from it."""
        return () if self.is_fold else causes_of(self)

    @property
    def is_fold(self) -> bool:
        """The port is a fold of the reference, as its certificate says, and both return the same within rounding."""
        return bool(self.folded_by) and self.rows.outputs_agree is True

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary with a `schema_version`; NaN and infinity as strings."""
        values = plain(
            {
                "schema_version": _SCHEMA,
                "port": self.port,
                "reference": self.reference,
                "forms": list(self.forms),
                "source": self.source,
                "differs": self.differs,
                "verdict": self.verdict,
                "causes": self.causes,
                "metadata": self.metadata and self.metadata.to_json(),
                "values": self.values and self.values.to_json(),
                "conventions": None if "conventions" in self.not_looked_at else self.conventions.to_json(),
                "rows": None if "rows" in self.not_looked_at else self.rows,
                "wiring": self.wiring,
                "not_looked_at": dict(self.not_looked_at),
                "notes": list(self.notes),
                "folded_by": list(self.folded_by),
            }
        )
        assert isinstance(values, dict)
        return values
