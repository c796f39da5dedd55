"""The gains and biases of a port against its reference's."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from normkit.comparison.values import Values, compare_values
from normkit.comparison.weight_sources import weights_of
from planted_gains import gains


def compared(port: dict[str, Tensor], reference: dict[str, Tensor] | None = None) -> Values:
    return compare_values(weights_of(port), weights_of(gains() if reference is None else reference))


def test_a_copy_is_equal_under_any_prefix() -> None:
    found = compared({f"language_model.{name}": value for name, value in gains().items()})
    assert [(group.title, group.words, group.is_right) for group in found.groups] == [("all 7 gains", "equal", True)]
    assert found.is_right is True
    json.dumps(found.to_json(), allow_nan=False)


def test_groups_are_told_apart_and_the_wrong_come_first() -> None:
    port = gains()
    for layer in range(3):
        port[f"model.layers.{layer}.mlp_norm.weight"] += 2
    found = compared(port)
    assert [(group.title, group.words) for group in found.groups] == [
        ("3 gains of mlp_norm", "reference + 2, rounded to bfloat16"),
        ("4 gains of input_layernorm and norm", "equal"),
    ]
    assert found.is_right is False


def test_missing_and_extra_norms_are_named() -> None:
    port = gains()
    port["model.other_norm.weight"] = port.pop("model.norm.weight")[:7]
    found = compared(port)
    assert (found.missing, found.extra) == (("model.norm.weight",), ("model.other_norm.weight",))
    assert found.is_right is False


def test_another_size_is_different() -> None:
    found = compared({**gains(), "model.norm.weight": torch.ones(5)})
    assert found.groups[0].title == "model.norm.weight"
    assert found.tensors[-1].relation.reason == "it has 5 numbers, the reference 96"


def test_only_vectors_are_read() -> None:
    class Recorder:
        def __init__(self, tensors: dict[str, Tensor]) -> None:
            self.inner = weights_of(tensors).source
            self.tensors, self.read = self.inner.tensors, set[str]()

        def rows(self, name: str, start: int, stop: int) -> Tensor:
            self.read.add(name)
            return self.inner.rows(name, start, stop)

    import dataclasses

    weights = [dataclasses.replace(weights_of(gains()), source=Recorder(gains())) for _ in range(2)]
    compare_values(*weights)
    for each in weights:
        assert isinstance(each.source, Recorder)
        assert each.source.read == {name for name in gains() if "norm" in name}


@pytest.mark.parametrize(("value", "is_right"), [(0.0, True), (0.5, False)])
def test_a_bias_of_zeros_need_not_be_there(value: float, is_right: bool) -> None:
    reference = {**gains(), "model.norm.bias": torch.full((96,), value)}
    found = compared(gains(), reference)
    assert found.is_right is is_right
    assert found.missing == (() if is_right else ("model.norm.bias",))
    assert len(found.notes) == is_right
