"""The families' files: what one may say, what transformers says, and a configuration as its family reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import transformers

from normkit.errors import ModelError
from normkit.models.family import Becomes, Tie, declared_family, declared_types, parse
from normkit.models.settings import Settings
from tiny_models import RECIPES, configuration, tiny

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


EVERY = declared_types()


def config_class(model_type: str) -> Any:
    """The class that a config.json of this model_type is read by."""
    return type(transformers.AutoConfig.for_model(model_type))


def recipes_of(model_type: str) -> list[str]:
    """The recipes of models of a family."""
    return [name for name, recipe in RECIPES.items() if configuration(recipe).model_type == model_type]


def test_names_are_the_model_types_of_the_files_and_others_are_errors():
    assert tuple(sorted(EVERY)) == EVERY
    assert [declared_family(name).model_type for name in EVERY] == list(EVERY)
    with pytest.raises(
        ModelError, match=r"got model_type 'lama'.* declared are albert, .*bert, bloom, .*, whisper, .*$"
    ):
        declared_family("lama")
    with pytest.raises(ModelError, match="declared are albert, "):
        declared_family("")


@pytest.mark.parametrize("name", EVERY)
def test_its_classes_are_classes_of_transformers_for_this_configuration(name):
    family = declared_family(name)
    for known in [*family.classes, *_named(family)]:
        assert issubclass(getattr(transformers, known).config_class, config_class(name)), known
    assert set(_named(family)) <= set(family.classes)


def _named(family: Any) -> list[str]:
    """The classes that parts and entries are restricted to."""
    entries = [entry for part in family.parts for entry in [part, *part.linear.values(), *part.table.values()]]
    return [name for entry in entries for name in entry.only]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EVERY)
def test_a_missing_key_means_what_transformers_takes(name):
    family, config = declared_family(name), config_class(name)
    taken = config()
    for key, default in family.config.default.items():
        if isinstance(default, str) and default.startswith("="):
            # Another name, or the value of another key: whatever that one is set to. Falcon's sizes allow few numbers.
            above, _, other = default[1:].rpartition(".")
            now = value_at(taken, default[1:])
            value = not now if isinstance(now, bool) else True if above else 142.0 if other.endswith("eps") else 142
            given = config(**{above: {other: value}} if above else {other: value})
            if value_at(given, key) is None:
                # An older name, which the configuration reads and does not keep.
                assert value_at(config(**{key: value}), other) == value, key
            else:
                assert value_at(given, key) == value, key
        elif value_at(taken, key) is not None:
            # Of an inner configuration that is there: one that is left out whole has other sizes in some classes.
            above = key.rpartition(".")[0]
            value = value_at(config(**{above: {}}) if above else taken, key)
            assert (list(value) if isinstance(value, tuple) else value) == default, key
        else:
            # The configuration leaves it open, so the code of the model decides: as with the default.
            assert _leaves_open(name, key, default), key


def every_value(config: Any) -> Iterator[tuple[str, Any]]:
    """The keys of a configuration and of those in it, with values."""
    for key, value in vars(config).items():
        yield from (
            [(f"{key}.{name}", each) for name, each in vars(value).items()]
            if "_config" in key and value
            else [(key, value)]
        )


def value_at(config: Any, key: str) -> Any:
    """The value of a key of a configuration, or of one below it."""
    for name in key.split("."):
        config = getattr(config, name, None)
    return config


def _leaves_open(name: str, key: str, default: Any) -> bool:
    """Whether models without the key and with this value for it have the same tensors, and with another have not."""
    family, matters = declared_family(name), False
    for recipe in recipes_of(name):
        options = {other: value for other, value in RECIPES[recipe].options.items() if other != key}
        for class_name in family.classes:
            with mock.patch.dict(RECIPES, {recipe: dataclasses.replace(RECIPES[recipe], options=options)}):
                without = tiny(recipe, class_name=class_name)[0]
            if not _is_asked(family, key, without.config):
                continue
            with_default = tiny(recipe, class_name=class_name, **{key: default})[0]
            if without.state_dict().keys() != with_default.state_dict().keys():
                return False
            if isinstance(default, bool):
                other = tiny(recipe, class_name=class_name, **{key: not default})[0]
                matters |= other.state_dict().keys() != without.state_dict().keys()
    return matters or not isinstance(default, bool)


def _is_asked(family: Any, key: str, config: Any) -> bool:
    """Whether the file asks for this key where the others that it asks for at once are as in this configuration."""
    asking = [when for when in (family.requires, *(part.when for part in family.parts)) if key in when]
    return not asking or any(
        all(value_at(config, other) == value for other, value in when.items() if other != key) for when in asking
    )


@pytest.mark.parametrize("name", EVERY)
def test_every_key_that_a_file_reads_is_one_of_the_configuration(name):
    family = declared_family(name)
    config = config_class(name)()
    known = vars(config) | config_class(name).attribute_map
    known |= {f"{above}.{key}": 0 for above, inner in vars(config).items() for key in getattr(inner, "__dict__", ())}
    conditions = [family.requires, *(part.when for part in family.parts)]
    entries = [entry for part in family.parts for section in (part.norm, part.linear) for entry in section.values()]
    read = {family.config.width, family.config.heads, *family.config.dropout}
    read |= {key for condition in conditions for key in condition}
    read |= {entry.bias for entry in entries if isinstance(entry.bias, str)}
    read |= {eps for eps in (family.config.eps,) if isinstance(eps, str)}
    for key in read - {""} - set(family.config.default):
        assert key in known, key
    for word, keys in family.repeat.items():
        assert keys[0] in known or config_class(name).attribute_map, word


@pytest.mark.parametrize("name", EVERY)
def test_the_rates_of_dropout_are_all_named(name):
    config = config_class(name)()
    rates = {
        key
        for key, value in every_value(config)
        if ("drop" in key or key.endswith("_jitter_noise"))
        and isinstance(value, int | float)
        and not key.endswith(("classifier_dropout", "classifier_dropout_prob"))
    }
    assert rates <= set(declared_family(name).config.dropout) | {"summary_first_dropout"}


FAMILY = parse(
    """
