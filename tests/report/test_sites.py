import dataclasses

from normkit import specs
from normkit.report.sites import folded_table, formulas, site_table


def texts(table, key):
    return [row[0].text for row in table.only(key).rows]


def test_one_row_a_norm_in_forward_order(healthy):
    table = site_table(healthy)
    assert texts(table, "path") == [site.path for site in healthy.sites]
    row = dict(zip((column.key for column in table.columns), (cell.text for cell in table.rows[0]), strict=True))
    assert row == {
        "path": "transformer.h.0.ln_1",
        "class": "LayerNorm",
        "formula": "LayerNorm, eps 1e-5",
        "role": "pre",
        "rms": "0.120",
        "band": "0.0750 to 0.192",
        "ones": "2.0 %",
        "angle": "81.87°",
        "eps": "0.035 %",
        "gain": "0.560 to 0.880",
    }


def test_blocks_built_alike_share_rows_and_numbers_become_ranges(long):
    table = folded_table(long)
    assert texts(table, "path") == ["transformer.h.{0-99}.ln_1", "transformer.h.{0-99}.ln_2", "transformer.ln_f"]
    assert texts(table, "rms")[0] == "0.120 to 4.78"
    assert texts(table, "eps")[0] == "at most 0.035 %"


def test_a_block_that_differs_stands_alone(healthy):
    odd = dataclasses.replace(healthy.sites[4], spec=specs.BERT)
    table = folded_table(dataclasses.replace(healthy, sites=(*healthy.sites[:4], odd, *healthy.sites[5:])))
    assert texts(table, "path") == [
        "transformer.h.{0-1}.ln_1",
        "transformer.h.{0-1}.ln_2",
        "transformer.h.2.ln_1",
        "transformer.h.2.ln_2",
        "transformer.h.{3-5}.ln_1",
        "transformer.h.{3-5}.ln_2",
        "transformer.ln_f",
    ]


def test_blocks_of_two_stacks_are_not_mixed(healthy):
    moved = tuple(
        dataclasses.replace(block, path=block.path.replace("transformer.h", "decoder.h")) if block.index > 2 else block
        for block in healthy.blocks
    )
    sites = tuple(
        dataclasses.replace(site, path=site.path.replace("transformer.h", "decoder.h"))
        if site.block is not None and site.block > 2
        else site
        for site in healthy.sites
    )
    paths = texts(folded_table(dataclasses.replace(healthy, blocks=moved, sites=sites)), "path")
    assert paths[:4] == [
        "transformer.h.{0-2}.ln_1", "transformer.h.{0-2}.ln_2", "decoder.h.{3-5}.ln_1", "decoder.h.{3-5}.ln_2",
    ]  # fmt: skip


def test_norms_outside_known_blocks_are_not_folded(healthy):
    table = folded_table(dataclasses.replace(healthy, blocks=()))
    assert len(table.rows) == 13


def test_each_formula_once_under_a_name_of_its_own(healthy):
    sites = (
        dataclasses.replace(healthy.sites[0], spec=specs.LLAMA),
        dataclasses.replace(healthy.sites[1], spec=specs.T5),
        dataclasses.replace(healthy.sites[2], spec=specs.LLAMA),
    )
    assert [(formula.name, formula.norms) for formula in formulas(sites)] == [
        ("RMSNorm, eps 1e-6, early cast, promoted output", "2 of 3"),
        ("RMSNorm, eps 1e-6, cast to the weight's dtype, output in the weight's dtype", "1 of 3"),
    ]
    assert [formula.norms for formula in formulas(healthy.sites)] == ["all 13"]
    assert texts(site_table(dataclasses.replace(healthy, sites=sites)), "formula")[1].startswith(
        "RMSNorm, eps 1e-6, cast"
    )
