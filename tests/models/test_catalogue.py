"""The files of the families: each is read, and says of transformers' configurations what transformers says."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from normkit.errors import ModelError
from normkit.models import catalogue
from tiny_models import RECIPES, configuration, tiny

EVERY = catalogue.names()


def config_class(model_type: str) -> Any:
    """The class that a config.json of this model_type is read by."""
    return type(transformers.AutoConfig.for_model(model_type))


def recipes_of(model_type: str) -> list[str]:
    """The recipes of models of a family."""
    return [name for name, recipe in RECIPES.items() if configuration(recipe).model_type == model_type]


def test_names_are_the_model_types_of_the_files():
    assert tuple(sorted(EVERY)) == EVERY
    assert [catalogue.family(name).model_type for name in EVERY] == list(EVERY)


def test_an_unknown_family_is_an_error_that_names_those_that_are():
    with pytest.raises(ModelError, match=r"got model_type 'lama'.* declared are bert, bloom, .*, whisper$"):
        catalogue.family("lama")
    with pytest.raises(ModelError, match="declared are bert, "):
        catalogue.family("")


@pytest.mark.parametrize("name", EVERY)
def test_its_classes_are_classes_of_transformers_for_this_configuration(name):
    family = catalogue.family(name)
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
    family, config = catalogue.family(name), config_class(name)
    taken = config()
    for key, default in family.config.default.items():
        if isinstance(default, str) and default.startswith("="):
            # Another name, or the value of another key: whatever that one is set to. Falcon's sizes allow few numbers.
            assert getattr(config(**{default[1:]: 142}), key) == 142, key
        elif getattr(taken, key, None) is not None:
            assert getattr(taken, key) == default, key
        else:
            # The configuration leaves it open, so the code of the model decides: as with the default.
            assert _leaves_open(name, key, default), key


def _leaves_open(name: str, key: str, default: Any) -> bool:
    """Whether models without the key and with this value for it have the same tensors, and with another have not."""
    family, matters = catalogue.family(name), False
    for recipe in recipes_of(name):
        for class_name in family.classes:
            without = tiny(recipe, class_name=class_name)[0]
            if getattr(without.config, key, default) != default:
                continue
            with_default = tiny(recipe, class_name=class_name, **{key: default})[0]
            if without.state_dict().keys() != with_default.state_dict().keys():
                return False
            if isinstance(default, bool):
                other = tiny(recipe, class_name=class_name, **{key: not default})[0]
                matters |= other.state_dict().keys() != without.state_dict().keys()
    return matters or not isinstance(default, bool)


@pytest.mark.parametrize("name", EVERY)
def test_every_key_that_a_file_reads_is_one_of_the_configuration(name):
    family = catalogue.family(name)
    known = vars(config_class(name)()) | config_class(name).attribute_map
    conditions = [family.requires, *(part.when for part in family.parts)]
    entries = [entry for part in family.parts for section in (part.norm, part.linear) for entry in section.values()]
    read = {family.config.width, family.config.eps, family.config.heads, *family.config.dropout}
    read |= {key for condition in conditions for key in condition}
    read |= {entry.bias for entry in entries if isinstance(entry.bias, str)}
    for key in read - {""} - set(family.config.default):
        assert key in known, key
    for word, keys in family.repeat.items():
        assert keys[0] in known or config_class(name).attribute_map, word


@pytest.mark.parametrize("name", EVERY)
def test_the_rates_of_dropout_are_all_named(name):
    config = config_class(name)()
    rates = {
        key
        for key, value in vars(config).items()
        if ("drop" in key or key.endswith("_jitter_noise"))
        and isinstance(value, int | float)
        and key != "classifier_dropout"
    }
    assert rates <= set(catalogue.family(name).config.dropout) | {"summary_first_dropout"}
