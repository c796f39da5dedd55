"""The declared norm classes are those of the census, whose answers are read from the source of each class."""

from __future__ import annotations

import sys
import tomllib

import pytest
import torch

from helpers import ROOT
from normkit.identification.behaviour import identify
from normkit.models import norm_classes
from normkit.models.family import declared_types

EXPECTED = ROOT / "census" / "expected.toml"
OF_A_MODULE = ("eps", "has_weight", "has_bias", "weight_offset", "weight_placement")


@pytest.mark.slow
def test_each_declared_class_is_what_the_census_read(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "census"))
    from definitions import find

    expected = tomllib.loads(EXPECTED.read_text())
    also, _ = expected.pop("also"), expected.pop("apart")
    cases = {entry["source"]: entry["cases"] for entry in expected.values()}
    definitions = {str(definition): definition for definition in find(also)}
    declared = {name: spec for name, spec in norm_classes.declared().items() if not name.startswith("torch.")}
    assert len(declared) > 200
    assert declared.keys() <= definitions.keys()
    for name, spec in declared.items():
        for case in cases[definitions[name].body]:
            read = {key: tuple(value) if isinstance(value, list) else value for key, value in case["spec"].items()}
            said = {key: value for key, value in spec.to_json().items() if key in read and key not in OF_A_MODULE}
            said = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
            assert said == {key: value for key, value in read.items() if key not in OF_A_MODULE}, name
            assert read.get("weight_offset", 0.0) == spec.weight_offset or not spec.has_weight, name
    sys.modules.pop("definitions", None)


@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_the_norms_of_torch(cls):
    spec = norm_classes.declared()[norm_classes.key_of(cls.__module__, cls.__name__)]
    assert identify(cls(16, eps=1e-5), 16).spec == spec.replace(eps=1e-5)


def test_names_of_classes_and_of_no_family():
    assert norm_classes.key_of("transformers.models.llama.modeling_llama", "LlamaRMSNorm") == "llama.LlamaRMSNorm"
    assert norm_classes.key_of("torch.nn.modules.normalization", "LayerNorm") == "torch.LayerNorm"
    assert norm_classes.key_of("mine", "Norm") == "mine.Norm"
    assert norm_classes.declared().get("mine.Norm") is None
    assert "norm_classes" not in declared_types()
