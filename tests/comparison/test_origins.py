"""Gains that are another norm's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normkit.comparison.origins import place_of
from normkit.comparison.values import Values, compare_values
from normkit.comparison.weights import weights_of
from planted_gains import gains


def found(port: dict[str, Tensor], *, runtime: str = "") -> Values:
    reference = replace(weights_of(gains(4)), runtime=runtime, architecture="gemma3_text" if runtime else "")
    return compare_values(replace(weights_of(port), runtime=runtime and "llama.cpp"), reference)


def words(values: Values) -> list[tuple[str, str]]:
    return [(group.title, group.words) for group in values.groups if not group.is_right]


def name(layer: int, norm: str = "input_layernorm") -> str:
    return f"model.layers.{layer}.{norm}.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_two_swapped_gains_name_each_other(dtype: torch.dtype, constant: float) -> None:
    # Computed in float64 and rounded once, as the search expects.
    port = {key: (value.double() + constant).to(dtype) for key, value in gains(4).items()}
    port[name(1)], port[name(2, "mlp_norm")] = port[name(2, "mlp_norm")], port[name(1)]
    values = found(port, runtime="transformers" if constant else "")
    swapped = {each.name: each.relation for each in values.tensors if each.relation.kind == "swapped"}
    assert {key: each.other for key, each in swapped.items()} == {
        name(1): "model.layers.2.mlp_norm",
        name(2, "mlp_norm"): "model.layers.1.input_layernorm",
    }
    assert {each.constant for each in swapped.values()} == {constant or None}
    assert values.is_right is False


def test_layers_shifted_by_one_are_one_finding() -> None:
    reference = gains(4)
    port = reference | {name(layer): reference[name(layer + 1)] for layer in range(3)}
    assert words(found(port)) == [("3 gains of input_layernorm", "a copy of that of the next layer")]


def test_norms_swapped_within_each_layer_are_one_finding() -> None:
    reference = gains(4)
    port = dict(reference)
    for layer in range(4):
        port[name(layer)], port[name(layer, "mlp_norm")] = reference[name(layer, "mlp_norm")], reference[name(layer)]
    assert words(found(port)) == [
        ("4 gains of input_layernorm", "swapped with mlp_norm of the same layer"),
        ("4 gains of mlp_norm", "swapped with input_layernorm of the same layer"),
    ]


def test_a_copy_from_another_norm_is_named() -> None:
    port = gains(4) | {"model.norm.weight": gains(4)[name(0)]}
    assert words(found(port)) == [("model.norm.weight", "a copy of that of model.layers.0.input_layernorm")]


def test_a_gain_of_no_norm_is_only_different() -> None:
    port = gains(4) | {"model.norm.weight": 1 + 0.3 * torch.randn(96, generator=torch.Generator().manual_seed(9))}
    assert [title for title, _ in words(found(port))] == ["model.norm.weight"]
    assert found(port).tensors[-1].relation.kind == "different"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("h.4.ln", "the next layer"),
        ("h.2.ln", "the layer before"),
        ("h.6.ln", "3 layers further"),
        ("h.3.ln_2", "ln_2 of the same layer"),
        ("h.5.ln_2", "h.5.ln_2"),
        ("ln_f", "ln_f"),
    ],
)
def test_places_in_words(other: str, words: str) -> None:
    assert place_of("h.3.ln", other) == words
