""""""

from __future__ import annotations

import dataclasses

import pytest

from normkit import specs
from normkit.inspection.figures import drawings
from normkit.inspection.foldedness import Foldedness, NormForm, SumForm, WriterForm
from normkit.inspection.report.description import describe
from normkit.inspection.report.tables import describe_foldedness, formulas, geometry_table, norm_table, selection_table


def words(table, row=0, *, grouped=False):
    cells = (table.groups if grouped else table.rows)[row]
    return dict(zip((column.key for column in table.columns), (cell.text for cell in cells), strict=True))


def reshaped(inspection, place, **changes):
    """The inspection with another geometry at one site."""
    site = inspection.sites[place]
    shape = dataclasses.replace(site.geometry, **changes)
    sites = (*inspection.sites[:place], dataclasses.replace(site, geometry=shape), *inspection.sites[place + 1 :])
    return dataclasses.replace(inspection, sites=sites)


def facts(inspection):
    part = describe(inspection).part("geometry")
    return {fact.label: fact.value for fact in part.facts}


def test_one_row_a_norm(healthy):
    table = geometry_table(healthy)
    assert [row[0].text for row in table.rows] == [site.path for site in healthy.sites]
    assert words(table) == {
        "path": "transformer.h.0.ln_1",
        "turn": "8.0°",
        "band": "6.4 to 12.0°",
        "centring": "1.4°",
        "in": "1.80",
        "out": "1.15",
        "dimension": "62",
        "axes": "0.500 to 1.20",
        "ratio": "2.40",
        "dead": "0",
    }


def test_norms_of_a_stretch_share_a_row(long):
    table = geometry_table(long)
    assert len(table.groups) == 3
    first = words(table, grouped=True)
    assert first["path"] == "transformer.h.{0-99}.ln_1"
    assert first["turn"] == "8.0 to 26.0°"
    assert first["in"] == "1.80 to 3.60"
    assert first["axes"] == "0.500 to 1.65"
    assert first["dimension"] == "62"


def test_dimensions_and_dead_gains_that_differ_are_a_range(long):
    first = words(geometry_table(reshaped(long, 4, dimension=30, vanishing_gains=1200)), grouped=True)
    assert (first["dimension"], first["dead"]) == ("30 to 62", "0 to 1,200")


def test_a_norm_without_a_sample_has_no_row(healthy):
    bare = dataclasses.replace(healthy.sites[0], geometry=None)
    less = dataclasses.replace(healthy, sites=(bare, *healthy.sites[1:]))
    assert len(geometry_table(less).rows) == 12
    # Of the blocks that it would share a row with, the others tell.
    row = next(row for row in geometry_table(less).groups if row[0].text == "transformer.h.{1-5}.ln_1")
    assert row[1].text == "10.0 to 18.0°"
    none = dataclasses.replace(healthy, sites=(bare,))
    assert geometry_table(none).rows == geometry_table(none).groups == ()


def test_a_norm_without_an_image_says_none(healthy):
    table = geometry_table(reshaped(healthy, 0, dimension=None, semi_axes=None))
    row = words(table)
    assert (row["dimension"], row["axes"], row["ratio"]) == ("none", "none", "none")
    assert row["turn"] == "8.0°"


def test_a_norm_that_does_not_centre_turns_nothing_by_it(twelve):
    sites = tuple(dataclasses.replace(site, spec=specs.LLAMA) for site in twelve.sites)
    shapes = (dataclasses.replace(site.geometry, rotation_without_affine=(0.0, 0.0, 0.0)) for site in sites)
    sites = tuple(dataclasses.replace(site, geometry=shape) for site, shape in zip(sites, shapes, strict=True))
    assert words(geometry_table(dataclasses.replace(twelve, sites=sites)))["centring"] == "0.0°"


def test_every_number_heading_that_a_newcomer_may_not_know_is_explained(healthy):
    legend = geometry_table(healthy).legend
    for heading in ("turns by", "lengths in", "dim", "semi-axes", "ratio", "dead gains"):
        assert f"{heading}: " in legend
    keys = selection_table(healthy).legend
    assert "some query prefers them to all others" in keys


def test_keys_before_and_after_the_projection(healthy):
    table = selection_table(healthy)
    assert words(table, 1) == {
        "path": "transformer.h.1.attn",
        "keys": "16 of 128",
        "heads": "4 of 4",
        "before": "100 %",
        "after": "96.9 %",
        "lowest": "87.5 %",
    }


def test_what_was_not_tried_is_told(healthy):
    few = dataclasses.replace(healthy.selections[1], before=None, key_heads=32)
    none = dataclasses.replace(few, heads=())
    table = selection_table(dataclasses.replace(healthy, selections=(few, none)))
    assert words(table)["before"] == "not seen"
    assert words(table)["heads"] == "4 of 32"
    assert words(table, 1)["heads"] == "0 of 32"
    assert (words(table, 1)["after"], words(table, 1)["lowest"]) == ("NaN", "none")
    assert "scaled_dot_product_attention" in selection_table(dataclasses.replace(healthy, selections=())).empty


def test_a_glance_leaves_out_what_was_not_measured(healthy, empty):
    assert list(facts(healthy)) == ["geometry", "ellipsoids", "keys"]
    assert facts(empty) == {}
    assert list(facts(dataclasses.replace(healthy, selections=()))) == ["geometry", "ellipsoids"]


