"""How far a model is from folded and from centred, in words: one line, a table of norms, a table of writers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from normkit.inspection.result import Inspection
from normkit.measurement.quantities import Foldedness, NormForm, SumForm, WriterForm
from normkit.report.parts import Distance
from normkit.show.grouping import pattern
from normkit.show.parts import Cell, Column, Fact, Table
from normkit.text import counted, percent_spread, rounded_percent, shortened, spread

FOLDING_METHOD = (
    "How far the weights are from folded and centred is read off them, with the readers and writers that are declared "
    "of the family; nothing runs. What has less than a ten-thousandth of a random tensor's energy along all-ones "
    "counts as centred: rounding to bfloat16 leaves some 3 millionths.",
)
_NORM_COLUMNS = (
    Column(key="path", heading="norm"),
    Column(key="readers", heading="linear maps that read it"),
    Column(key="state", heading="gain folded"),
    Column(key="count", heading="norms", numeric=True),
    Column(key="gain", heading="gain off 1", numeric=True, meaning="root mean square of gain - 1, 0 once folded"),
    Column(key="bias", heading="largest |bias|", numeric=True, meaning="0 once folded, where each reader has one"),
)
_WRITER_COLUMNS = (
    Column(key="name", heading="writer"),
    Column(key="sum", heading="adds to"),
    Column(key="state", heading="centred"),
    Column(key="count", heading="writers", numeric=True),
    Column(key="ones", heading="along 1", numeric=True, meaning="share of its energy along all-ones, 0 once centred"),
    Column(key="random", heading="at random", numeric=True, meaning="the same of a random tensor, one part in n"),
    Column(key="mean", heading="row means", numeric=True, meaning="of a table, root mean square over its rows"),
)
_ODD = (
    "{} centred, the rest of what is added there is not, and an RMSNorm sees the mean: a sign of a tool that centres "
    "embeddings whatever reads them, as QuaRot, SliceGPT and SpinQuant do; that changes what the model computes"
)


def foldedness_facts(inspection: Inspection) -> tuple[Fact, ...]:
    """One line, and another if something is centred that should not be."""
    found = inspection.foldedness
    if found is None:
        return ()
    line = "; ".join([_gains(found.norms), *([_means(found.sums)] if found.sums else [])])
    return (Fact(label="folding", value=line), *_odd(found))


def describe_foldedness(inspection: Inspection) -> Distance | None:
    """The section of a report; None if it was not asked for."""
    found = inspection.foldedness
    if found is None:
        unknown = inspection.foldedness_unknown
        return Distance(facts=(), norms=None, writers=None, left=(), unknown=unknown) if unknown else None
    facts = [Fact(label="gains", value=_gains(found.norms))]
    if biases := [norm.largest_bias for norm in found.norms if norm.largest_bias is not None]:
        facts.append(Fact(label="biases", value=_counted(sum(bias == 0 for bias in biases), len(biases), "0")))
    if found.sums:
        facts.append(Fact(label="writers", value=_means(found.sums)))
    return Distance(
        facts=(*facts, *_odd(found)),
        norms=_norm_table(found.norms),
        writers=_writer_table(found.sums),
        left=_left(found),
        unknown="",
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


def _means(sums: Sequence[SumForm]) -> str:
    writers = [writer for each in sums for writer in each.writers]
    centred = sum(writer.is_centred for writer in writers)
    where = f"the {sums[0].name}" if len(sums) == 1 else counted(len(sums), "sum")
    if len(writers) == 1:
        return f"{'' if centred else 'not '}centred: the writer of {where}"
    words = f"{_of(centred, len(writers))} writers of {where}"
    if centred == len(writers):
        return f"centred: {words}"
    barred = ", and none can be" if not centred and all(each.reason for each in sums) else ""
    return f"{'partly' if centred else 'not'} centred: {words}{barred}"


def _counted(number: int, whole: int, value: str, noun: str = "") -> str:
    """How many have a value, as in "all 3 gains are 1"."""
    if whole == 1:
        return f"{f'the {noun}' if noun else 'it'} is {'' if number else 'not '}{value}"
    words = f"{_of(number, whole)} {noun}s" if noun else _of(number, whole)
    return f"{words} {'are' if number > 1 else 'is'} {value}"


def _of(number: int, whole: int) -> str:
    return f"all {number}" if number == whole else f"{number or 'none'} of {whole}"


def _odd(found: Foldedness) -> tuple[Fact, ...]:
    names = found.oddly_centred
    if not names:
        return ()
    alike = list(dict.fromkeys(map(pattern, names))) if len(names) > 1 else names
    return (Fact(label="centred oddly", value=_ODD.format(f"{shortened(alike)} {'are' if len(names) > 1 else 'is'}")),)


def _norm_table(norms: Sequence[NormForm]) -> Table:
    alike: dict[tuple[str, ...], list[NormForm]] = defaultdict(list)
    for norm in norms:
        names = list(dict.fromkeys(reader.rpartition(".")[2] for reader in norm.readers))
        alike[pattern(norm.path), norm.kind, shortened(names, 4) or "none", _norm_state(norm)].append(norm)
    rows = []
    for (_, _, readers, state), members in alike.items():
        gains = [norm.gain_defect for norm in members if norm.gain_defect is not None]
        biases = [norm.largest_bias for norm in members if norm.largest_bias is not None]
        rows.append(
            (
                Cell(text=_shared(norm.path for norm in members)),
                Cell(text=readers),
                Cell(text=state),
                Cell(text=f"{len(members)}", value=len(members)),
                Cell(text=spread(gains), value=max(gains, default=None)),
                Cell(text=spread(biases), value=max(biases, default=None)),
            )
        )
    return Table(title="Gains and biases", columns=_NORM_COLUMNS, rows=tuple(rows), empty="No norm is declared.")


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
        shares = [writer.share for _, writer in members]
        means = [writer.row_mean for _, writer in members if writer.row_mean is not None]
        random = 1 / members[0][0].width
        rows.append(
            (
                Cell(text=_shared(writer.name for _, writer in members)),
                Cell(text=_shared(each.name for each, _ in members)),
                Cell(text=state),
                Cell(text=f"{len(members)}", value=len(members)),
                Cell(text=percent_spread(shares), value=max(shares)),
                Cell(text=rounded_percent(random), value=random),
                Cell(text=spread(means) if means else "", value=max(means, default=None)),
            )
        )
    empty = "No norm reads a sum of linear maps that is declared."
    return Table(title="What is added up", columns=_WRITER_COLUMNS, rows=tuple(rows), empty=empty)


def _writer_state(each: SumForm, writer: WriterForm) -> str:
    if writer.is_centred:
        return "yes"
    return "cannot be" if each.reason or writer.reason else "can be"


def _left(found: Foldedness) -> tuple[Fact, ...]:
    """What can be neither folded nor centred as it is, and why; similar places with the same reason are merged."""
    reasons = [(norm.path, norm.reason) for norm in found.norms if _norm_state(norm) == "cannot be"]
    for each in found.sums:
        if each.reason and not all(writer.is_centred for writer in each.writers):
            reasons.append((each.name, each.reason))
        reasons += [(writer.name, writer.reason) for writer in each.writers if _writer_state(each, writer) != "yes"]
    alike: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for place, reason in reasons:
        if reason:
            alike[pattern(place), re.sub(r"\.\d+", ".*", reason)].append((place, reason))
    return tuple(
        Fact(label=_shared(place for place, _ in members), value=reason if len(members) > 1 else members[0][1])
        for (_, reason), members in alike.items()
    )


def _shared(paths: Iterable[str]) -> str:
    """The only path, or the pattern of several."""
    different = list(dict.fromkeys(paths))
    return different[0] if len(different) == 1 else pattern(different[0])
