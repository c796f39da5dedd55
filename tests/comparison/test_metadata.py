"""eps and architecture of two sides, and what a class uses whatever its configuration states."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from normkit.comparison.metadata import (
    Metadata,
    compare_metadata,
    eps_as_declared,
    eps_of_classes,
    is_same,
    metadata_facts,
)
from normkit.comparison.weights import Weights, eps_of_module, weights_of
from normkit.errors import ModelError
from tiny_models import RECIPES, tiny

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "vocab_size": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}


def weights(eps: dict[str, float], *, runtime: str = "", settings: dict[str, Any] | None = None) -> Weights:
    return replace(weights_of({}, name="file"), eps=eps, runtime=runtime, settings=settings or {})


def told(found: Metadata) -> list[str]:
    return [f"{each.tone} {each.label} {each.value}" for each in metadata_facts(found)]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1e-6, 9.999999974752427e-07, True),
        (1e-5, 1e-6, False),
        (1e-6, 1.001e-6, False),
        (0.0, 0.0, True),
        (None, 1e-6, None),
    ],
)
def test_eps_of_formats_with_fewer_digits_are_the_same(one: float | None, other: float, same: bool | None) -> None:
    assert is_same(one, other) is same


def test_each_norm_has_its_own_eps_or_that_of_all() -> None:
    found = compare_metadata(
        weights({"": 1e-6, "b": 1e-5}), weights({"": 1e-6}), [("a", "x.a"), ("b", "x.b"), ("b", "x.b")]
    )
    assert [(each.path, each.stored, each.is_same) for each in found.eps] == [("a", 1e-6, True), ("b", 1e-5, False)]
    assert found.differs
    json.dumps(found.to_json(), allow_nan=False)
    assert told(found) == ["error eps 1e-05 instead of 1e-06 at b", "good eps 1e-06 at a"]


def test_an_eps_that_one_side_lacks_is_undecided() -> None:
    found = compare_metadata(weights({}), weights({"": 1e-6}), [("a", "a")])
    assert (found.eps[0].is_same, found.differs) == (None, False)
    assert told(found) == ["note eps none against 1e-06 at a: one side states none"]


@pytest.mark.slow
def test_a_class_that_ignores_its_configuration_is_compared_as_it_computes() -> None:
    used = eps_of_classes(DEEPSEEK, "folder")
    latent = [path for path in used if path.endswith(("q_a_layernorm", "kv_a_layernorm"))]
    assert {used[path] for path in latent} == {1e-6}
    assert {eps for path, eps in used.items() if path not in latent} == {1e-5}
    reference = weights({"": 1e-5}, runtime="transformers", settings=DEEPSEEK)
    port = weights({"": 1e-5}, runtime="vLLM")
    pairs = [(path.removeprefix("model."), path) for path in used]
    found = compare_metadata(port, reference, pairs)
    assert {each.reference_path for each in found.eps if each.is_same is False} == {*latent}
    assert [each for each in told(found) if " class " in each] == [
        "note class file states eps 1e-05, its class uses 1e-06 at 4 norms: kv_a_layernorm, q_a_layernorm"
    ]


@pytest.mark.slow
def test_a_module_uses_its_own_eps_whatever_its_class_would() -> None:
    paths = ["model.layers.0.q_a_layernorm", "model.layers.0.input_layernorm"]
    port = weights(dict.fromkeys(paths, 1e-4), runtime="transformers", settings=DEEPSEEK)
    reference = weights({"": 1e-5}, runtime="vLLM")
    found = compare_metadata(port, reference, [(path, path) for path in paths])
    assert told(found) == ["error eps 0.0001 instead of 1e-05 at all 2 norms"]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["deepseek_v3", "llama", "gemma2", "gpt2", *sorted(RECIPES)])
def test_a_family_s_file_states_the_eps_that_its_class_uses(family: str) -> None:
    model = tiny(family, eps=3e-4)[0]
    made = weights_of(model)
    declared, used = eps_as_declared(made), eps_of_classes(made.settings, family)
    assert declared
    pairs = {path: used[path] for path in declared if path in used}
    # Only the classes' own path may be shorter or longer than the checkpoint's.
    assert pairs == {path: declared[path] for path in pairs}
    # No spec describes a gated norm, so that its class is in no list; OLMo has its eps in its code alone.
    others = {path: eps_of_module(model.get_submodule(path)) for path in declared.keys() - used.keys() if used}
    assert others == {path: declared[path] for path in others}
    assert all("Gated" in type(model.get_submodule(path)).__name__ for path in others)


@pytest.mark.parametrize(
    "settings",
    [{"model_type": "llama"}, {"model_type": "no_such", "architectures": ["X"]}, {"model_type": 3, "architectures": 4}],
)
def test_a_class_that_transformers_lacks_is_a_note(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        eps_of_classes(settings, "folder")
    found = compare_metadata(
        weights({"": 1e-6}), weights({"": 1e-6}, runtime="transformers", settings=settings), [("a", "a")]
    )
    assert len(found.notes) == 1
    assert found.eps[0].is_same is True


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rms_norm_eps": 1e-6}, "llama.attention.layer_norm_rms_epsilon"),
        ({"layer_norm_eps": 1e-6}, "llama.attention.layer_norm_epsilon"),
        ({}, "llama.attention.layer_norm_rms_epsilon or llama.attention.layer_norm_epsilon"),
    ],
)
def test_a_gguf_file_without_eps_is_refused_by_llama_cpp(settings: dict[str, Any], key: str) -> None:
    port = replace(weights({}, runtime="llama.cpp"), architecture="llama")
    found = compare_metadata(port, weights({"": 1e-6}, settings=settings), [("a", "a")])
    words = f"none; llama.cpp refuses a file without {key}"
    assert found.differs
    assert [(each.label, each.words) for each in found.faults] == [("eps", words)]
    assert told(found) == [f"error eps {words}"]
    json.dumps(found.to_json(), allow_nan=False)
