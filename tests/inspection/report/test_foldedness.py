import dataclasses

import pytest

from normkit.inspection.report.foldedness import describe_foldedness
from normkit.measurement.quantities import Foldedness, NormForm, SumForm, WriterForm

TIED = "its reader lm_head shares the table wte; untying gives the head a table of its own"
SEEN = "h.0.ln_1 is an RMSNorm, which sees the mean that centring would remove"


def norm(path, defect=0.5, bias=None, *, readers=("c_attn",), reason=""):
    readers = tuple(f"{path.rpartition('.')[0]}.{reader}" for reader in readers)
    return NormForm(path=path, kind="layer", gain_defect=defect, largest_bias=bias, readers=readers, reason=reason)


def writer(name, share=0.02, *, row_mean=None, reason=""):
    return WriterForm(
        name=name, share=share, vectors=64, row_mean=row_mean, is_centred=share * 64 <= 1e-4, reason=reason
    )


def residual(*writers, name="residual", reason=""):
    return SumForm(name=name, width=64, writers=writers, reason=reason)


def form(norms=(), sums=(), odd=()):
    return Foldedness(norms=tuple(norms), sums=tuple(sums), oddly_centred=tuple(odd))


def section(inspection, **parts):
    return describe_foldedness(dataclasses.replace(inspection, foldedness=form(**parts)))


def said(inspection, label, **parts):
    return {fact.label: fact.value for fact in section(inspection, **parts).facts}[label]


def words(table):
    return [[cell.text for cell in row] for row in table.rows]


@pytest.mark.parametrize(
    ("defects", "reasons", "expected"),
    [
        ((0.0, 0.0, 0.0), ("", "", ""), "folded: all 3 gains are 1"),
        ((0.0,), ("",), "folded: the gain is 1"),
        ((0.0, 0.0, 0.4), ("", "", TIED), "folded: 2 of 3 gains are 1, no other can be folded as it stands"),
        ((0.0, 0.3, 0.4), ("", "", TIED), "partly folded: 1 of 3 gains is 1, 1 more can be folded"),
        ((0.2, 0.3, 0.4), ("", "", TIED), "not folded: none of 3 gains is 1, 2 can be folded"),
        ((0.2, 0.3), (TIED, TIED), "not folded: none of 2 gains is 1, none can be folded as it stands"),
        ((float("nan"), 0.0), ("", ""), "partly folded: 1 of 2 gains is 1, 1 more can be folded"),
        ((None, None), ("", ""), "folded: no norm has a gain"),
        ((None, 0.2), ("", ""), "not folded: the gain is not 1, it can be folded"),
        ((0.2,), (TIED,), "not folded: the gain is not 1, it cannot be folded as it stands"),
    ],
)
def test_gains_are_counted(healthy, defects, reasons, expected):
    norms = [norm(f"h.{i}.ln", d, reason=r) for i, (d, r) in enumerate(zip(defects, reasons, strict=True))]
    assert said(healthy, "gains", norms=norms) == expected


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ([residual(writer("a", 0.0), writer("b", 1e-9))], "centred: all 2 writers of the residual"),
        ([residual(writer("a", 0.0), writer("b"))], "partly centred: 1 of 2 writers of the residual"),
        ([residual(writer("a"), writer("b"))], "not centred: none of 2 writers of the residual"),
        ([residual(writer("a", float("nan")), writer("b"))], "not centred: none of 2 writers of the residual"),
        (
            [residual(writer("a"), writer("b"), reason=SEEN)],
            "not centred: none of 2 writers of the residual, and none can be",
        ),
        (
            [residual(writer("a"), reason=SEEN), residual(writer("b"), name="embeddings")],
            "not centred: none of 2 writers of 2 sums",
        ),
        ([residual(writer("a", 0.0))], "centred: the writer of the residual"),
        ([residual(writer("a"))], "not centred: the writer of the residual"),
    ],
)
def test_writers_are_counted(healthy, sums, expected):
    assert said(healthy, "writers", sums=sums) == expected


