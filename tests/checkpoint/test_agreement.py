"""Logits of two models in float64, and the yardstick of one rounding."""

from __future__ import annotations

import pytest
import torch

import normkit as nk
from folded_checkpoints import folded
from normkit.checkpoint.agreement import Agreement, compare_logits, half_unit
from tiny_models import tiny

ALL = ("gain", "bias", "final", "centre", "rms", "value")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_fold_is_as_near_as_one_rounding_of_its_weights(family, dtype, tmp_path):
    pair = folded(tmp_path, family, dtype, operations=ALL, untie=True)
    inputs = tiny(family)[1]
    unit = torch.finfo(dtype).eps / 2
    models = [nk.load(folder, dtype="float64") for folder in (pair.source, pair.result)]
    found = compare_logits(*models, [inputs], unit=unit)
    assert found.holds
    # Sums of some hundred terms of size 1 to 10, in the unit of the dtype.
    assert unit < found.rounding < 200 * unit
    assert found.difference < 8 * found.rounding + 1e-12
    assert found.tokens == inputs["input_ids"].numel()


def test_another_model_is_too_far():
    (one, inputs), (other, _) = tiny("gpt2"), tiny("gpt2", seed=1)
    found = compare_logits(one, other, [inputs], unit=2.0**-24)
    assert not found.holds
    assert found.difference > 0.1


def test_one_gain_that_was_forgotten_is_seen():
    (one, inputs), (other, _) = tiny("gpt2"), tiny("gpt2")
    with torch.no_grad():
        other.transformer.h[0].ln_1.weight[3] *= 1.01
    assert not compare_logits(one, other, [inputs], unit=2.0**-24).holds


def test_the_same_model_does_not_differ_and_nothing_rounded_has_no_yardstick():
    (one, inputs), (other, _) = tiny("llama"), tiny("llama")
    found = compare_logits(one, other, [inputs, inputs], unit=0.0)
    assert (found.difference, found.rounding, found.holds) == (0.0, 0.0, True)
    assert found.tokens == 2 * inputs["input_ids"].numel()


def test_nan_is_infinitely_far():
    (one, inputs), (other, _) = tiny("llama"), tiny("llama")
    with torch.no_grad():
        other.lm_head.weight[0, 0] = torch.nan
    found = compare_logits(one, other, [inputs], unit=2.0**-8)
    assert found.difference == float("inf")
    assert not found.holds


def test_the_coarsest_dtype_decides():
    assert half_unit({"F32", "BF16", "F64"}) == 2.0**-8
    assert half_unit({"F32"}) == 2.0**-24
    assert half_unit(set()) == 0.0


@pytest.mark.parametrize(("difference", "holds"), [(7.9e-3, True), (8.1e-3, False)])
def test_eight_roundings_are_the_bound(difference, holds):
    found = Agreement(tokens=1, largest=1.0, difference=difference, rounding=1e-3, unit=2.0**-8)
    assert found.holds is holds
    assert found.to_json()["holds"] is holds
