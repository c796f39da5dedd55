"""The tables of an inspection: one row per norm, block or attention call, and the same with alike rows merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from normkit.inspection.foldedness import NormForm, SumForm, WriterForm
from normkit.measurement.facts import Placement, Site
from normkit.show.grouping import grouped, merged, pattern
from normkit.show.parts import Column, Fact, Section, Table, formula_name
from normkit.text import count_spread, counted, degree_spread, percent_spread, rounded_percent, shortened, spread

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection

PLACEMENTS: dict[Placement, str] = {
    "pre": "pre-norm",
    "post": "post-norm",
    "peri": "peri-norm",
    "output-only": "norm on the branch's output",
    "in-branch": "norm inside the branch",
    "none": "no norm",
    "residual-after-norm": "residual taken after the norm",
    "unknown": "unknown",
}
"""Placement of the norms of a block -> its name in reports."""


def placed(count: int, placement: str) -> str:
    """Blocks with a placement, as in "4 pre-norm" and "4 with the norm inside the branch"."""
    if " " not in placement:
        return f"{count} {placement}"
    return f"{count} with {'' if placement.startswith('no ') else 'the '}{placement}"


def _at_most(shares: Sequence[float]) -> str:
    text = rounded_percent(max(shares))
    return text if len(shares) == 1 or text.startswith("<") else f"at most {text}"


def _slopes(values: Sequence[float]) -> str:
    """A slope to two digits, which is all its precision; a rounded -0 is 0."""
    low, high = (f"{round(value, 2) + 0.0:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


_NORMS = (
    Column("path", "norm"),
    Column("class", "class"),
    Column("formula", "computes"),
    Column("role", "role"),
    Column("rms", "input rms", spread, "of the median row"),
    Column("band", "5 to 95 %", spread, "of the rows' rms"),
    Column("ones", "along 1", percent_spread, "energy along all-ones, which centring removes"),
    Column("eps", "eps cuts", _at_most, "how much shorter eps makes the median row"),
    Column("gain", "gain 5 to 95 %", spread, "as it acts, any offset added"),
)
_GEOMETRY = (
    Column("path", "norm"),
    Column("turn", "turns by", degree_spread, "angle from what enters to what leaves, median row"),
    Column("band", "5 to 95 %", degree_spread, "of the rows' angles"),
    Column("centring", "centring", degree_spread, "how far that alone turns the median row"),
    Column("in", "lengths in", spread, "longest over shortest row, 95 % over 5 % quantile; 1 where all are as long"),
    Column("out", "lengths out", spread, "the same of what leaves"),
    Column("dimension", "dim", count_spread, "of the ellipsoid that rows land on; none for groups of channels"),
    Column("axes", "semi-axes", spread, "of the ellipsoid, shortest to longest, over √n"),
    Column("ratio", "ratio", spread, "longest over shortest semi-axis"),
    Column("dead", "dead gains", count_spread, "as good as 0, so that their feature is constant"),
)
_KEYS = (
    Column("path", "attention call"),
    Column("keys", "keys", meaning="tried a head, of the first input's, 256 at most", numeric=True),
    Column("heads", "heads tried", numeric=True),
    Column(
        "before",
        "before",
        percent_spread,
        "selectable among the rows that enter the module: some query prefers them to all others",
    ),
    Column("after", "after", percent_spread, "selectable among the keys of a head, mean over heads"),
    Column("lowest", "lowest head", percent_spread),
)
_BLOCKS = (
    Column("path", "block"),
    Column("placement", "placement"),
    Column(
        "output", "output slope", _slopes, "1 where the residual stream passes through, 0 where the block normalizes it"
    ),
    Column("branch", "branch slope", _slopes, "0 where the branch reads normalized rows, 1 where it does not"),
    Column("in", "rms in", spread, "of the median row of the residual stream"),
    Column("out", "rms out", spread),
)
_ATTENTION = (
    Column("path", "attention call"),
    Column("heads", "heads"),
    Column("bound", "bound", spread, "no logit before softmax is larger in magnitude"),
    Column("sampled", "largest sampled", spread, "magnitude of an exact logit"),
    Column("entropy", "entropy", spread, "of the sampled rows, in nats"),
    Column("sharpest", "sharpest head", spread),
    Column("uniform", "uniform", spread, "the entropy of attention spread evenly"),
)


def formulas(sites: Sequence[Site]) -> tuple[Section, ...]:
    """Each formula once, in order of appearance, under a title of its own; the gist is how many norms compute it."""
    specs = list(dict.fromkeys(site.spec for site in sites))
    names = [formula_name(spec) for spec in specs]
    entries = []
    for spec, name in zip(specs, names, strict=True):
        _, _, notes = str(spec).rstrip("]").partition(" [")
        classes = [site.class_name for site in sites if site.spec == spec]
        count = len(classes)
        entries.append(
            Section(
                title=f"{name}, {notes}" if names.count(name) > 1 and notes else name,
                gist=f"all {count}" if count == len(sites) and count > 1 else f"{count} of {len(sites)}",
                source=shortened(list(dict.fromkeys(classes))),
                formula=spec,
            )
        )
    return tuple(entries)


def norm_table(inspection: Inspection) -> Table:
    """One row per norm, in forward order; a class or formula that all have in common is left to the formulas."""
    names = {each.formula: each.title for each in formulas(inspection.sites)}
    rows: list[list[str | Sequence[float]]] = []
    for site in inspection.sites:
        low, _, high = site.input.rms_quantiles
        numbers = [[site.input.rms_median], [low, high], [site.input.mean_energy], [1 - site.attenuation.median]]
        if site.input.rows == site.input.zero_rows:
            # A row of zeros has no direction, and nothing that eps could shorten.
            numbers = [[0.0], [0.0], [], []]
        gain = [site.gain.quantiles[1], site.gain.quantiles[5]] if site.gain else []
        role = inspection.shown_role(site).replace("in-branch", "in a branch")
        rows.append([site.path, site.class_name, names[site.spec], role, *numbers, gain])
    table = Table.of("Norms", _NORMS, rows, "This model has no normalization layer that a spec describes.")
    same = {"formula"} if len(names) < 2 else set()
    same |= {"class"} if len({site.class_name for site in inspection.sites}) < 2 else set()
    return _grouped(table.only(*(column.key for column in _NORMS if column.key not in same)), inspection)


def geometry_table(inspection: Inspection) -> Table:
    """One row per norm of which rows were sampled, in forward order."""
    rows: list[list[str | Sequence[float]]] = []
    for site in inspection.sites:
        if (shape := site.geometry) is not None:
            low, turn, high = shape.rotation
            centring, axes = shape.rotation_without_affine[1], shape.semi_axes
            numbers = [[turn], [low, high], [centring], [shape.spread_in], [shape.spread_out]]
            dimension = [] if shape.dimension is None else [shape.dimension]
            image = [[axes[0], axes[2]], [shape.elongation]] if axes else [[], []]
            rows.append([site.path, *numbers, dimension, *image, [shape.vanishing_gains]])
    table = Table.of("What the norms do to vectors", _GEOMETRY, rows, "No row of a norm was sampled.")
    return _grouped(table, inspection)


def selection_table(inspection: Inspection) -> Table:
    """One row per attention call of which keys were tried."""
    rows: list[list[str | Sequence[float]]] = []
    for each in inspection.selections:
        shares = [share for _, share in each.heads]
        keys, heads = f"{each.sampled} of {each.keys}", f"{len(shares)} of {each.key_heads}"
        before = "not seen" if each.before is None else [each.before]
        rows.append([each.path, keys, heads, before, [each.after], [min(shares)] if shares else []])
    empty = (
        "No key was tried: that takes SciPy and attention through scaled_dot_product_attention, which shows its keys."
    )
    return _grouped(Table.of("Which keys can be selected", _KEYS, rows, empty), inspection)


def block_table(inspection: Inspection) -> Table:
    """One row per block."""
    rows: list[list[str | Sequence[float]]] = [
        [
            block.path,
            PLACEMENTS[block.placement],
            [block.output_slope],
            [block.branch_slope],
            [block.stream_in.rms_median],
            [block.stream_out.rms_median],
        ]
        for block in inspection.blocks
    ]
    empty = "No repeated block was found, so placement was not judged."
    return _grouped(Table.of("Blocks and placement", _BLOCKS, rows, empty), inspection)


def attention_table(inspection: Inspection) -> Table:
    """One row per attention call."""
    rows: list[list[str | Sequence[float]]] = [
        [
            call.path,
            str(call.heads),
            [call.bound],
            [call.sampled_max],
            [call.entropy],
            [call.entropy_min],
            [call.uniform_entropy],
        ]
        for call in inspection.attentions
    ]
    return _grouped(Table.of("Attention", _ATTENTION, rows, "No attention call was seen."), inspection)


def _grouped(table: Table, inspection: Inspection) -> Table:
    return grouped(table, [block.path for block in inspection.blocks])


FOLDING_METHOD = (
    "How far the weights are from folded and centred is read off them, with the readers and writers that are declared "
    "of the family; nothing runs. What has less than a ten-thousandth of a random tensor's energy along all-ones "
    "counts as centred: rounding to bfloat16 leaves some 3 millionths.",
)
_TITLE = "How far from folded"
_NORM_COLUMNS = (
    Column("path", "norm"),
    Column("readers", "linear maps that read it"),
    Column("state", "gain folded"),
    Column("count", "norms", numeric=True),
    Column("gain", "gain off 1", meaning="root mean square of gain - 1, 0 once folded", numeric=True),
    Column("bias", "largest |bias|", meaning="0 once folded, where each reader has one", numeric=True),
)
_WRITER_COLUMNS = (
    Column("name", "writer"),
    Column("sum", "adds to"),
    Column("state", "centred"),
    Column("count", "writers", numeric=True),
    Column("ones", "along 1", meaning="share of its energy along all-ones, 0 once centred", numeric=True),
    Column("random", "at random", meaning="the same of a random tensor, one part in n", numeric=True),
    Column("mean", "row means", meaning="of a table, root mean square over its rows", numeric=True),
)
_ODD = (
    "{} centred, the rest of what is added there is not, and an RMSNorm sees the mean: a sign of a tool that centres "
    "embeddings whatever reads them, as QuaRot, SliceGPT and SpinQuant do; that changes what the model computes"
)

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection


def describe_foldedness(inspection: Inspection) -> Section | None:
    """The section of a report; None if it was not asked for."""
    found = inspection.foldedness
    if found is None:
        unknown = inspection.foldedness_unknown
        return Section(id="folding", title=_TITLE, gist=unknown, notes=(f"Not known: {unknown}.",)) if unknown else None
    facts = [Fact("gains", _gains(found.norms))]
    if biases := [norm.largest_bias for norm in found.norms if norm.largest_bias is not None]:
        facts.append(Fact("biases", _counted(sum(bias == 0 for bias in biases), len(biases), "0")))
    if found.sums:
        writers = [writer for each in found.sums for writer in each.writers]
        centred = sum(writer.is_centred for writer in writers)
        where = f"the {found.sums[0].name}" if len(found.sums) == 1 else counted(len(found.sums), "sum")
        state = "" if centred == len(writers) else "partly " if centred else "not "
        words = "the writer of" if len(writers) == 1 else f"{_of(centred, len(writers))} writers of"
        barred = ", and none can be" if not centred and all(each.reason for each in found.sums) else ""
        facts.append(Fact("writers", f"{state}centred: {words} {where}{barred if len(writers) > 1 else ''}"))
    if names := found.oddly_centred:
        alike = list(dict.fromkeys(map(pattern, names))) if len(names) > 1 else names
        facts.append(Fact("centred oddly", _ODD.format(f"{shortened(alike)} {'are' if len(names) > 1 else 'is'}")))
    # Norms that can be neither folded nor centred as they are, and why.
    reasons = [(norm.path, norm.reason) for norm in found.norms if _norm_state(norm) == "cannot be"]
    for each in found.sums:
        if each.reason and not all(writer.is_centred for writer in each.writers):
            reasons.append((each.name, each.reason))
        reasons += [(writer.name, writer.reason) for writer in each.writers if _writer_state(each, writer) != "yes"]
    told = merged(("", place, reason) for place, reason in reasons if reason)
    left = tuple(Fact(where, reason) for _, where, reason in told)
    return Section(
        id="folding",
        title=_TITLE,
        gist=facts[0].value,
        facts=tuple(facts),
        tables=(_norm_table(found.norms), _writer_table(found.sums)),
        sections=(Section(title="What cannot be, and why", facts=left),) if left else (),
    )


def _gains(norms: Sequence[NormForm]) -> str:
    gains = [norm for norm in norms if norm.gain_defect is not None]
    ones = sum(norm.gain_defect == 0 for norm in gains)
    free = sum(norm.gain_defect != 0 and not norm.reason for norm in gains)
    if not gains:
        return "folded: no norm has a gain"
    said = _counted(ones, len(gains), "1", "gain")
    if ones == len(gains):
        return f"folded: {said}"
    if len(gains) == 1:
        return f"not folded: {said}, it {'can be folded' if free else 'cannot be folded as it stands'}"
    if free:
        return f"{'partly' if ones else 'not'} folded: {said}, {free}{' more' if ones else ''} can be folded"
    return f"{'folded' if ones else 'not folded'}: {said}, {'no other' if ones else 'none'} can be folded as it stands"


def _counted(number: int, whole: int, value: str, noun: str = "") -> str:
    """How many have a value, as in "all 3 gains are 1"."""
    if whole == 1:
        return f"{f'the {noun}' if noun else 'it'} is {'' if number else 'not '}{value}"
    words = f"{_of(number, whole)} {noun}s" if noun else _of(number, whole)
    return f"{words} {'are' if number > 1 else 'is'} {value}"


def _of(number: int, whole: int) -> str:
    return f"all {number}" if number == whole else f"{number or 'none'} of {whole}"


def _norm_table(norms: Sequence[NormForm]) -> Table:
    alike: dict[tuple[str, ...], list[NormForm]] = defaultdict(list)
    for norm in norms:
        names = list(dict.fromkeys(reader.rpartition(".")[2] for reader in norm.readers))
        alike[pattern(norm.path), norm.kind, shortened(names, 4) or "none", _norm_state(norm)].append(norm)
    rows = []
    for (_, _, readers, state), members in alike.items():
        gains = spread(norm.gain_defect for norm in members if norm.gain_defect is not None)
        biases = spread(norm.largest_bias for norm in members if norm.largest_bias is not None)
        rows.append([_shared(norm.path for norm in members), readers, state, f"{len(members)}", gains, biases])
    return Table.of("Gains and biases", _NORM_COLUMNS, rows, "No norm is declared.")


def _norm_state(norm: NormForm) -> str:
    if not norm.gain_defect:
        return "yes"
    return "cannot be" if norm.reason else "can be"


def _writer_table(sums: Sequence[SumForm]) -> Table:
    alike: dict[tuple[str, str, str], list[tuple[SumForm, WriterForm]]] = defaultdict(list)
    for each in sums:
        for writer in each.writers:
            alike[pattern(writer.name), pattern(each.name), _writer_state(each, writer)].append((each, writer))
    rows = []
    for (_, _, state), members in alike.items():
        means = [writer.row_mean for _, writer in members if writer.row_mean is not None]
        rows.append(
            [
                _shared(writer.name for _, writer in members),
                _shared(each.name for each, _ in members),
                state,
                f"{len(members)}",
                percent_spread(writer.share for _, writer in members),
                rounded_percent(1 / members[0][0].width),
                spread(means) if means else "",
            ]
        )
    return Table.of("What is added up", _WRITER_COLUMNS, rows, "No norm reads a sum of linear maps that is declared.")


def _writer_state(each: SumForm, writer: WriterForm) -> str:
    if writer.is_centred:
        return "yes"
    return "cannot be" if each.reason or writer.reason else "can be"


def _shared(paths: Iterable[str]) -> str:
    """The only path, or the pattern of several."""
    different = list(dict.fromkeys(paths))
    return different[0] if len(different) == 1 else pattern(different[0])
