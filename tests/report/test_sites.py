import dataclasses

from normkit import specs
from normkit.report.sites import formulas, site_table


def texts(table, key, *, grouped=False):
    table = table.only(key)
    return [row[0].text for row in (table.groups if grouped else table.rows)]


def test_one_row_a_norm_in_forward_order(healthy):
    table = site_table(healthy)
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
    table = site_table(long)
    assert texts(table, "path", grouped=True) == [
        "transformer.h.{0-99}.ln_1", "transformer.h.{0-99}.ln_2", "transformer.ln_f",
    ]  # fmt: skip
    assert texts(table, "rms", grouped=True)[0] == "0.120 to 4.78"
    assert texts(table, "band", grouped=True)[0] == "0.0750 to 7.64"
    assert texts(table, "eps", grouped=True)[0] == "at most 0.035 %"


def test_a_norm_that_differs_stands_alone(healthy):
    odd = dataclasses.replace(healthy.sites[4], spec=specs.BERT)
    table = site_table(dataclasses.replace(healthy, sites=(*healthy.sites[:4], odd, *healthy.sites[5:])))
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
    assert [(formula.name, formula.norms) for formula in formulas(sites)] == [
        ("RMSNorm, eps 1e-6, early cast, promoted output", "2 of 3"),
        ("RMSNorm, eps 1e-6, cast to the weight's dtype, output in the weight's dtype", "1 of 3"),
    ]
    assert [(formula.norms, formula.classes) for formula in formulas(healthy.sites)] == [("all 13", "LayerNorm")]
    assert texts(site_table(dataclasses.replace(healthy, sites=sites)), "formula")[1].startswith(
        "RMSNorm, eps 1e-6, cast"
    )
