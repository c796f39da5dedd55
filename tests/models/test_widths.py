"""Tensors that belong to different models do not fit together, and the first that does not is named."""

from __future__ import annotations

import pytest

from folding_cases import config_of
from normkit.errors import ModelError
from normkit.models import catalogue
from normkit.models.expansion import expand
from tiny_models import tiny

MODEL = tiny("gpt2")[0]
SHAPES = {name: tuple(tensor.shape) for name, tensor in MODEL.state_dict().items()}


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
    expand(family, config, SHAPES)
    with pytest.raises(ModelError, match=f"{message}.*belong to different models") as error:
        expand(family, config, SHAPES | {name: shape})
    assert str(error.value).startswith(f"expected {name} to have ")


def test_a_table_of_another_width_than_the_configurations_is_named():
    with pytest.raises(ModelError, match=r"expected transformer.wte.weight to have 31 along axis 1"):
        expand(catalogue.family("gpt2"), config_of(MODEL) | {"n_embd": 31}, SHAPES)


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
        expand(catalogue.family("gpt2"), config_of(MODEL) | {"n_layer": 10**15}, SHAPES)