def test_gains_as_good_as_0_are_named(healthy):
    flat = reshaped(healthy, 12, vanishing_gains=3)
    assert facts(flat)["ellipsoids"] == "2.40 to 3.00 times as long as thick; 3 gains as good as 0 at transformer.ln_f"
    both = reshaped(flat, 0, semi_axes=None, vanishing_gains=1)
    assert facts(both)["ellipsoids"].endswith("; 4 gains as good as 0 at transformer.h.0.ln_1 and 1 more")
    assert words(geometry_table(flat), 12)["dead"] == "3"


def test_gains_of_1_leave_spheres_and_no_figure_of_them(healthy):
    round_ = tuple(
        dataclasses.replace(
            site,
            gain=dataclasses.replace(site.gain, quantiles=(1.0,) * 7),
            geometry=dataclasses.replace(site.geometry, semi_axes=(1.0, 1.0, 1.0)),
        )
        for site in healthy.sites
    )
    untrained = dataclasses.replace(healthy, sites=round_)
    assert facts(untrained)["ellipsoids"] == "spheres, as no gain differs from 1"
    assert not {"gain-spectrum", "ellipsoid-depth"} & {drawing.name for drawing in drawings(untrained)}


def test_the_role_of_a_norm_inside_a_branch_is_told(healthy):
    inside = dataclasses.replace(healthy.sites[0], role="unknown")
    outside = dataclasses.replace(healthy.sites[-1], role="unknown")
    sites = (inside, *healthy.sites[1:-1], outside)
    roles = texts(norm_table(dataclasses.replace(healthy, sites=sites)), "role")
    assert (roles[0], roles[-1]) == ("in a branch", "unknown")
    unclear = (dataclasses.replace(healthy.blocks[0], placement="unknown"), *healthy.blocks[1:])
    assert texts(norm_table(dataclasses.replace(healthy, sites=sites, blocks=unclear)), "role")[0] == "unknown"


def texts(table, key, *, grouped=False):
    table = table.only(key)
    return [row[0].text for row in (table.groups if grouped else table.rows)]


def test_one_row_a_norm_in_forward_order(healthy):
    table = norm_table(healthy)
    assert texts(table, "path") == [site.path for site in healthy.sites]
    row = dict(zip((column.key for column in table.columns), (cell.text for cell in table.rows[0]), strict=True))
    assert row == {
        "path": "transformer.h.0.ln_1",
        "role": "pre",
        "rms": "0.120",
        "band": "0.0750 to 0.192",
        "ones": "2.0 %",
        "eps": "0.035 %",
        "gain": "0.560 to 0.880",
    }


def test_blocks_built_alike_share_rows_and_numbers_become_ranges(long):
    table = norm_table(long)
    assert texts(table, "path", grouped=True) == [
        "transformer.h.{0-99}.ln_1", "transformer.h.{0-99}.ln_2", "transformer.ln_f",
    ]  # fmt: skip
    assert texts(table, "rms", grouped=True)[0] == "0.120 to 4.78"
    assert texts(table, "band", grouped=True)[0] == "0.0750 to 7.64"
    assert texts(table, "eps", grouped=True)[0] == "at most 0.035 %"


def test_a_norm_that_differs_stands_alone(healthy):
    odd = dataclasses.replace(healthy.sites[4], spec=specs.BERT)
    table = norm_table(dataclasses.replace(healthy, sites=(*healthy.sites[:4], odd, *healthy.sites[5:])))
    assert list(zip(texts(table, "path", grouped=True), texts(table, "formula", grouped=True), strict=True)) == [
        ("transformer.h.{0-1,3-5}.ln_1", "LayerNorm, eps 1e-5"),
        ("transformer.h.{0-5}.ln_2", "LayerNorm, eps 1e-5"),
        ("transformer.h.2.ln_1", "LayerNorm, eps 1e-12"),
        ("transformer.ln_f", "LayerNorm, eps 1e-5"),
    ]


def test_each_formula_once_under_a_name_of_its_own(healthy):
    sites = (
        dataclasses.replace(healthy.sites[0], spec=specs.LLAMA),
        dataclasses.replace(healthy.sites[1], spec=specs.T5),
        dataclasses.replace(healthy.sites[2], spec=specs.LLAMA),
    )
    assert [(formula.title, formula.gist) for formula in formulas(sites)] == [
        ("RMSNorm, eps 1e-6, early cast, promoted output", "2 of 3"),
        ("RMSNorm, eps 1e-6, cast to the weight's dtype, output in the weight's dtype", "1 of 3"),
    ]
    assert [(formula.gist, formula.source) for formula in formulas(healthy.sites)] == [("all 13", "LayerNorm")]
    assert texts(norm_table(dataclasses.replace(healthy, sites=sites)), "formula")[1].startswith(
        "RMSNorm, eps 1e-6, cast"
    )


TIED = "its reader lm_head shares the table wte; --untie gives the head a table of its own"
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


def folding_words(table):
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
    assert folding_words(table) == [
        ["h.*.ln_1", "q, k, v, up and 1 more", "can be", "3", "0.100 to 0.300", "0 to 0.400"],
        ["ln_f", "lm_head", "yes", "1", "0", "0.300"],
        ["norm", "none", "yes", "1", "none", "none"],
    ]


def test_alike_writers_share_a_row(healthy):
    sums = [residual(writer(f"h.{i}.out", 0.01 * (1 + i)), name=f"mlp sum.{i}") for i in range(2)]
    sums += [residual(writer("embed.weight", 0.0, row_mean=3e-9), writer("h.0.out", reason=TIED))]
    table = section(healthy, sums=sums).tables[1]
    assert folding_words(table) == [
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
