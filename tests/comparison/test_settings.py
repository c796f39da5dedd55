"""Settings of two models: planted differences in config.json and in the metadata of a GGUF."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from normkit.comparison.comparing import compare_sides
from normkit.comparison.metadata import compare_metadata
from normkit.comparison.settings import compare_settings
from normkit.comparison.sides import open_side
from normkit.comparison.weights import Weights, weights_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}
GGUF = {"general.architecture": "llama", "llama.attention.head_count": 4, "llama.rope.freq_base": 500000.0}


def of(settings: dict[str, Any], runtime: str = "transformers", **tensors: torch.Tensor) -> Weights:
    architecture = settings.get("model_type", settings.get("general.architecture", ""))
    made = weights_of({name.replace("__", "."): each for name, each in tensors.items()}, name=runtime or "arrays")
    return replace(made, runtime=runtime, settings=settings, architecture=architecture)


def words(port: Weights, reference: Weights) -> list[str]:
    return [each.words for each in compare_settings(port, reference) if each.computes]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu instead of silu"),
        ({"num_attention_heads": 8, "head_dim": 16}, "num_attention_heads is 8 instead of 4"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_parameters.rope_theta is 10000 instead of 500000"),
        (
            {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 8.0}},
            "rope_parameters.rope_type is linear instead of default",
        ),
    ],
)
def test_a_setting_that_computes_something_else_is_a_difference(change: dict[str, Any], expected: str) -> None:
    port, reference = of({**LLAMA, **change}), of(LLAMA)
    assert words(port, reference) == [expected]
    assert compare_metadata(port, reference, []).differs


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_version": "4.57.0", "dtype": "float16", "_name_or_path": "x", "use_cache": False},
        {"eos_token_id": 7, "quantization_config": {"bits": 4}, "attention_dropout": 0.1},
        {"hidden_act": "swish", "num_key_value_heads": None, "head_dim": 16},
        {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
    ],
)
def test_what_computes_the_same_is_no_difference(change: dict[str, Any]) -> None:
    reference = of({**LLAMA, "transformers_version": "5.1.0", "use_cache": True, "eos_token_id": 2})
    assert words(of({**LLAMA, **change}), reference) == []


def test_an_unknown_key_is_a_note() -> None:
    found = compare_metadata(of({**LLAMA, "frobnication": 1}), of({**LLAMA, "frobnication": 2}), [])
    assert [(each.words, each.computes) for each in found.settings] == [("frobnication is 1 instead of 2", False)]
    assert not found.differs


def test_what_transformers_4_wrote_is_read_as_what_5_writes() -> None:
    before = {key: value for key, value in LLAMA.items() if key != "rope_parameters"} | {"rope_scaling": None}
    assert words(of({**before, "rope_theta": 500000.0}), of(LLAMA)) == []
    assert words(of(LLAMA), of({**before, "rope_theta": 10000.0})) == ["rope_theta is 500000 instead of 10000"]
    scaled = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert words(of(LLAMA), of({**before, **scaled})) == ["rope_parameters.rope_type is default instead of linear"]
    [note] = compare_settings(of(LLAMA), of({**before, "rope_theta": 500000.0}))
    assert not note.computes
    assert note.words.startswith("rope_theta is below rope_parameters instead of at the top of config.json: ")


def test_both_bases_of_gemma_3() -> None:
    before = {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    after = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 20000.0}}
    found = words(of(before), of({"model_type": "gemma3_text", "rope_parameters": after}))
    assert found == ["rope_parameters.sliding_attention.rope_theta is 10000 instead of 20000"]


def test_a_base_that_mlx_does_not_find() -> None:
    [found] = compare_settings(of(LLAMA, "MLX"), of(LLAMA))
    assert found.words.startswith("rope_parameters.rope_theta is 10000 instead of 500000: config.json has it below")
    assert words(of({**LLAMA, "rope_theta": 500000.0}, "MLX"), of(LLAMA)) == []


def test_gguf_against_a_folder() -> None:
    assert words(of(GGUF, "llama.cpp"), of(LLAMA)) == []
    other = {**GGUF, "llama.rope.freq_base": 10000.0, "llama.attention.head_count": 8}
    assert words(of(other, "llama.cpp"), of(LLAMA)) == [
        "num_attention_heads is 8 instead of 4",
        "rope_parameters.rope_theta is 10000 instead of 500000",
    ]
    lost = {key: value for key, value in GGUF.items() if "freq_base" not in key}
    [found] = compare_settings(of(lost, "llama.cpp"), of(LLAMA))
    assert found.reason == "the file states no rope.freq_base, and llama.cpp takes this"


@pytest.mark.parametrize(
    ("more", "stated"),
    [
        ({"attention.sliding_window": 0}, {"sliding_window": None}),
        ({"attention.key_length": 32, "attention.key_length_swa": 16}, {"head_dim": 16}),
        ({"attention.head_count_kv": 1}, {"num_key_value_heads": 4, "kv_lora_rank": 8}),
        ({"attention.head_count_kv": [1, 2]}, {"num_key_value_heads": 2}),
        ({"rope.scaling.type": "none", "attention.scale": 0.015625}, {"attention_multiplier": 0.015625}),
    ],
)
def test_what_llama_cpp_writes_in_its_own_way(more: dict[str, Any], stated: dict[str, Any]) -> None:
    port = of({**GGUF, **{f"llama.{key}": value for key, value in more.items()}}, "llama.cpp")
    assert words(port, of({**LLAMA, **stated})) == []


def test_what_is_none_is_off_or_the_default() -> None:
    port = of({**LLAMA, "use_bidirectional_attention": None, "hidden_activation": "gelu_pytorch_tanh"})
    assert words(port, of({**LLAMA, "use_bidirectional_attention": False, "hidden_activation": None})) == []
    assert words(of({**LLAMA, "sliding_window": None}), of({**LLAMA, "sliding_window": 512})) == [
        "sliding_window is none instead of 512"
    ]


def test_a_head_of_its_own_that_holds_the_embedding_is_tied() -> None:
    embedding = torch.randn(8, 64)
    tied = of(LLAMA, model__embed_tokens__weight=embedding)
    untied = {**LLAMA, "tie_word_embeddings": False}
    same = of(untied, model__embed_tokens__weight=embedding, lm_head__weight=embedding.clone())
    assert words(same, tied) == []
    for port in (
        of(untied, model__embed_tokens__weight=embedding),
        of(untied, model__embed_tokens__weight=embedding, lm_head__weight=embedding + 1),
    ):
        assert words(port, tied) == ["tie_word_embeddings is false instead of true"]


def test_a_setting_is_the_cause() -> None:
    gains = {"norm.weight": torch.randn(64)}
    sides = [
        replace(open_side(gains), weights=replace(of(each), source=weights_of(gains).source))
        for each in ({**LLAMA, "rope_parameters": {"rope_theta": 10000.0}}, LLAMA)
    ]
    found = compare_sides(sides[0], sides[1], progress=lambda *_: None)
    [cause] = found.causes
    assert cause.level == "metadata"
    assert cause.sentence == "rope_parameters.rope_theta is 10000 instead of 500000 (config.json)."
    assert cause.remedy == "write rope_parameters.rope_theta 500000 into the config.json of port"