model_type = "toy"
source = "nowhere"
[classes]
ToyModel = []
[config]
width = "width"
eps = "eps"
[config.default]
eps = 1e-5
inner = "=width"
bias = true
[requires]
kind = ["plain", "fancy"]
crossed = false
[repeat]
layer = ["layers", "blocks"]
expert = "experts"
""",
    "toy.toml",
)


def settings(**config: Any) -> Settings:
    return Settings(FAMILY, {"architectures": ["ToyModel"], **config})


def test_a_key_that_is_set_counts_before_the_default_of_a_missing_one():
    assert settings(eps=1e-3).value("eps") == 1e-3
    assert settings().value("eps") == 1e-5
    assert settings(eps=None).value("eps") == 1e-5
    assert settings(width=8).value("inner") == 8
    assert settings(width=8, inner=6).value("inner") == 6
    assert settings(text={"eps": 1}).value("text.eps") == 1
    assert settings().value("other") is None
    assert settings().eps("") == 1e-5
    assert settings(inner_eps=1e-2).eps("inner_eps") == 1e-2
    assert settings(eps=1).eps(1e-6) == 1e-6
    assert settings().eps("inner_eps") is None
    with pytest.raises(ModelError, match=r"expected a number as eps in config.json, got 'small'"):
        settings(eps="small").eps("")
    assert settings(layers=3, blocks=5).count("layer") == 3
    assert settings(blocks=5).counts() == {"layer": 5}
    assert settings(blocks=5, experts=0).counts() == {"layer": 5, "expert": 0}
    assert settings(heads=None).number("heads", otherwise=4) == 4


def test_conditions_compare_values_and_only_ask_truths_for_their_truth():
    assert settings(count=2).holds({"count": 2, "bias": True})
    assert settings(count=2).holds({"count": [1, 2]})
    assert not settings(count=2).holds({"count": [1, 3]})
    assert settings(bound=0.5).holds({"bound": True})
    assert settings(bound=None).holds({"bound": False})
    assert settings().holds({})
    assert settings(bias=False).flag("bias") is False
    assert settings().flag("bias") is True
    assert settings().flag(False) is False


@pytest.mark.parametrize("value", [None, -1, 1.5, "3", True])
def test_what_is_no_count_is_an_error_that_names_the_key(value):
    with pytest.raises(ModelError, match=r"expected a whole number as layers in config.json, got"):
        settings(layers=value).count("layer")


def test_a_class_or_a_setting_that_the_file_does_not_describe_is_refused():
    settings(kind="fancy").require_described()
    with pytest.raises(ModelError, match=r"expected one of the classes ToyModel, .* got 'ToyForFun'"):
        Settings(FAMILY, {"architectures": ["ToyForFun"]}).require_described()
    with pytest.raises(ModelError, match=r"expected kind = 'plain' or 'fancy' in a toy model.* got 'odd'"):
        settings(kind="odd").require_described()
    with pytest.raises(ModelError, match=r"expected crossed = false .* got true"):
        settings(kind="plain", crossed=True).require_described()
