"""The result of an inspection as frozen values with JSON out: the contract between measuring and drawing.

Nothing here computes more than a lookup. Tensors never enter: every number is a Python float or int,
non-finite ones included (they become strings in JSON, which has none).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.files import write_text
from normkit.measurement.facts import Attention, Block, ModelFacts, Site
from normkit.measurement.quantities import Foldedness, KeySelection, Walk
from normkit.measurement.training import Training
from normkit.rules.finding import Check, Finding, Severity
from normkit.spec import NormSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of `normkit.inspect`: every site, block and attention, and what the rules found."""

    model: ModelFacts
    """The inspected model."""
    sites: tuple[Site, ...]
    """The norms, in forward order."""
    blocks: tuple[Block, ...]
    """The repeated blocks, in forward order."""
    attentions: tuple[Attention, ...]
    """The attention calls, in forward order."""
    final_norm: str | None
    """Path of the norm between the last block and the readers of the stream, or None."""
    recurring_outliers: tuple[tuple[int, tuple[str, ...]], ...]
    """Pairs (feature index, paths) of gain outliers seen at the same index of several sites."""
    walk: Walk | None
    """One token's way through a norm, or None."""
    findings: tuple[Finding, ...]
    """Worst first."""
    checks: tuple[Check, ...]
    """One a rule, in the rules' order."""
    unrecognised: tuple[tuple[str, str], ...]
    """Modules that change scale like a norm and are none that a spec describes, with the reason."""
    selections: tuple[KeySelection, ...] = ()
    """Selectable keys of one text, one entry an attention call; empty if none was tried."""
    training: Training | None = None
    """Observations of a training run; None if the model was only run."""
    foldedness: Foldedness | None = None
    """Distance of the weights from folded and centred; None if it is not known."""
    foldedness_unknown: str = ""
    """Reason why `foldedness` is unknown, as an undeclared family; "" if it is known or was not asked for."""

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding, or None."""
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists, with `schema_version`; NaN and infinity as strings."""
        values = plain(self)
        assert isinstance(values, dict)
        return {"schema_version": SCHEMA_VERSION, **values}

    def write_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML file, whole or not at all, and return its path.

        Raises:
            InputError: If it cannot be written there.
        """
        from normkit.inspection.report import page

        return write_text(Path(path), page.render(self))

    def _repr_html_(self) -> str:
        """The report in an isolated frame, for notebooks."""
        from normkit.inspection.report import page

        return page.frame(self)


def plain(value: object) -> object:
    """Dataclasses as dictionaries, tuples as lists, NaN and infinity as strings: what JSON can hold."""
    if isinstance(value, NormSpec):
        return {"formula": str(value), **value.to_json()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
