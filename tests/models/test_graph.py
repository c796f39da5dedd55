"""A graph: who reads and who writes, that its names and sizes fit, and which changes it allows, with reasons."""

from __future__ import annotations

import dataclasses

import pytest

from folding_cases import config_of, graph_of
from normkit.errors import ModelError
from normkit.models.expansion import expand
from normkit.models.family import declared_family, parse
from normkit.models.graph import Graph, Linear, Norm
from tiny_models import tiny


@pytest.fixture(scope="module")
def bert() -> Graph:
    return graph_of(tiny("bert", tied=False)[0])


def test_readers_writers_and_spaces_of_a_graph(bert):
    layer = "bert.encoder.layer.0"
    assert [linear.name for linear in bert.readers("state.0")] == [
        f"{layer}.attention.self.{name}" for name in ("query", "key", "value")
    ]
    assert [norm.name for norm in bert.norms_of("mlp sum.0")] == [f"{layer}.output.LayerNorm"]
    assert bert.readers("nowhere") == ()
    assert [writer.name for writer in bert.writers("embeddings")] == [
        f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")
    ]
    assert [writer.name for writer in bert.writers("mlp sum.0")] == ["bert.encoder.layer.0.output.dense"]
    assert [norm.name for norm in bert.added("mlp sum.0")] == ["bert.encoder.layer.0.attention.output.LayerNorm"]
    assert bert.added("embeddings") == ()
    assert bert.is_read("mlp sum.1")
    assert not bert.is_read("attention sum.2")
    assert dataclasses.replace(bert, returned=frozenset({"attention sum.2"})).is_read("attention sum.2")
    post_norm = graph_of(tiny("opt_post_norm", tied=False)[0])
    queries, *_ = post_norm.readers("residual")
    assert queries.name == "model.decoder.layers.0.self_attn.q_proj"
    assert bert.spaces == ("embeddings", "attention sum.0", "mlp sum.0", "attention sum.1", "mlp sum.1")
    assert graph_of(tiny("whisper", tied=False)[0]).spaces == ("encoder", "decoder")


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


def test_a_file_that_fits_together_is_silent_and_what_a_class_returns_is_there():
    places(TEXT)
    places(TEXT, "ToyModel")
    reading = 'linear.head = { reads = "state.{layer}", is_head = true }'
    opaque = TEXT.replace(reading, "linear.head = { is_head = true }").replace(
        'kind = "layer", ', 'kind = "layer", opaque = "a sieve", '
    )
    places(opaque)
    with pytest.raises(ModelError, match="ToyModel returns 'end', which no norm gives"):
        places(TEXT.replace('ToyModel = ["state.{layer}"]', 'ToyModel = ["end"]'), "ToyModel")


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
    family, config = declared_family("gpt2"), config_of(MODEL)
    expand(family, config, GPT2_SHAPES)
    with pytest.raises(ModelError, match=f"{message}.*belong to different models") as error:
        expand(family, config, GPT2_SHAPES | {name: shape})
    assert str(error.value).startswith(f"expected {name} to have ")


def test_numbers_of_the_configuration_that_the_tensors_contradict_are_named():
    with pytest.raises(ModelError, match=r"expected transformer.wte.weight to have 31 along axis 1"):
        expand(declared_family("gpt2"), config_of(MODEL) | {"n_embd": 31}, GPT2_SHAPES)
    with pytest.raises(ModelError, match=r"expected the tensor transformer\.h\.2\.ln_1\.weight"):
        expand(declared_family("gpt2"), config_of(MODEL) | {"n_layer": 10**15}, GPT2_SHAPES)


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
        expand(declared_family(model.config.model_type), config_of(model) | change, shapes)


def graph(family: str, **options: object) -> Graph:
    return graph_of(tiny(family, **options)[0])


def norm_of(graph: Graph, ending: str) -> Norm:
    return next(norm for norm in graph.norms if norm.name.endswith(ending))


def linear_of(graph: Graph, ending: str) -> Linear:
    return next(linear for linear in graph.linears if linear.name.endswith(ending))


@pytest.mark.parametrize(
    ("family", "norm", "reason"),
    [
        ("gpt2", "h.0.ln_1", None),
        ("gpt2", "ln_f", None),
        ("qwen3", "q_norm", "its output goes to the scores, behind rotary positions"),
        ("bert", "embeddings.LayerNorm", "its output is added to the attention sum.0"),
        ("bert", "layer.1.output.LayerNorm", None),
        ("bert", "transform.LayerNorm", None),
        ("gemma2", "post_attention_layernorm", "its output is added to the residual"),
        ("opt_post_norm", "layers.0.final_layer_norm", "its output is added to the attention sum.1"),
        ("whisper", "encoder.layer_norm", None),
    ],
)
def test_a_norm_folds_where_only_linear_maps_take_its_output(family, norm, reason):
    found = graph(family, tied=False)
    told = found.against_folding(norm_of(found, norm))
    assert told is None if reason is None else str(told).startswith(reason)


