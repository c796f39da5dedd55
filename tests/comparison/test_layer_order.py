"""Layers in another order are one finding, and nothing else is taken for it."""

from __future__ import annotations

import pytest
from torch import Tensor

from normkit.comparison.causes import causes_of
from normkit.comparison.differences import Comparison
from normkit.comparison.values import Values, compare_values
from normkit.comparison.weights import weights_of
from planted_gains import gains

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
