"""A name that is misspelt in a family's file is told, by that name and the file's."""

from __future__ import annotations

import pytest

from normkit.errors import ModelError
from normkit.models.expansion import expand
from normkit.models.family import parse

TEXT = """
model_type = "toy"
source = "nowhere"
[classes]
ToyForScores = []
ToyModel = ["state.{layer}"]
[config]
width = "width"
[repeat]
layer = "layers"
[[part]]
table.embedding = { writes = "sum.0" }
[[part]]
at = "block.{layer}"
norm.norm = { kind = "layer", reads = "sum.{layer}", gives = "state.{layer+1}", writes = ["sum.{layer+1}"] }
linear.map = { reads = "state.{layer+1}", writes = "sum.{layer}" }
[[part]]
only = ["ToyForScores"]
linear.head = { reads = "state.{layer}", is_head = true }
"""
SHAPES = {
    "embedding": (9, 4),
    **{f"block.{layer}.norm.weight": (4,) for layer in range(2)},
    **{f"block.{layer}.map.weight": (4, 4) for layer in range(2)},
    "head.weight": (9, 4),
}


def places(text: str, architecture: str = "ToyForScores") -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "head.weight" or architecture != "ToyModel"}
    expand(parse(text, "toy.toml"), {"architectures": [architecture], "width": 4, "layers": 2}, shapes)


def test_a_file_that_fits_together_is_silent():
    places(TEXT)
    places(TEXT, "ToyModel")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'linear.head = { reads = "state.',
            'linear.head = { reads = "stat.',
            "head reads 'stat.2', which no norm gives",
        ),
        ('reads = "sum.{layer}"', 'reads = "sm.{layer}"', "block.0.norm reads 'sm.0', which nothing writes"),
        ('writes = "sum.{layer}"', 'writes = "sm.{layer}"', "block.0.map writes 'sm.0', which nothing reads"),
        ('table.embedding = { writes = "sum.0"', 'table.embedding = { writes = "sm"', "embedding writes 'sm', which"),
        ('writes = ["sum.{layer+1}"]', 'writes = ["sm.{layer+1}"]', "block.0.norm writes 'sm.1', which nothing reads"),
        (
            'linear.head = { reads = "state.{layer}", ',
            "linear.head = { ",
            "nothing takes 'state.2', which block.1",
        ),
        ('gives = "state.{layer+1}"', 'gives = "stat.{layer+1}"', "block.0.map reads 'state.1', which no norm gives"),
    ],
)
def test_each_reference_that_leads_nowhere_is_an_error(old, new, message):
    assert TEXT.count(old) == 1
    text = TEXT.replace(old, new)
    if "nothing takes" in message:
        text = text.replace('linear.map = { reads = "state.{layer+1}", ', "linear.map = { ")
    with pytest.raises(ModelError, match=f"models/toy.toml: {message}"):
        places(text)


def test_what_a_class_returns_must_be_there():
    with pytest.raises(ModelError, match="ToyModel returns 'end', which no norm gives"):
        places(TEXT.replace('ToyModel = ["state.{layer}"]', 'ToyModel = ["end"]'), "ToyModel")


def test_an_output_that_goes_elsewhere_needs_no_reader():
    reading = 'linear.head = { reads = "state.{layer}", is_head = true }'
    opaque = TEXT.replace(reading, "linear.head = { is_head = true }").replace(
        'kind = "layer", ', 'kind = "layer", opaque = "a sieve", '
    )
    places(opaque)
