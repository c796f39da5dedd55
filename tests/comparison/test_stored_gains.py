"""How gains are stored, from one file alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normkit import demo
from normkit.comparison.parameters import norm_tensors
from normkit.comparison.stored_gains import LEAST_NORMS, StoredGains, describe_gains, stored_gains
from normkit.comparison.weights import Weights, weights_of

READING = {0: "one-centred", 1: "zero-centred", -1: "1 too much"}


def gains_of(weights: Weights, shift: float) -> dict[str, Tensor]:
    tensors = weights.source.tensors
    names = [norm.weight for norm in norm_tensors(tensors).norms if norm.weight is not None]
    return {name: weights.source.rows(name, 0, 1)[0].double() + shift for name in names}


def decisions(weights: Weights, adds: int) -> Iterator[tuple[str, str, str]]:
    """(kind, reading, truth) with the gains as they are, with 1 added and with 1 taken off."""
    for shift in (-1, 0, 1):
        needed = adds - shift
        for each in stored_gains(weights_of(gains_of(weights, shift))).kinds:
            yield each.kind, each.reading, READING.get(needed, "undecided")


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_the_shipped_models_are_decided_and_right(name: str) -> None:
    found = [*decisions(weights_of(demo.directory(name)), 0)]
    assert all(reading in (truth, "undecided") for _, reading, truth in found)
    assert sum(reading == truth for _, reading, truth in found) == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "adds", "decided"), [("smollm2", 0, 6), ("qwen05", 0, 6), ("mpnet", 0, 6), ("gemma3", 1, 6)]
)
def test_no_real_model_is_read_wrongly(real_models: Path, name: str, adds: int, decided: int) -> None:
    found = [*decisions(weights_of(real_models / name), adds)]
    assert all(reading in (truth, "undecided") for _, reading, truth in found)
    assert sum(reading != "undecided" for _, reading, _ in found) == decided


def layers(values: Tensor, name: str = "ln_1") -> dict[str, Tensor]:
    return {f"h.{layer}.{name}.weight": values.roll(layer) for layer in range(LEAST_NORMS)}


TRAINED = torch.linspace(0.1, 1.6, 128)


def read(arrays: dict[str, Tensor], runtime: str = "", architecture: str = "") -> StoredGains:
    return stored_gains(replace(weights_of(arrays, name="file"), runtime=runtime, architecture=architecture))


@pytest.mark.parametrize("adds", [0, 1, -1])
def test_each_way_of_storing(adds: int) -> None:
    found = read(layers(TRAINED - adds))
    assert (found.reading, found.kinds[0].adds, found.is_right) == (READING[adds], adds, None)
    json.dumps(found.to_json(), allow_nan=False)


def test_two_ways_in_one_file_are_mixed() -> None:
    found = read(layers(TRAINED) | layers(TRAINED - 1, "q_norm"))
    assert found.reading == "mixed"
    assert [each.reading for each in found.kinds] == ["one-centred", "zero-centred"]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_gains_that_are_one_number_were_never_trained(value: float) -> None:
    assert read(layers(torch.full((128,), value))).reading == "never trained"


@pytest.mark.parametrize(
    "values",
    [
        torch.linspace(0.95, 1.05, 128),
        torch.linspace(3, 60, 128),
        torch.linspace(-2, 2, 128),
        torch.linspace(-1.0, -0.5, 8),
    ],
)
def test_gains_that_could_be_either_are_undecided(values: Tensor) -> None:
    found = read(layers(values))
    assert (found.reading, found.is_right) == ("undecided", None)


def test_single_norms_are_never_decided() -> None:
    assert read({"ln_f.weight": TRAINED}).reading == "undecided"


@pytest.mark.parametrize(
    ("runtime", "architecture", "adds", "is_right"),
    [
        ("llama.cpp", "gemma3", 0, True),
        ("llama.cpp", "gemma3", 1, False),
        ("llama.cpp", "gemma3", -1, False),
        ("transformers", "gemma3_text", 1, True),
        ("transformers", "gemma3_text", 0, False),
        ("MLX", "qwen3_5", 0, True),
        ("MLX", "qwen3_5", -1, False),
        ("", "", 0, None),
    ],
)
def test_the_runtime_decides_what_is_right(runtime: str, architecture: str, adds: int, is_right: bool | None) -> None:
    found = read(layers(TRAINED - adds), runtime, architecture)
    assert found.is_right is is_right
    verdict = describe_gains(found).verdict
    assert verdict is not None
    assert (verdict.tone == "error") is (is_right is False)


def test_gains_that_are_not_numbers_are_named() -> None:
    found = read(layers(TRAINED) | {"x_norm.weight": torch.tensor([1.0, float("nan")])})
    assert (found.not_finite, found.is_right) == (("x_norm.weight",), False)
    json.dumps(found.to_json(), allow_nan=False)


def test_a_file_without_norms() -> None:
    verdict = describe_gains(read({"a.weight": torch.ones(3, 3)})).verdict
    assert verdict is not None
    assert verdict.headline == "no gains"


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), centre=st.floats(-3, 5), spread=st.floats(0, 2))
def test_gains_with_signs_at_random_are_not_taken_for_trained_ones(seed: int, centre: float, spread: float) -> None:
    drawn = centre + spread * torch.randn(256, generator=torch.Generator().manual_seed(seed))
    found = read(layers(drawn)).kinds[0]
    if found.adds is not None:
        # The rule itself: hardly any sum is negative, many are below one.
        assert float((drawn + found.adds < -0.1).double().mean()) <= 0.01
        assert float((drawn + found.adds < 0.9).double().mean()) >= 0.1


def trained(layers: int = 5, n: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    names = [f"h.{layer}.{name}.weight" for layer in range(layers) for name in ("ln_1", "ln_2")]
    return {name: 0.1 + 1.2 * torch.rand(n, generator=generator) for name in (*names, "ln_f.weight")}


@pytest.mark.parametrize("norm", ["h.1.ln_2", "ln_f"])
@pytest.mark.parametrize("adds", [0.0, 1.0])
def test_one_norm_at_its_start_among_trained_ones_is_named(norm: str, adds: float) -> None:
    tensors = {name: gain - adds for name, gain in trained().items()}
    tensors[f"{norm}.weight"] = torch.full((64,), 1.0 - adds)
    found = stored_gains(weights_of(tensors))
    assert (found.reading, found.untrained) == (READING[int(adds)], {norm: 1.0 - adds})
    section = describe_gains(found)
    assert section.verdict is not None
    assert section.verdict.tone == "warning"
    assert f"{norm}: all {1 - adds:g}, as initialised, where 10 other norms are trained." in section.verdict.detail


def test_a_constant_that_is_no_start_and_a_file_of_starts_are_not_untrained_norms() -> None:
    assert stored_gains(weights_of(trained())).untrained == {}
    assert stored_gains(weights_of(trained() | {"ln_f.weight": torch.zeros(64)})).untrained == {}
    assert stored_gains(weights_of({name: torch.ones(64) for name in trained()})).untrained == {}
