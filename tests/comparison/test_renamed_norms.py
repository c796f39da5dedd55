"""Gains under names that are no norm's: paired by their values, and never where these do not tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of

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
