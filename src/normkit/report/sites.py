"""The table of norms, one row each, and each formula once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normkit.inspection.result import Inspection
from normkit.measurement.facts import Site
from normkit.report.parts import Formula
from normkit.show.formula import formula_name
from normkit.show.grouping import grouped
from normkit.show.parts import Cell, Column, Table
from normkit.spec import NormSpec
from normkit.text import percent_spread, rounded_percent, shortened, spread


def _at_most(shares: Sequence[float]) -> str:
    text = rounded_percent(max(shares))
    return text if len(shares) == 1 or text.startswith("<") else f"at most {text}"


_COLUMNS = (
    Column(key="path", heading="norm"),
    Column(key="class", heading="class"),
    Column(key="formula", heading="computes"),
    Column(key="role", heading="role"),
    Column(key="rms", heading="input rms", numeric=True, meaning="of the median row", words=spread),
    Column(key="band", heading="5 to 95 %", numeric=True, meaning="of the rows' rms", words=spread),
    Column(
        key="ones",
        heading="along 1",
        numeric=True,
        meaning="energy along all-ones, which centring removes",
        words=percent_spread,
    ),
    Column(
        key="eps",
        heading="eps cuts",
        numeric=True,
        meaning="how much shorter eps makes the median row",
        words=_at_most,
    ),
    Column(key="gain", heading="gain 5 to 95 %", numeric=True, meaning="as it acts, any offset added", words=spread),
)
_EMPTY = "This model has no normalization layer that a spec describes."


def formulas(sites: Sequence[Site]) -> tuple[Formula, ...]:
    """Each formula once, in order of appearance, under a name that no other formula has."""
    specs = list(dict.fromkeys(site.spec for site in sites))
    names = [formula_name(spec) for spec in specs]
    entries = []
    for spec, name in zip(specs, names, strict=True):
        _, _, notes = str(spec).rstrip("]").partition(" [")
        count = sum(site.spec == spec for site in sites)
        classes = list(dict.fromkeys(site.class_name for site in sites if site.spec == spec))
        entries.append(
            Formula(
                name=f"{name}, {notes}" if names.count(name) > 1 and notes else name,
                text=str(spec),
                spec=spec,
                norms=f"all {count}" if count == len(sites) and count > 1 else f"{count} of {len(sites)}",
                classes=shortened(classes),
            )
        )
    return tuple(entries)


def site_table(inspection: Inspection) -> Table:
    """One row per norm, in forward order; what all have in common is with the formulas."""
    names = {formula.spec: formula.name for formula in formulas(inspection.sites)}
    rows = tuple(_row(site, names) for site in inspection.sites)
    table = Table(title="Norms", columns=_COLUMNS, rows=rows, empty=_EMPTY)
    same = {"formula"} if len(names) < 2 else set()
    same |= {"class"} if len({site.class_name for site in inspection.sites}) < 2 else set()
    table = table.only(*(column.key for column in _COLUMNS if column.key not in same))
    return grouped(table, [block.path for block in inspection.blocks])


def _row(site: Site, names: Mapping[NormSpec, str]) -> tuple[Cell, ...]:
    texts = {"path": site.path, "class": site.class_name, "formula": names[site.spec], "role": site.role}
    low, _, high = site.input.rms_quantiles
    numbers: dict[str, Sequence[float]] = {
        "rms": [site.input.rms_median],
        "band": [low, high],
        "ones": [site.input.mean_energy],
        "eps": [1 - site.attenuation.median],
        "gain": [site.gain.quantiles[1], site.gain.quantiles[5]] if site.gain else [],
    }
    return tuple(
        column.cell(numbers[column.key]) if column.words else Cell(text=texts[column.key]) for column in _COLUMNS
    )
