"""Gradients that pass a tap are those of autograd, and stay so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normkit.watching.tables import Tables
from normkit.watching.tallies import TAP_SUMS, named, tap_tables
from normkit.watching.taps import _Tap, local, tapped


def run(body: Any, table: Tensor, *args: Tensor) -> None:
    body(table, *args)


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_tap_counts_the_gradient_of_autograd_and_leaves_it(is_traced: bool):
    table = Tables(tap_tables(1), torch.device("cpu"))["taps"][0]
    leaf, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(3, 5, 8)

    def loss(with_tap: bool) -> tuple[Tensor, Tensor]:
        x = leaf.sin()
        y = x
        if with_tap:
            y = _Tap.apply(x, table) if is_traced else x
            if not is_traced:
                assert tapped(x, table, run) is None
        return x, (y * weight).square().sum()

    x, plain = loss(False)
    (expected,) = torch.autograd.grad(plain, x, retain_graph=True)
    (at_leaf,) = torch.autograd.grad(plain, leaf)
    _, watched = loss(True)
    assert torch.equal(torch.autograd.grad(watched, leaf)[0], at_leaf)
    line = named(table, TAP_SUMS)
    assert line["rows"] == 15
    assert line["squares"] * 8 == pytest.approx(float(expected.double().square().sum()), rel=1e-6)


def test_a_tensor_changed_in_place_after_the_tap_is_counted_as_it_was():
    table = Tables(tap_tables(1), torch.device("cpu"))["taps"][0]
    x = torch.randn(2, 4, requires_grad=True) * 2
    assert tapped(x, table, run) is None
    x.mul_(3.0)
    x.sum().backward()
    assert named(table, TAP_SUMS) == pytest.approx({"rows": 2, "squares": 18, "nonfinite": 0})


def test_a_parameter_is_not_tapped():
    """A hook on it would stay."""
    table = Tables(tap_tables(1), torch.device("cpu"))["taps"][0]
    parameter = torch.nn.Parameter(torch.ones(2, 4))
    tapped(parameter, table, run)
    parameter.sum().backward()
    assert not table.any()


def test_a_plain_tensor_is_its_own_local_part():
    x = torch.ones(3)
    assert local(x) is x
