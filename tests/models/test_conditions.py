"""What a configuration says, and what it means where it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from normkit.errors import ModelError
from normkit.models.conditions import Settings
from normkit.models.family import parse

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


def test_what_is_set_counts_before_what_a_missing_key_means():
    assert settings(eps=1e-3).value("eps") == 1e-3
    assert settings().value("eps") == 1e-5
    assert settings(eps=None).value("eps") == 1e-5
    assert settings(width=8).value("inner") == 8
    assert settings(width=8, inner=6).value("inner") == 6
    assert settings(text={"eps": 1}).value("text.eps") == 1
    assert settings().value("other") is None


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


def test_eps_is_the_norms_own_or_the_familys():
    assert settings().eps("") == 1e-5
    assert settings(inner_eps=1e-2).eps("inner_eps") == 1e-2
    assert settings(eps=1).eps(1e-6) == 1e-6
    assert settings().eps("inner_eps") is None
    with pytest.raises(ModelError, match=r"expected a number as eps in config.json, got 'small'"):
        settings(eps="small").eps("")


def test_placeholders_are_counted_by_the_first_key_that_is_set():
    assert settings(layers=3, blocks=5).count("layer") == 3
    assert settings(blocks=5).counts() == {"layer": 5}
    assert settings(blocks=5, experts=0).counts() == {"layer": 5, "expert": 0}
    assert settings(heads=None).number("heads", otherwise=4) == 4


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
