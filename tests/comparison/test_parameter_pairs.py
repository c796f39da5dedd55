"""Which norm of one file stands for which of another: by names, and by values where names do not tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normkit.comparison.parameter_pairs import kind_of, pair_norms
from normkit.comparison.parameters import NormTensors
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of


def norm(path: str, size: int = 8) -> NormTensors:
    return NormTensors(path=path, weight=f"{path}.weight", bias=None, shape=(size,), is_named=True)


def pairs(port: list[str], reference: list[str], related: dict[str, str] | None = None, **names: object) -> list[tuple]:  # type: ignore[type-arg]
    found = pair_norms(
        [norm(path) for path in port],
        [norm(path) for path in reference],
        lambda one, other: (related or {}).get(kind_of(one.path)) == kind_of(other.path),
        **names,  # type: ignore[arg-type]
    )
    return [(each.norm.path, each.reference.path, each.paired_by) for each in found]


LAYERS = [f"model.layers.{layer}.{name}" for layer in range(3) for name in ("input_layernorm", "post_layernorm")]


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "module."])
def test_prefixes_do_not_matter(prefix: str) -> None:
    port = [path.replace("model.", prefix, 1) for path in [*LAYERS, "model.norm"]]
    assert pairs(port, [*LAYERS, "model.norm"]) == [
        (one, other, "name") for one, other in zip(port, [*LAYERS, "model.norm"], strict=True)
    ]


def test_two_models_in_one_file_are_told_apart() -> None:
    port = ["vision_tower.layers.0.norm", "language_model.layers.0.norm", "vision_tower.norm"]
    assert pairs(port, ["model.norm"]) == []
    reference = "language_model.model.layers.0.norm"
    assert pairs(port[:2], [reference])[0][:2] == (
        port[1],
        "language_model.model.layers.0.norm",
    )


def test_the_runtime_s_table_of_names() -> None:
    table = {"blk.0.attn_norm.weight": ("h.0.ln_1.weight", "model.layers.0.input_layernorm.weight")}
    found = pairs(["blk.0.attn_norm"], LAYERS, names=table)
    assert found == [("blk.0.attn_norm", "model.layers.0.input_layernorm", "table of names")]
    assert pairs(LAYERS, ["blk.0.attn_norm"], reference_names=table) == [
        ("model.layers.0.input_layernorm", "blk.0.attn_norm", "table of names")
    ]
    assert pairs(["blk.0.attn_norm"], ["blk.0.attn_norm"], names=table, reference_names=table)[0][2] == "name"


def test_other_words_are_paired_by_values() -> None:
    port = [f"h.{layer}.{name}" for layer in range(3) for name in ("a", "b")]
    related = {"h.*.b": "model.layers.*.input_layernorm", "h.*.a": "model.layers.*.post_layernorm"}
    found = pairs(port, LAYERS, related)
    assert {(one.rpartition(".")[2], other.rpartition(".")[2], by) for one, other, by in found} == {
        ("b", "input_layernorm", "values"),
        ("a", "post_layernorm", "values"),
    }
    assert all(one.split(".")[1] == other.split(".")[2] for one, other, _ in found)


def test_unrelated_values_are_paired_by_size_or_order() -> None:
    port = [f"h.{layer}.{name}" for layer in range(3) for name in ("ln_2", "ln_1")]
    found = pairs(port, LAYERS)
    assert {(one.rpartition(".")[2], other.rpartition(".")[2], by) for one, other, by in found} == {
        ("ln_1", "input_layernorm", "order"),
        ("ln_2", "post_layernorm", "order"),
    }
    assert pairs(["ln_f"], ["model.norm"]) == [("ln_f", "model.norm", "size")]


def test_another_number_of_norms_is_not_paired_by_order() -> None:
    assert pairs(["a", "b"], ["model.norm"]) == []


def test_layers_counted_from_one_are_paired_in_turn() -> None:
    port = [f"block_{layer}.norm" for layer in range(3)]
    assert pairs([path.replace("_", ".") for path in port], [f"h.{layer + 7}.ln" for layer in range(3)]) == [
        (f"block.{layer}.norm", f"h.{layer + 7}.ln", "size") for layer in range(3)
    ]


def test_layers_as_flax_writes_them() -> None:
    port = [path.replace("model.layers.", "params.layers_") for path in LAYERS]
    assert pairs(port, LAYERS) == [(one, other, "name") for one, other in zip(port, LAYERS, strict=True)]


@pytest.mark.parametrize("number", ["9" * 5000, "²", "٣", "1e3", ""])
def test_words_that_only_look_like_numbers_are_words(number: str) -> None:
    path = f"h.{number}.ln"
    assert kind_of(path) == path
    assert pairs([path], [path]) == [(path, path, "name")]


GAIN = 1 + 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stored", [GAIN, GAIN.bfloat16(), GAIN.half()])
def test_a_vector_that_holds_the_gain_is_its_norm(stored: Tensor) -> None:
    port = weights_of({"final_scale": stored, "shift": OTHER, "mix.weight": torch.randn(64, 64)})
    found = compare_values(port, weights_of({"model.norm.weight": GAIN, "mix.weight": torch.randn(64, 64)}))
    assert [(each.name, each.reference_name, each.paired_by) for each in found.tensors] == [
        ("final_scale", "model.norm.weight", "values")
    ]
    assert (found.missing, found.is_right, found.others.extra) == ((), True, ("shift",))


def test_bias_too() -> None:
    port = weights_of({"final_scale": GAIN, "final_shift": OTHER})
    found = compare_values(port, weights_of({"ln_f.weight": GAIN, "ln_f.bias": OTHER}))
    assert [(each.name, each.role) for each in found.tensors] == [("final_scale", "weight"), ("final_shift", "bias")]
    assert found.is_right


def test_as_the_runtime_stores_it() -> None:
    port = replace(weights_of({"final_scale": GAIN + 1}), runtime="llama.cpp", architecture="gemma3")
    reference = weights_of({"model.norm.weight": GAIN})
    reference = replace(reference, runtime="transformers", architecture="gemma3_text")
    assert compare_values(port, reference).is_right
    assert compare_values(replace(port, source=weights_of({"final_scale": GAIN}).source), reference).missing


@pytest.mark.parametrize(
    "port",
    [
        {"final_scale": OTHER},
        {"final_scale": GAIN + 0.1 * OTHER},
        {"final_scale": GAIN, "copy": GAIN},
        {"final_scale": GAIN[:32]},
    ],
)
def test_another_vector_is_no_counterpart(port: dict[str, Tensor]) -> None:
    found = compare_values(weights_of(port), weights_of({"model.norm.weight": GAIN}))
    assert found.missing == ("model.norm.weight",)


def test_a_constant_gain_has_no_counterpart_by_values() -> None:
    found = compare_values(
        weights_of({"final_scale": torch.ones(64)}), weights_of({"model.norm.weight": torch.ones(64)})
    )
    assert found.missing == ("model.norm.weight",)
