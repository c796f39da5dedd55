"""The architecture that a GGUF file names, against the reference's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from normkit.comparison.gguf_metadata import faults_of, own_architecture
from normkit.comparison.weight_sources import weights_of
from normkit.comparison.weights import Weights

pytest.importorskip("gguf")


def of(runtime: str, architecture: str, model_type: str = "") -> Weights:
    settings = {"model_type": model_type} if model_type else {}
    return replace(weights_of({}), runtime=runtime, architecture=architecture, settings=settings, eps={"": 1e-6})


def told(architecture: str, model_type: str, runtime: str = "llama.cpp") -> list[str]:
    found = faults_of(of(runtime, architecture), of("transformers", model_type, model_type))
    return [f"{each.label} {each.words}" for each in found]


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        *[("gemma3", "gemma3_text"), ("gemma3", "gemma3"), ("gemma-embedding", "gemma3_text"), ("llama", "mistral")],
        *[("llama", "smollm2"), ("gptneox", "gpt_neox"), ("phi2", "phi"), ("qwen3next", "qwen3_next")],
        *[
            ("clip", "gemma3"),
            ("llama", "mistral3"),
            ("t5encoder", "t5"),
            ("jina-bert-v2", "bert"),
            ("bert", "roberta"),
        ],
        *[("llama", ""), ("", "gemma3")],
    ],
)
def test_an_architecture_that_the_converter_writes_is_right(architecture: str, model_type: str) -> None:
    assert told(architecture, model_type) == []


def test_another_architecture_is_a_fault_and_what_follows_is_said_where_it_is_known() -> None:
    computes = "llama.cpp computes what it computes for"
    assert told("llama", "gemma3_text") == [
        f"architecture llama instead of gemma3; {computes} llama: no scale of the embeddings, SiLU in place of GELU"
    ]
    assert told("llama", "qwen3") == [f"architecture llama instead of qwen3; {computes} llama"]
    assert told("gemma3", "qwen3", runtime="transformers") == []


def test_names_of_transformers_that_llama_cpp_has_too() -> None:
    named = {kind: found for kind in CONFIG_MAPPING if (found := own_architecture(kind))}
    assert {"llama", "gemma", "gemma2", "gpt2", "qwen2", "qwen3", "phi3", "olmo2", "t5", "bloom"} <= {*named}
    assert all(
        found.replace("-", "").replace("_", "")[:3] == kind.replace("_", "")[:3] for kind, found in named.items()
    )
