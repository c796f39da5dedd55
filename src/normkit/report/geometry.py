"""What the norms do to vectors and which keys can be selected, as tables and as short facts."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.inspection.result import Inspection
from normkit.measurement.facts import Site
from normkit.measurement.quantities import SiteGeometry
from normkit.show.grouping import grouped
from normkit.show.parts import Cell, Column, Fact, Table
from normkit.text import counted, degree_spread, percent_spread, shortened, spread


def _whole(numbers: Sequence[float]) -> str:
    """The range of some whole numbers, or the number if they are equal."""
    low, high = f"{int(min(numbers)):,}", f"{int(max(numbers)):,}"
    return low if low == high else f"{low} to {high}"


_COLUMNS = (
    Column(key="path", heading="norm"),
    Column(
        key="turn",
        heading="turns by",
        numeric=True,
        meaning="angle from what enters to what leaves, median row",
        words=degree_spread,
    ),
    Column(key="band", heading="5 to 95 %", numeric=True, meaning="of the rows' angles", words=degree_spread),
    Column(
        key="centring",
        heading="centring",
        numeric=True,
        meaning="how far that alone turns the median row",
        words=degree_spread,
    ),
    Column(
        key="in",
        heading="lengths in",
        numeric=True,
        meaning="longest over shortest row, 95 % over 5 % quantile; 1 where all are as long",
        words=spread,
    ),
    Column(key="out", heading="lengths out", numeric=True, meaning="the same of what leaves", words=spread),
    Column(
        key="dimension",
        heading="dim",
        numeric=True,
        meaning="of the image, the surface that rows land on",
        words=_whole,
    ),
    Column(
        key="axes",
        heading="semi-axes",
        numeric=True,
        meaning="of the image, shortest to longest, over √n",
        words=spread,
    ),
    Column(key="ratio", heading="ratio", numeric=True, meaning="longest over shortest semi-axis", words=spread),
    Column(
        key="dead",
        heading="dead gains",
        numeric=True,
        meaning="as good as 0, so that their feature is constant",
        words=_whole,
    ),
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
        words=percent_spread,
    ),
    Column(
        key="after",
        heading="after",
        numeric=True,
        meaning="selectable among the keys of a head, mean over heads",
        words=percent_spread,
    ),
    Column(key="lowest", heading="lowest head", numeric=True, words=percent_spread),
)
_NO_KEYS = (
    "No key was tried: that takes SciPy and attention through scaled_dot_product_attention, which shows its keys."
)


def geometry_table(inspection: Inspection) -> Table:
    """One row per norm of which rows were sampled, in forward order."""
    rows = tuple(_row(site, site.geometry) for site in inspection.sites if site.geometry)
    table = Table(title=_TITLE, columns=_COLUMNS, rows=rows, empty=_EMPTY)
    return grouped(table, [block.path for block in inspection.blocks])


def selection_table(inspection: Inspection) -> Table:
    """One row per attention call."""
    rows = []
    for selection in inspection.selections:
        shares = [share for _, share in selection.heads]
        numbers: dict[str, Sequence[float]] = {
            "before": [] if selection.before is None else [selection.before],
            "after": [selection.after],
            "lowest": [min(shares)] if shares else [],
        }
        texts = (selection.path, f"{selection.sampled} of {selection.keys}", f"{len(shares)} of {selection.key_heads}")
        cells = [column.cell(numbers[column.key]) for column in _KEY_COLUMNS[len(texts) :]]
        if selection.before is None:
            cells[0] = Cell(text="not seen")
        rows.append((*(Cell(text=text) for text in texts), *cells))
    table = Table(title="Which keys can be selected", columns=_KEY_COLUMNS, rows=tuple(rows), empty=_NO_KEYS)
    return grouped(table, [block.path for block in inspection.blocks])


def geometry_facts(inspection: Inspection) -> tuple[Fact, ...]:
    """Rotation, lengths, images and keys, one line each; what was not measured is left out."""
    shapes = [site.geometry for site in inspection.sites if site.geometry]
    facts = []
    if shapes:
        turn = degree_spread(shape.rotation[1] for shape in shapes)
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


def _row(site: Site, shape: SiteGeometry) -> tuple[Cell, ...]:
    axes = shape.semi_axes
    numbers: dict[str, Sequence[float]] = {
        "turn": [shape.rotation[1]],
        "band": [shape.rotation[0], shape.rotation[2]],
        "centring": [shape.rotation_without_affine[1]],
        "in": [shape.spread_in],
        "out": [shape.spread_out],
        "dimension": [] if shape.dimension is None else [shape.dimension],
        "axes": [axes[0], axes[2]] if axes else [],
        "ratio": [shape.elongation] if axes else [],
        "dead": [shape.vanishing_gains],
    }
    return Cell(text=site.path), *(column.cell(numbers[column.key]) for column in _COLUMNS[1:])
