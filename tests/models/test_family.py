"""A family's file: what it may say, and that anything else in it is an error."""

from __future__ import annotations

import pytest

from normkit.errors import ModelError
from normkit.models.family import Becomes, Tie, parse

TEXT = """
model_type = "toy"
source = "nowhere"

[classes]
ToyModel = ["state"]

[config]
width = "n"

[repeat]
layer = "layers"
block = ["blocks", "layers"]

[[part]]
table.embedding = { writes = "state" }

[[part]]
at = "block.{layer}"
norm.norm = { kind = "layer", reads = "state" }
linear.map = { reads = ".norm", axes = [0, 1] }
attention.mix = { value = ".map", output = ".map" }
"""


def test_a_file_gives_what_it_says_and_defaults_for_the_rest():
    family = parse(TEXT, "toy.toml")
    assert family.classes == {"ToyModel": ("state",)}
    assert family.repeat == {"layer": ("layers",), "block": ("blocks", "layers")}
    assert family.tie is None
    assert family.parts[0].table["embedding"].axis == -1
    block = family.parts[1]
    assert (block.at, block.norm["norm"].weight, block.norm["norm"].bias) == ("block.{layer}", True, False)
    assert block.linear["map"].axes == (0, 1)
    assert block.attention["mix"].rotary


def test_ties_and_the_family_that_one_becomes_are_read_too():
    family = parse(
        TEXT
        + """
[tie]
head = "head"
table = "embedding"
[becomes]
model_type = "llama"
classes = { ToyModel = "LlamaModel" }
drop = ["old"]
""",
        "toy.toml",
    )
    assert family.tie == Tie(head="head", table="embedding")
    assert family.becomes == Becomes(model_type="llama", classes={"ToyModel": "LlamaModel"}, drop=("old",))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[classes]", "[classes", "toy.toml is not TOML"),
        ('source = "nowhere"', 'sauce = "nowhere"', "toy.toml has the unknown key 'sauce'"),
        ('source = "nowhere"', "", "toy.toml lacks the key 'source'"),
        ('width = "n"', "", r"toy.toml: \[config\] lacks the key 'width'"),
        ('width = "n"', 'widht = "n"', r"toy.toml: \[config\] has the unknown key 'widht'; known are width"),
        ('at = "block', 'on = "block', "toy.toml: the part at '' has the unknown key 'on'"),
        ("norm.norm", "nrm.norm", "the part at 'block.{layer}' has the unknown key 'nrm'"),
        ("axes = [0, 1]", "axis = 0", "the part at 'block.{layer}', map has the unknown key 'axis'"),
        ('kind = "layer", ', "", "the part at 'block.{layer}', norm lacks the key 'kind'"),
        ('value = ".map", ', "", "the part at 'block.{layer}', mix lacks the key 'value'"),
        ("table.embedding = {", "table.embedding = { shape = 1,", "the part at '', embedding has the unknown key"),
    ],
)
def test_what_a_file_may_not_say_is_an_error_that_names_the_place(old, new, message):
    assert old in TEXT
    with pytest.raises(ModelError, match=message):
        parse(TEXT.replace(old, new), "toy.toml")
