"""The gains and biases of a port against its reference's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normkit.comparison.causes import causes_of
from normkit.comparison.differences import Comparison, Conventions, Level, Unmatched
from normkit.comparison.values import Values, compare_values
from normkit.comparison.weights import weights_of
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


def test_of_matrices_a_few_rows_are_read() -> None:
    class Recorder:
        def __init__(self, tensors: dict[str, Tensor]) -> None:
            self.inner = weights_of(tensors).source
            self.tensors, self.read = self.inner.tensors, dict[str, int]()

        def rows(self, name: str, start: int, stop: int) -> Tensor:
            self.read[name] = self.read.get(name, 0) + stop - start
            return self.inner.rows(name, start, stop)

    tensors = gains() | {"model.embed_tokens.weight": torch.randn(700, 96)}
    weights = [replace(weights_of(tensors), source=Recorder(tensors)) for _ in range(2)]
    compare_values(*weights)
    for each in weights:
        assert isinstance(each.source, Recorder)
        assert each.source.read == {name: 1 if "norm" in name else 16 for name in tensors}


@pytest.mark.parametrize(("value", "is_right"), [(0.0, True), (0.5, False)])
def test_a_bias_of_zeros_need_not_be_there(value: float, is_right: bool) -> None:
    reference = {**gains(), "model.norm.bias": torch.full((96,), value)}
    found = compared(gains(), reference)
    assert found.is_right is is_right
    assert found.missing == (() if is_right else ("model.norm.bias",))
    assert len(found.notes) == is_right


def causes(port: dict[str, Tensor], *, form: str = "folder", unmatched: tuple[str, ...] = (), run: bool = True) -> str:
    """The sentences on the port against plain gains."""
    none: dict[Level, str] = {} if run else {"conventions": "nothing runs it", "rows": "nothing runs it"}
    alone = tuple(Unmatched(path=path, owner="port", class_name="N") for path in unmatched)
    found = Comparison(
        port="port",
        reference="reference",
        forms=(form, "folder"),
        values=compared(port),
        conventions=Conventions(unmatched=alone),
        not_looked_at=none,
    )
    assert found.differs == bool(found.causes)
    return " ".join(each.sentence for each in causes_of(found))


def test_a_norm_that_only_the_port_has_is_a_difference() -> None:
    name = "model.layers.1.self_attn.q_norm"
    port = gains() | {f"{name}.weight": torch.ones(96)}
    found = compared(port)
    assert (found.extra, found.is_right) == ((f"{name}.weight",), False)
    words = f"{name}.weight is only in the port: the reference has no such norm"
    assert causes(port) == f"{words}; the port's class does not use it."
    assert causes(port, unmatched=(name,)) == f"{words}; the port's class uses it."
    assert causes(port, run=False) == causes(port, form="GGUF file") == f"{words}."


def test_a_bias_that_only_the_port_has_is_a_difference_unless_it_is_zero() -> None:
    for value, is_right in ((0.0, True), (0.5, False)):
        port = {**gains(), "model.norm.bias": torch.full((96,), value)}
        assert compared(port).is_right is is_right
        words = "model.norm.bias is only in the port: the reference has no such gain or bias."
        assert causes(port) == ("" if is_right else words)


def test_what_no_name_calls_a_norm_is_only_noted() -> None:
    found = compared({**gains(), "model.mixer.strange.weight": torch.randn(96)})
    assert (found.extra, found.is_right) == ((), True)
    assert found.notes == ("model.mixer.strange.weight: only in the port; no name says that it is a norm",)


@pytest.mark.parametrize("size", [16, 96])
@pytest.mark.parametrize(
    ("runtime", "architecture", "is_right"),
    [
        *[("llama.cpp", "qwen3", False), ("MLX", "qwen3", False), ("transformers", "qwen3", False)],
        *[("llama.cpp", "chameleon", None), ("", "", None), ("TensorRT-LLM", "", None)],
    ],
)
def test_gains_in_another_order_are_wrong_where_the_runtime_keeps_it(
    runtime: str, architecture: str, is_right: bool | None, size: int
) -> None:
    name, drawing = "model.layers.0.self_attn.q_norm.weight", torch.Generator().manual_seed(1)
    reference = gains() | {name: 1 + 0.3 * torch.randn(size, generator=drawing)}
    port = reference | {name: reference[name].reshape(2, -1).T.reshape(-1)}
    ours = replace(weights_of(port), runtime=runtime, architecture=architecture)
    theirs = replace(weights_of(reference), runtime="transformers", architecture="qwen3")
    found = next(each for each in compare_values(ours, theirs).tensors if each.name == name)
    assert found.relation.words == f"reference in another order (rotary halves of {size} interleaved)"
    assert found.is_right is is_right
    assert (found.verdict == f"wrong: {runtime} reads them in the reference's order") == (is_right is False)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_gains_rounded_to_eight_bits_are_named(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    port = {key: each.to(dtype).bfloat16() if "norm" in key else each for key, each in gains().items()}
    ours, theirs = (replace(weights_of(each), runtime="transformers", architecture="llama") for each in (port, gains()))
    found = compare_values(ours, theirs)
    assert [(group.words, group.is_right) for group in found.groups] == [(f"equal, rounded to {name}", False)]
    near = {key: (each.double() * (1 + 0.05 * torch.rand(96))) for key, each in gains().items() if "norm" in key}
    assert {each.relation.kind for each in compared(near).tensors} == {"different"}
