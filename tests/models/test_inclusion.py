"""A family's file that extends another one, or includes the parts of others."""

from __future__ import annotations

import pytest

from folding_cases import config_of, graph_of, plan_of
from normkit.checkpoint.reader import ModelSource
from normkit.errors import ModelError
from normkit.models.expansion import expand
from normkit.models.family import declared_family, parse
from tiny_models import tiny

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


INCLUDE = """
model_type = "toy"
source = "nowhere"
classes = { Toy = [] }
[[include]]
family = "siglip_vision_model"
classes = { Toy = "SiglipVisionModel" }
config = "eye"
names = { "vision_model." = "toy." }
word = "seen"
taken_by = "a map"
"""


def test_what_is_included_has_its_own_names_sums_and_settings():
    toy = parse(INCLUDE + '[config]\nwidth = "n"', "toy.toml")
    layers = next(part for part in toy.parts if "layers" in part.at)
    assert layers.at == "toy.encoder.layers.{seen_layer}"
    assert (layers.norm["layer_norm1"].reads, layers.norm["layer_norm1"].eps) == ("seen residual", "eye.layer_norm_eps")
    assert toy.repeat == {"seen_layer": ("eye.num_hidden_layers",)}
    assert (toy.config.default["eye.layer_norm_eps"], toy.towers) == (1e-6, ("seen",))
    assert [part.norm["toy.post_layernorm"].opaque for part in toy.parts if "toy.post_layernorm" in part.norm] == [
        "a map"
    ] * 2


def test_settings_that_are_included_have_one_order():
    own = [key for key in declared_family("qwen2_vl").config.default if key.startswith("text_config.")]
    assert len(own) > 4
    assert own == sorted(own)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('word = "seen"', 'wrd = "seen"', "toy.toml: an include has the unknown key 'wrd'"),
        ('config = "eye"', "", "toy.toml: an include lacks the key 'config'"),
        ('Toy = "Sig', 'Tot = "Sig', "toy.toml: an include maps the class 'Tot', which is not declared"),
        ("SiglipVisionModel", "SiglipModel", "toy.toml: an include maps the class 'SiglipModel'"),
        ("siglip_vision_model", "eye", "toy.toml extends or includes eye.toml, which is not there"),
    ],
)
def test_a_wrong_include_is_named(old, new, message):
    with pytest.raises(ModelError, match=message):
        parse(INCLUDE.replace(old, new), "toy.toml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "names"),
    [
        # As the Hub has them, written by transformers 4.
        (
            "gemma3_vision",
            {
                "model.language_model.": "language_model.model.",
                "lm_head": "language_model.lm_head",
                "model.vision_tower.": "vision_tower.vision_model.",
                "model.multi": "multi",
            },
        ),
        ("qwen2_5_vl", {"model.language_model.": "model.", "model.visual.": "visual."}),
    ],
)
def test_checkpoints_of_transformers_4_have_other_names_and_settings_at_the_top(name, names):
    model, _ = tiny(name, tied=False)
    config, graph = config_of(model), graph_of(model)
    if name == "qwen2_5_vl":
        config = {
            **config,
            **config["text_config"],
            "model_type": "qwen2_5_vl",
            "architectures": config["architectures"],
        }
        del config["text_config"]

    def older(tensor: str) -> str:
        start = next((start for start in names if tensor.startswith(start)), "")
        return names.get(start, "") + tensor.removeprefix(start)

    shapes = {older(tensor): info.shape for tensor, info in ModelSource(model).tensors.items()}
    found = expand(declared_family(config["model_type"]), config, shapes)
    assert [norm.name for norm in found.norms] == [older(norm.name) for norm in graph.norms]
    assert [norm.module for norm in found.norms] == [norm.module for norm in graph.norms]
    assert found.is_tied is graph.is_tied is False
    assert {norm.eps_key for norm in found.norms} != {""}


@pytest.mark.slow
def test_only_the_text_model_is_scaled_and_what_writes_to_it():
    for name, writer in [("qwen2_vl", "merger.mlp.2"), ("gemma3_vision", "mm_input_projection")]:
        plan = plan_of(tiny(name, tied=False)[0], operations=["scale"], halvings=2)
        changed = {edit.name for edit in plan.edits if edit.relation != "identical"}
        assert any("language_model" in each for each in changed)
        assert {each for each in changed if "vis" in each or "multi" in each} == {
            each for each in changed if writer in each
        }
        assert set(plan.config) == {"text_config.rms_norm_eps"}
