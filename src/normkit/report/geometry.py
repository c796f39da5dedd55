"""What the norms do to vectors and which keys can be selected, as tables and as facts at a glance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from normkit.inspection.result import Inspection, KeySelection, Site
from normkit.plots.numerals import counted, percent, percent_spread, spread
from normkit.report.parts import Cell, Column, Fact, Table
from normkit.report.sites import folded_sites
from normkit.report.wording import shortened

_COLUMNS = (
    Column(key="path", heading="norm"),
    Column(key="ones", heading="along 1", numeric=True, meaning="energy along all-ones of what enters"),
    Column(key="turn", heading="turns by", numeric=True, meaning="angle from what enters to what leaves, median row"),
    Column(key="band", heading="5 to 95 %", numeric=True, meaning="of the rows' angles"),
    Column(key="centring", heading="centring", numeric=True, meaning="how far that alone turns the median row"),
    Column(
        key="in",
        heading="lengths in",
        numeric=True,
        meaning="longest over shortest row, 95 % over 5 % quantile; 1 where all are as long",
    ),
    Column(key="out", heading="lengths out", numeric=True, meaning="the same of what leaves"),
    Column(key="dimension", heading="dim", numeric=True, meaning="of the image, the surface that rows land on"),
    Column(key="axes", heading="semi-axes", numeric=True, meaning="of the image, shortest to longest, over √n"),
    Column(key="ratio", heading="ratio", numeric=True, meaning="longest over shortest semi-axis"),
    Column(key="dead", heading="dead gains", numeric=True, meaning="as good as 0, so that their feature is constant"),
)
_TITLE = "What the norms do to vectors"
_EMPTY = "No row of a norm was sampled."

_KEY_COLUMNS = (
    Column(key="path", heading="attention call"),
    Column(key="keys", heading="keys", numeric=True, meaning="tried a head, of the first text's, 256 at most"),
    Column(key="heads", heading="heads tried", numeric=True),
    Column(
        key="before",
        heading="before",
        numeric=True,
        meaning="selectable among the rows that enter the module: some query prefers them to all others",
    ),
    Column(key="after", heading="after", numeric=True, meaning="selectable among the keys of a head, mean over heads"),
    Column(key="lowest", heading="lowest head", numeric=True),
)
_NO_KEYS = (
    "No key was tried: that takes SciPy and attention through scaled_dot_product_attention, which shows its keys."
)


def geometry_table(inspection: Inspection) -> Table:
    """One row a norm of which rows were sampled, in forward order."""
    rows = tuple(_row((site,), site.path) for site in inspection.sites if site.geometry)
    return Table(title=_TITLE, columns=_COLUMNS, rows=rows, empty=_EMPTY)


def folded_geometry_table(inspection: Inspection) -> Table:
    """The same with alike neighbours in one row; numbers become ranges."""
    folded = folded_sites(inspection)
    rows = tuple(_row(sites, path) for path, sites in folded if any(site.geometry for site in sites))
    return Table(title=_TITLE, columns=_COLUMNS, rows=rows, empty=_EMPTY)


def selection_table(selections: Sequence[KeySelection]) -> Table:
    """One row an attention call."""
    rows = []
    for selection in selections:
        shares = [share for _, share in selection.heads]
        before = math.nan if selection.before is None else selection.before
        tried = f"{len(shares)} of {selection.key_heads}"
        rows.append(
            (
                Cell(text=selection.path),
                Cell(text=f"{selection.sampled} of {selection.keys}", value=selection.keys),
                Cell(text=tried, value=len(shares)),
                Cell(text="not seen" if selection.before is None else percent(before), value=before),
                Cell(text=percent(selection.after), value=selection.after),
                Cell(text=percent(min(shares, default=math.nan)), value=min(shares, default=math.nan)),
            )
        )
    return Table(title="Which keys can be selected", columns=_KEY_COLUMNS, rows=tuple(rows), empty=_NO_KEYS)


def geometry_facts(inspection: Inspection) -> tuple[Fact, ...]:
    """Rotation, lengths, images and keys in a line each; what was not measured is left out."""
    shapes = [site.geometry for site in inspection.sites if site.geometry]
    facts = []
    if shapes:
        turn = _angles(shape.rotation[1] for shape in shapes)
        before, after = spread(shape.spread_in for shape in shapes), spread(shape.spread_out for shape in shapes)
        facts.append(
            Fact(label="geometry", value=f"median rows turn {turn}; lengths differ {before}-fold in, {after} out")
        )
    ratios = [shape.elongation for shape in shapes if shape.semi_axes]
    words = [f"{spread(ratios)} times as long as thick"] if ratios else []
    if dead := [site.path for site in inspection.sites if site.geometry and site.geometry.vanishing_gains]:
        count = sum(shape.vanishing_gains for shape in shapes)
        words.append(f"{counted(count, 'gain')} as good as 0 at {shortened(dead, 1)}")
    if words:
        facts.append(Fact(label="images", value="; ".join(words)))
    if shares := [share for selection in inspection.selections for _, share in selection.heads]:
        most = max(selection.sampled for selection in inspection.selections)
        some = percent_spread([min(shares), max(shares)])
        heads = counted(len(shares), "head")
        facts.append(Fact(label="keys", value=f"{some} of {most} sampled in each of {heads} can be selected"))
    return tuple(facts)


def _row(sites: Sequence[Site], path: str) -> tuple[Cell, ...]:
    """A row for sites that share it; those without a geometry of their own are passed over."""
    pairs = [(site, site.geometry) for site in sites if site.geometry]
    shapes = [shape for _, shape in pairs]
    first = shapes[0]
    axes = [shape.semi_axes for shape in shapes if shape.semi_axes]
    ratios = [shape.elongation for shape in shapes if shape.semi_axes]
    dimensions = [shape.dimension for shape in shapes if shape.dimension is not None]
    dead = [shape.vanishing_gains for shape in shapes]
    texts: dict[str, tuple[str, float | None]] = {
        "path": (path, None),
        "ones": (percent_spread(site.input.mean_energy for site, _ in pairs), pairs[0][0].input.mean_energy),
        "turn": (_angles(shape.rotation[1] for shape in shapes), first.rotation[1]),
        "band": (_angles(angle for shape in shapes for angle in shape.rotation[::2]), first.rotation[2]),
        "centring": (
            _angles(shape.rotation_without_affine[1] for shape in shapes),
            first.rotation_without_affine[1],
        ),
        "in": (spread(shape.spread_in for shape in shapes), first.spread_in),
        "out": (spread(shape.spread_out for shape in shapes), first.spread_out),
        "dimension": (_whole(dimensions), first.dimension),
        "axes": (spread(axis for low, _, high in axes for axis in (low, high)), axes[0][0] if axes else None),
        "ratio": (spread(ratios), ratios[0] if ratios else None),
        "dead": (_whole(dead), max(dead)),
    }
    return tuple(Cell(text=texts[column.key][0], value=texts[column.key][1]) for column in _COLUMNS)


def _angles(angles: Iterable[float]) -> str:
    """The smallest to the largest angle, to a tenth of a degree, or the one if they read the same."""
    ordered = sorted(angles)
    low, high = f"{ordered[0]:.1f}", f"{ordered[-1]:.1f}°"
    return high if f"{low}°" == high else f"{low} to {high}"


def _whole(numbers: Sequence[int]) -> str:
    """The smallest to the largest of whole numbers, or the one if they are the same."""
    low, high = min(numbers, default=None), max(numbers, default=None)
    return "none" if low is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"
