"""The truth is the reference's in float64; the unit of an error is no smaller than the terms that are added up."""

from __future__ import annotations

import math

import pytest
import torch

import contract
from normkit import reference, specs
from normkit.testing import truth
from normkit.testing.truth import Truth

EXACT = [name for name, spec in contract.ROWS.items() if spec.weight_placement == "after" and spec.weight_offset != 1.0]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_values_and_sizes_against_the_contract(name, mean):
    spec = contract.ROWS[name]
    case = contract.draw(spec, 5, 48, mean=mean)
    right = contract.truth(spec, case)
    terms = contract.terms(spec, case, right)
    y = truth.output(case.x, spec, case.weight, case.bias)
    assert torch.equal(y.value, right.y)
    assert bool((y.size >= 0.5 * terms.y).all())
    for ours, value, size in zip(
        truth.gradients(case.x, case.dy, spec, case.weight, case.bias), right[1:], terms[1:], strict=True
    ):
        assert (ours is None) == (value is None)
        if ours is not None:
            assert torch.equal(ours.value, value)
            assert bool((ours.size >= 0.5 * size).all())


def test_units_are_roundings():
    one = Truth(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    actual = torch.tensor([1.0, 1.0 + 2**-7, float("nan")], dtype=torch.bfloat16)
    assert one.units(actual).tolist() == pytest.approx([0.0, 1.0, math.inf])
    nothing = Truth(torch.tensor([float("nan"), 1e6], dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    assert nothing.units(torch.tensor([5.0, float("inf")], dtype=torch.float16)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("spec", "shape", "rows"),
    [
        (specs.OLMO, (2, 3, 4), [[[0] * 4, [1] * 4, [2] * 4], [[3] * 4, [4] * 4, [5] * 4]]),
        (specs.CONVNEXT, (1, 2, 3), [[[0, 1, 2], [0, 1, 2]]]),
        (specs.POOLFORMER.replace(groups=2), (1, 4, 1), [[[0], [0], [1], [1]]]),
    ],
)
def test_row_numbers(spec, shape, rows):
    assert truth.row_numbers(torch.zeros(shape), spec).tolist() == rows


def test_the_offset_is_added_where_the_spec_adds_it():
    x, weight = torch.randn(2, 8), torch.full((8,), 2.0**-9).bfloat16()
    for spec in (specs.GEMMA, specs.MUSE_SPARK):
        expected = reference.forward(x.double(), specs.OLMO2, reference.effective_weight(weight, spec, torch.float64))
        assert torch.allclose(truth.output(x, spec, weight, None).value, expected, rtol=1e-12)
