"""A family's file that extends another one, or includes the parts of others."""

from __future__ import annotations

import pytest

from normkit.errors import ModelError
from normkit.models.family import parse

OLMO = """
model_type = "toy"
extends = "olmo2"
source = "nowhere"
rename = { Olmo2 = "Toy", "self_attn." = "attn.", "self_attn" = "attn" }
config = { eps = "epsilon" }
[[part]]
at = "model.layers.{layer}"
norm.only = { kind = "layer", reads = "residual" }
[[part]]
table.first = { writes = "residual" }
"""


def test_what_is_extended_keeps_all_but_what_the_file_says():
    toy, olmo = parse(OLMO, "toy.toml"), parse('model_type = "a"\nextends = "olmo2"\nsource = "b"', "a.toml")
    assert [*toy.classes] == ["ToyForCausalLM", "ToyForSequenceClassification", "ToyModel"]
    assert (toy.config.eps, toy.config.width) == ("epsilon", olmo.config.width)
    # Its part without a place stands in the place of both of the base's.
    assert [part.at for part in olmo.parts] == ["", "model.layers.{layer}", ""]
    assert [part.at for part in toy.parts] == ["", "model.layers.{layer}"]
    assert ([*toy.parts[0].table], [*toy.parts[1].norm]) == (["first"], ["only"])
    kept = parse(OLMO[: OLMO.index("[[part]]")], "toy.toml").parts
    assert kept[2].linear["lm_head"].only == ("ToyForCausalLM",)
    assert kept[1].linear["attn.q_proj"].reads == "residual"
    assert olmo.parts[1].linear["self_attn.q_proj"].bias == "attention_bias"


def test_places_can_be_left_out_and_several_parts_stand_at_one():
    more = OLMO.replace("rename =", 'without = [""]\nrename =') + '[[part]]\ntable.second = { writes = "residual" }\n'
    assert [[*part.table] for part in parse(more, "toy.toml").parts] == [[], ["first"], ["second"]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Olmo2 =", "Olmo3 =", "toy.toml: rename has 'Olmo3', which olmo2.toml does not contain"),
        ("rename =", 'without = ["layers"]\nrename =', "toy.toml: without has 'layers', where olmo2.toml has no part"),
        ('extends = "olmo2"', 'extends = "olmo9"', "toy.toml extends or includes olmo9.toml, which is not there"),
    ],
)
def test_what_the_base_lacks_is_named(old, new, message):
    with pytest.raises(ModelError, match=message):
        parse(OLMO.replace(old, new), "toy.toml")
