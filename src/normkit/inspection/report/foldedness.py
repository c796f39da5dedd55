"""How far a model is from folded and from centred, in words: one line, a table of norms, a table of writers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from normkit.measurement.quantities import Foldedness, NormForm, SumForm, WriterForm
from normkit.show.grouping import merged, pattern
from normkit.show.parts import Column, Fact, Section, Table
from normkit.text import counted, percent_spread, rounded_percent, shortened, spread

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
        facts.append(Fact("writers", _means(found.sums)))
    left = _left(found)
    return Section(
        id="folding",
        title=_TITLE,
        gist=facts[0].value,
        facts=(*facts, *_odd(found)),
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
    return (Fact("centred oddly", _ODD.format(f"{shortened(alike)} {'are' if len(names) > 1 else 'is'}")),)


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


def _left(found: Foldedness) -> tuple[Fact, ...]:
    """What can be neither folded nor centred as it is, and why."""
    reasons = [(norm.path, norm.reason) for norm in found.norms if _norm_state(norm) == "cannot be"]
    for each in found.sums:
        if each.reason and not all(writer.is_centred for writer in each.writers):
            reasons.append((each.name, each.reason))
        reasons += [(writer.name, writer.reason) for writer in each.writers if _writer_state(each, writer) != "yes"]
    told = merged(("", place, reason) for place, reason in reasons if reason)
    return tuple(Fact(where, reason) for _, where, reason in told)


def _shared(paths: Iterable[str]) -> str:
    """The only path, or the pattern of several."""
    different = list(dict.fromkeys(paths))
    return different[0] if len(different) == 1 else pattern(different[0])
