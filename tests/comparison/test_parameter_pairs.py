"""Which norm of one file stands for which of another."""

from __future__ import annotations

import pytest

from normkit.comparison.parameter_pairs import kind_of, pair_norms
from normkit.comparison.parameters import NormTensors


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
