"""The table of norms, one row each, and the same with alike neighbours folded into one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normkit.inspection.result import Block, Inspection, Site
from normkit.plots.numerals import degrees, percent, percent_spread, spread
from normkit.report.parts import Cell, Column, Formula, Table
from normkit.report.wording import formula_name
from normkit.spec import NormSpec

_COLUMNS = (
    Column(key="path", heading="norm"),
    Column(key="class", heading="class"),
    Column(key="formula", heading="computes"),
    Column(key="role", heading="role"),
    Column(key="rms", heading="input rms", numeric=True, meaning="of the median row"),
    Column(key="band", heading="5 to 95 %", numeric=True, meaning="of the rows' rms"),
    Column(
        key="ones",
        heading="along 1",
        numeric=True,
        meaning="energy along all-ones, which centring removes",
    ),
    Column(key="angle", heading="angle to 1", numeric=True, meaning="mean angle to all-ones, 90° where the mean is 0"),
    Column(key="eps", heading="eps cuts", numeric=True, meaning="how much shorter eps makes the median row"),
    Column(key="gain", heading="gain 5 to 95 %", numeric=True, meaning="as it acts, any offset added"),
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
        entries.append(
            Formula(
                name=f"{name}, {notes}" if names.count(name) > 1 and notes else name,
                text=str(spec),
                spec=spec,
                norms=f"all {count}" if count == len(sites) and count > 1 else f"{count} of {len(sites)}",
            )
        )
    return tuple(entries)


def site_table(inspection: Inspection) -> Table:
    """One row a norm, in forward order."""
    names = {formula.spec: formula.name for formula in formulas(inspection.sites)}
    rows = tuple(_row((site,), site.path, names) for site in inspection.sites)
    return Table(title="Norms", columns=_COLUMNS, rows=rows, empty=_EMPTY)


def folded_table(inspection: Inspection) -> Table:
    """One row for each norm of a stretch of blocks that are built alike; numbers become ranges."""
    names = {formula.spec: formula.name for formula in formulas(inspection.sites)}
    rows = tuple(_row(sites, path, names) for path, sites in folded_sites(inspection))
    return Table(title="Norms", columns=_COLUMNS, rows=rows, empty=_EMPTY)


def folded_sites(inspection: Inspection) -> list[tuple[str, tuple[Site, ...]]]:
    """Rows of the folded table: a path, with the blocks it stands for in braces, and its sites."""
    blocks = {block.index: block for block in inspection.blocks}
    stretches: list[list[list[Site]]] = []
    for run in _runs(inspection.sites):
        signature = _signature(run, blocks)
        if signature is not None and stretches and signature == _signature(stretches[-1][-1], blocks):
            stretches[-1].append(run)
        else:
            stretches.append([run])
    return [(_braced(sites, blocks), sites) for stretch in stretches for sites in zip(*stretch, strict=True)]


def _row(sites: Sequence[Site], path: str, names: Mapping[NormSpec, str]) -> tuple[Cell, ...]:
    first = sites[0]
    losses = [1 - site.attenuation.median for site in sites]
    gains = [site.gain.quantiles for site in sites if site.gain]
    texts: dict[str, tuple[str, float | None]] = {
        "path": (path, None),
        "class": (first.class_name, None),
        "formula": (names[first.spec], None),
        "role": (first.role, None),
        "rms": (spread(site.input.rms_median for site in sites), first.input.rms_median),
        "band": (
            spread(rms for site in sites for rms in site.input.rms_quantiles[::2]),
            first.input.rms_quantiles[0],
        ),
        "ones": (percent_spread(site.input.mean_energy for site in sites), first.input.mean_energy),
        "angle": (_angle([site.input.angle_to_ones for site in sites]), first.input.angle_to_ones),
        "eps": (("at most " if len(sites) > 1 else "") + percent(max(losses)), max(losses)),
        "gain": (spread(g for q in gains for g in (q[1], q[5])) if gains else "none", gains[0][3] if gains else None),
    }
    return tuple(Cell(text=texts[column.key][0], value=texts[column.key][1]) for column in _COLUMNS)


def _angle(angles: Sequence[float]) -> str:
    low, high = degrees(min(angles)), degrees(max(angles))
    return low if low == high else f"{low} to {high}"


def _runs(sites: Sequence[Site]) -> list[list[Site]]:
    """The sites, grouped while their block stays the same."""
    runs: list[list[Site]] = []
    for site in sites:
        if runs and site.block is not None and runs[-1][0].block == site.block:
            runs[-1].append(site)
        else:
            runs.append([site])
    return runs


def _signature(run: Sequence[Site], blocks: Mapping[int, Block]) -> object:
    """What two blocks have in common when their norms can share rows; None outside the known blocks."""
    block = None if run[0].block is None else blocks.get(run[0].block)
    if block is None:
        return None
    alike = [(site.path.removeprefix(block.path), site.class_name, site.role, site.spec) for site in run]
    return block.path.rpartition(".")[0], alike


def _braced(sites: Sequence[Site], blocks: Mapping[int, Block]) -> str:
    """As in "layers.{0-11}.input_layernorm"."""
    first, last = sites[0], sites[-1]
    if first.block is None or last.block is None or first is last:
        return first.path
    stem, dot, low = blocks[first.block].path.rpartition(".")
    high = blocks[last.block].path.rpartition(".")[2]
    return f"{stem}{dot}{{{low}-{high}}}{first.path.removeprefix(blocks[first.block].path)}"