def test_a_gain_stays_where_a_class_returns_it_or_a_head_is_tied():
    found = graph("gpt2", class_name="GPT2Model")
    assert found.against_folding(found.norms[-1]) == "its output is what GPT2Model returns"
    bert = graph("bert", class_name="BertModel")
    assert bert.against_folding(bert.norms[-1]) == "its output is what BertModel returns"
    found = graph("gpt2", tied=True)
    reason = found.against_folding(found.norms[-1])
    assert reason == (
        "its reader lm_head shares the table transformer.wte.weight; --untie gives the head a table of its own"
    )
    assert found.against_folding(found.norms[-1], untie=True) is None
    fixed = graph("t5", tied=True)
    assert "scaled" in str(fixed.against_folding(fixed.norms[-1], untie=True))


def test_a_space_is_centred_where_only_layer_norms_read_it():
    assert graph("gpt2").against_centring("residual") is None
    assert "is an RMSNorm, which sees the mean" in str(graph("llama").against_centring("residual"))
    post_norm = graph("opt_post_norm")
    assert "layers.0.self_attn.q_proj reads the residual without a norm" in str(post_norm.against_centring("residual"))
    returning = dataclasses.replace(graph("gpt2"), returned=frozenset({"residual"}))
    assert returning.against_centring("residual") == "GPT2LMHeadModel returns the residual"


def test_a_writer_is_centred_unless_it_is_no_linear_map_or_shared():
    whisper = graph("whisper", tied=True)
    conv = linear_of(whisper, "conv2")
    assert str(whisper.against_centring_writer(conv)).startswith("a GELU stands between")
    assert whisper.against_centring_writer(linear_of(whisper, "fc2")) is None
    table = next(table for table in whisper.tables if table.name.endswith("embed_tokens.weight"))
    assert "proj_out shares the table" in str(whisper.against_centring_writer(table))
    assert whisper.against_centring_writer(table, untie=True) is None


@pytest.mark.parametrize(
    ("family", "norm", "reason"),
    [
        ("gpt2", "ln_f", None),
        ("cohere", "input_layernorm", None),
        ("cohere_qk_norm", "q_norm", "what it normalizes is no sum"),
        ("llama", "input_layernorm", "it is one"),
        ("bert", "embeddings.LayerNorm", None),
        ("bert", "layer.0.output.LayerNorm", "the output of bert.encoder.layer.0.attention.output.LayerNorm is added"),
        ("bert", "transform.LayerNorm", "what it normalizes is no sum"),
        ("bloom", "word_embeddings_layernorm", None),
        ("bloom", "ln_f", "the output of transformer.word_embeddings_layernorm is added to the residual"),
        ("whisper", "encoder.layer_norm", "a GELU stands between model.encoder.conv2 and the sum"),
        ("whisper", "decoder.layer_norm", None),
        ("opt_post_norm", "layers.0.self_attn_layer_norm", "model.decoder.layers.0.self_attn.q_proj reads"),
    ],
)
def test_a_layer_norm_becomes_an_rms_norm_where_all_that_it_reads_is_centred(family, norm, reason):
    found = graph(family, tied=False)
    told = found.against_rms(norm_of(found, norm))
    assert told is None if reason is None else str(told).startswith(reason)


def test_a_bias_of_the_values_passes_where_the_weights_of_a_row_sum_to_one():
    (attention, *_) = graph("gpt2").attentions
    assert Graph.against_value_fold(attention) is None
    assert "sinks" in str(Graph.against_value_fold(graph("gpt_oss").attentions[0]))
    assert "has no bias" in str(Graph.against_value_fold(graph("stablelm_bias").attentions[0]))
    cut = graph("olmo", attention_bias=True, clip_qkv=0.5).attentions[0]
    assert Graph.against_value_fold(cut) == "clip_qkv cuts off values with their bias"


@pytest.mark.parametrize(
    ("family", "ignored"), [("gpt_neo", True), ("whisper", True), ("gptj", False), ("stablelm", False)]
)
def test_softmax_does_not_see_a_bias_of_keys_unless_positions_rotate_them(family, ignored):
    found = graph(family)
    assert found.ignores_key_bias(linear_of(found, "k_proj")) is ignored
    assert not found.ignores_key_bias(linear_of(found, "v_proj"))


def test_nor_does_it_where_something_stands_beside_the_scores():
    found = graph("gpt_neo")
    keys = linear_of(found, "k_proj")
    for change in ({"softcap": True}, {"sinks": "sinks"}, {"clip": "bound"}, {"rotary": True}):
        changed = tuple(dataclasses.replace(attention, **change) for attention in found.attentions)
        assert not dataclasses.replace(found, attentions=changed).ignores_key_bias(keys)
