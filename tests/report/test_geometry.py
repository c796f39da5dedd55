import dataclasses
import math

import pytest

from normkit import specs
from normkit.report.geometry import geometry_facts, geometry_table, selection_table


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
    return {fact.label: fact.value for fact in geometry_facts(inspection)}


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


def test_every_number_can_be_sorted_by(healthy):
    table = geometry_table(healthy)
    values = {column.key: cell.value for column, cell in zip(table.columns, table.rows[3], strict=True)}
    shape = healthy.sites[3].geometry
    assert (values["turn"], values["in"], values["out"]) == (shape.rotation[1], shape.spread_in, shape.spread_out)
    assert values["ratio"] == pytest.approx(shape.semi_axes[2] / shape.semi_axes[0])
    assert all(value is not None for key, value in values.items() if key != "path")


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
    assert math.isnan(table.rows[1][4].value)
    assert "scaled_dot_product_attention" in selection_table(dataclasses.replace(healthy, selections=())).empty


def test_a_glance_leaves_out_what_was_not_measured(healthy, empty):
    assert list(facts(healthy)) == ["geometry", "images", "keys"]
    assert facts(empty) == {}
    assert list(facts(dataclasses.replace(healthy, selections=()))) == ["geometry", "images"]


def test_gains_as_good_as_0_are_named(healthy):
    flat = reshaped(healthy, 12, vanishing_gains=3)
    assert facts(flat)["images"] == "2.40 to 3.00 times as long as thick; 3 gains as good as 0 at transformer.ln_f"
    both = reshaped(flat, 0, semi_axes=None, vanishing_gains=1)
    assert facts(both)["images"].endswith("; 4 gains as good as 0 at transformer.h.0.ln_1 and 1 more")
    assert words(geometry_table(flat), 12)["dead"] == "3"