def test_a_sign_of_damage_is_a_fact_of_its_own(healthy):
    words = "embed.weight is centred, the rest of what is added there is not, and an RMSNorm sees"
    assert said(healthy, "centred oddly", odd=["embed.weight"]).startswith(words)
    several = said(healthy, "centred oddly", odd=["embed.weight", "h.0.out", "h.1.out"])
    assert several.startswith("embed.weight, h.*.out are centred, ")


def test_alike_norms_share_a_row_and_readers_are_named(healthy):
    norms = [norm(f"h.{i}.ln_1", 0.1 * (1 + i), 0.2 * i, readers=("q", "k", "v", "up", "gate")) for i in range(3)]
    norms += [norm("ln_f", 0.0, 0.3, readers=("lm_head",)), norm("norm", None, readers=(), reason="no reader")]
    table = section(healthy, norms=norms).tables[0]
    assert words(table) == [
        ["h.*.ln_1", "q, k, v, up and 1 more", "can be", "3", "0.100 to 0.300", "0 to 0.400"],
        ["ln_f", "lm_head", "yes", "1", "0", "0.300"],
        ["norm", "none", "yes", "1", "none", "none"],
    ]


def test_alike_writers_share_a_row(healthy):
    sums = [residual(writer(f"h.{i}.out", 0.01 * (1 + i)), name=f"mlp sum.{i}") for i in range(2)]
    sums += [residual(writer("embed.weight", 0.0, row_mean=3e-9), writer("h.0.out", reason=TIED))]
    table = section(healthy, sums=sums).tables[1]
    assert words(table) == [
        ["h.*.out", "mlp sum.*", "can be", "2", "1.0 to 2.0 %", "1.6 %", ""],
        ["embed.weight", "residual", "yes", "1", "0 %", "1.6 %", "3e-9"],
        ["h.0.out", "residual", "cannot be", "1", "2.0 %", "1.6 %", ""],
    ]


def test_what_cannot_be_is_told_once_with_its_reason(healthy):
    norms = [norm(f"h.{i}.ln", reason=f"its output is added to the mlp sum.{i}") for i in range(3)]
    norms += [norm("ln_f", reason=TIED), norm("folded", 0.0, reason=TIED)]
    sums = [residual(writer("a"), writer("b"), reason=SEEN), residual(writer("c", 0.0), name="done", reason=SEEN)]
    sums += [residual(writer("d", reason=TIED), name="other")]
    left = [(fact.label, fact.value) for fact in section(healthy, norms=norms, sums=sums).sections[0].facts]
    assert left == [
        ("h.*.ln (3)", "its output is added to the mlp sum.*"),
        ("ln_f", TIED),
        ("residual", SEEN),
        ("d", TIED),
    ]


@pytest.mark.parametrize(
    ("biases", "expected"),
    [
        ((0.0, 0.0), "all 2 are 0"),
        ((0.0, 0.1), "1 of 2 is 0"),
        ((0.1, 0.1), "none of 2 is 0"),
        ((0.1, None), "it is not 0"),
        ((0.0, None), "it is 0"),
    ],
)
def test_biases_are_counted(healthy, biases, expected):
    norms = [norm(f"h.{i}", bias=bias) for i, bias in enumerate(biases)]
    assert said(healthy, "biases", norms=norms) == expected


def test_without_biases_nothing_is_said_of_them(healthy):
    assert "biases" not in [fact.label for fact in section(healthy, norms=[norm("a")]).facts]


def test_what_is_not_known_is_said_in_the_section_alone(healthy):
    assert describe_foldedness(healthy) is None
    unknown = dataclasses.replace(healthy, foldedness_unknown="its family is not declared")
    assert describe_foldedness(unknown).notes == ("Not known: its family is not declared.",)
