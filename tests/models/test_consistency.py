"""A name that is misspelt in a family's file is told, by that name and the file's."""

from __future__ import annotations

import pytest

from folding_cases import config_of
from normkit.errors import ModelError
from normkit.models import catalogue
from normkit.models.expansion import expand
from normkit.models.family import parse
from tiny_models import tiny

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


MODEL = tiny("gpt2")[0]
GPT2_SHAPES = {name: tuple(tensor.shape) for name, tensor in MODEL.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("transformer.wte.weight", (97, 31), "32 along axis 1, as config.json says, got the shape .97, 31."),
        ("transformer.wpe.weight", (28, 31), "32 along axis 1, as config.json says"),
        ("transformer.h.1.ln_1.weight", (31,), "32 along axis 0"),
        ("transformer.h.1.ln_2.bias", (31,), "32 along axis 0"),
        ("transformer.h.0.attn.c_attn.weight", (31, 96), "32 along axis 0"),
        ("transformer.h.0.mlp.c_proj.weight", (40, 31), "32 along axis 1"),
        ("transformer.h.0.mlp.c_fc.bias", (41,), "40 numbers, one for each output"),
        ("transformer.h.0.attn.c_attn.weight", (32,), "at least 2 axes"),
        ("transformer.h.0.attn.c_proj.weight", (32,), "at least 2 axes"),
        ("transformer.h.0.mlp.c_fc.bias", (), "40 numbers"),
    ],
)
def test_a_tensor_of_another_size_is_named(name, shape, message):
    family, config = catalogue.family("gpt2"), config_of(MODEL)
    expand(family, config, GPT2_SHAPES)
    with pytest.raises(ModelError, match=f"{message}.*belong to different models") as error:
        expand(family, config, GPT2_SHAPES | {name: shape})
    assert str(error.value).startswith(f"expected {name} to have ")


def test_a_table_of_another_width_than_the_configurations_is_named():
    with pytest.raises(ModelError, match=r"expected transformer.wte.weight to have 31 along axis 1"):
        expand(catalogue.family("gpt2"), config_of(MODEL) | {"n_embd": 31}, GPT2_SHAPES)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"num_key_value_heads": 0}),
        ("llama", {"num_key_value_heads": 3}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_attention_heads": 7}),
        ("bloom", {"n_head": 5}),
        ("gpt2", {"n_head": 5}),
        ("falcon_two_norms", {"num_kv_heads": 1}),
    ],
)
def test_heads_that_the_weights_do_not_have_are_told(family, change):
    model, _ = tiny(family)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"to have rows for \d+ heads, \d+ of them with values, as config.json says"):
        expand(catalogue.family(model.config.model_type), config_of(model) | change, shapes)


def test_a_number_of_layers_out_of_all_bounds_costs_nothing():
    with pytest.raises(ModelError, match=r"expected the tensor transformer\.h\.2\.ln_1\.weight"):
        expand(catalogue.family("gpt2"), config_of(MODEL) | {"n_layer": 10**15}, GPT2_SHAPES)
