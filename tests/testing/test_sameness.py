"""`assert_same`: it passes what rounding explains, and its error says what differs and where that begins."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from normkit.errors import InputError
from normkit.testing import DifferenceError, assert_same
from tiny_models import tiny

IDS = {"input_ids": torch.arange(64).reshape(4, 16)}


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", dtype=torch.float32)[0]


def failed(port, reference, batch=None, **arguments):
    with pytest.raises(DifferenceError) as raised:
        assert_same(port, reference, batch, **arguments)
    return raised.value


def test_another_eps_of_one_norm_is_named_where_no_row_feels_it():
    error = failed(nn.LayerNorm(8, eps=1e-4), nn.LayerNorm(8, eps=1e-5), shape=8)
    assert str(error).splitlines()[0] == "port compared with reference: different"
    assert "eps 0.0001 instead of 1e-05, inside the root both" in str(error)
    assert error.comparison.conventions.changed
    assert_same(nn.LayerNorm(8), nn.LayerNorm(8), shape=8)


def test_what_stays_undecided_does_not_pass():
    gain = {"norm.weight": torch.randn(64)}
    assert "undecided" in str(failed({"norm.weight": gain["norm.weight"] + 1}, gain))
    assert_same(gain, gain)


@pytest.mark.slow
def test_the_same_model_in_another_precision_passes(llama):
    assert_same(llama, llama, IDS)
    assert_same(copy.deepcopy(llama).double(), llama, IDS)


@pytest.mark.slow
def test_a_fault_between_norms_is_placed_between_them(llama):
    port = copy.deepcopy(llama)
    port.model.layers[1].self_attn.q_proj.weight.data *= 1.01
    lines = str(failed(port, llama, IDS)).splitlines()
    assert "later ones do not: queries, keys, positions" in lines[1]
    assert "appears in attention: what leaves model.layers.1.input_layernorm agrees" in lines[2]


@pytest.mark.slow
def test_a_changed_gain_is_the_cause(llama):
    port = copy.deepcopy(llama)
    port.model.norm.weight.data *= 1.5
    assert "model.norm.weight: reference times 1.50." in str(failed(port, llama, IDS))


def test_what_cannot_be_compared_is_no_difference():
    with pytest.raises(InputError):
        assert_same(nn.Linear(4, 4), nn.Linear(4, 4), None)
