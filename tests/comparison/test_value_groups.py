"""Gains that are another norm's, and layers in another order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normkit.comparison.causes import causes_of
from normkit.comparison.differences import Comparison
from normkit.comparison.value_groups import place_of
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


KINDS = ("input_layernorm", "mlp_norm")


def placed(order: list[int], kinds: tuple[str, ...] = KINDS) -> dict[str, Tensor]:
    """The norms of these kinds, layer i with those of layer order[i]."""
    reference = gains(len(order))
    return reference | {
        f"model.layers.{layer}.{kind}.weight": reference[f"model.layers.{other}.{kind}.weight"]
        for layer, other in enumerate(order)
        for kind in kinds
    }


def compared(port: dict[str, Tensor], layers: int, without: str = " ") -> Values:
    """The port against gains of as many layers; of both, norms with a word in their names are left out."""
    both = ({name: each for name, each in held.items() if without not in name} for held in (port, gains(layers)))
    return compare_values(*map(weights_of, both))


def sentences(values: Values) -> list[str]:
    found = Comparison(port="port", reference="reference", forms=("arrays", "arrays"), values=values)
    return [each.sentence for each in causes_of(found)]


TEXT = [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (TEXT, "0, 1, 10, 11, 2, 3 and 6 more: sorted as text"),
        ([3, 2, 1, 0], "3, 2, 1, 0: reversed"),
        ([1, 2, 3, 0], "1, 2, 3, 0"),
        ([0, 2, 1, 3], "0, 2, 1, 3"),
    ],
)
def test_the_order_of_the_layers_is_one_cause(order: list[int], words: str) -> None:
    values = compared(placed(order), len(order))
    assert sentences(values) == [f"The layers stand in the order {words}."]
    assert values.is_right is False
    moved = [layer for layer, other in enumerate(order) if layer != other]
    assert [len(group.names) for group in values.groups if group.is_right is False] == [2 * len(moved)]
    for each in values.tensors:
        layer = each.reference_path.split(".")[2] if "layers" in each.reference_path else ""
        if layer and int(layer) in moved:
            assert each.relation.other == each.reference_path.replace(f".{layer}.", f".{order[int(layer)]}.")


def test_one_kind_of_norms_alone_does_not_tell_of_layers() -> None:
    values = compared(placed(TEXT, KINDS[:1]), 12)
    assert not any("layers stand" in sentence for sentence in sentences(values))


def test_layers_of_one_norm_each_tell_of_their_order() -> None:
    values = compared(placed(TEXT, KINDS[:1]), 12, without="mlp_norm")
    assert sentences(values) == ["The layers stand in the order 0, 1, 10, 11, 2, 3 and 6 more: sorted as text."]


def test_a_layer_that_is_there_twice_is_no_order() -> None:
    values = compared(placed([0, 1, 1, 3]), 4)
    words = "2 gains of input_layernorm and mlp_norm hold copies of those of other norms, the layer before."
    assert sentences(values) == [words]


def test_another_offset_is_told_beside_the_order() -> None:
    port = {name: each.float() + (1 if "norm" in name else 0) for name, each in placed([1, 0, 3, 2]).items()}
    assert "The layers stand in the order 1, 0, 3, 2." in sentences(compared(port, 4))
