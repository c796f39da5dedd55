"""The shared comparison fails when it should."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import find

from helpers import PRESETS, arguments, assert_close, diagonal, valid_specs
from normkit import functional

ONE = torch.ones(4)


def test_equal_tensors_pass():
    assert_close(ONE, ONE)
    assert_close(torch.tensor([math.nan, math.inf, 1.0]), torch.tensor([math.nan, math.inf, 1.0]))
    assert_close(torch.empty(0, 3), torch.empty(0, 3))


def test_the_bound_is_where_it_is_said_to_be():
    eps = torch.finfo(torch.float64).eps
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert_close(expected + 8 * eps, expected, units=4)
    with pytest.raises(AssertionError, match="1 of 2 elements are off"):
        assert_close(expected + torch.tensor([0.0, 10 * eps]), expected, units=4)
    # It grows with the root of the length.
    expected = torch.ones(1, dtype=torch.float64)
    assert_close(expected + 10 * eps, expected, units=1, length=100)
    with pytest.raises(AssertionError, match="off"):
        assert_close(expected + 12 * eps, expected, units=1, length=100)
    # It is that of the given terms.
    terms = torch.tensor([1.0, 1e-3])
    assert_close(ONE[:2] + torch.tensor([1e-7, 0.0]), ONE[:2], units=1, terms=terms)
    with pytest.raises(AssertionError, match="1 of 2 elements are off"):
        assert_close(ONE[:2] + torch.tensor([0.0, 2e-7]), ONE[:2], units=1, terms=terms)


def test_a_narrow_result_is_compared_with_a_wide_truth():
    truth = torch.full((4,), 1 / 3, dtype=torch.float64)
    assert_close(truth.bfloat16(), truth, dtype=torch.bfloat16, units=1)
    with pytest.raises(AssertionError, match="off"):
        assert_close(truth.bfloat16().float(), truth, dtype=torch.float32)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (torch.tensor([1.0, 1.0, 1.0, 1.1]), "1 of 4 elements are off; the worst by 0.1"),
        (torch.tensor([1.0, 1.0, 1.0, math.nan]), "not finite"),
        (torch.tensor([1.0, 1.0, 1.0, math.inf]), "not finite"),
        (ONE.double(), "dtype"),
        (ONE.half(), "dtype"),
        (torch.ones(1, 4), "shape"),
        (torch.ones(1), "shape"),
    ],
)
def test_a_wrong_tensor_fails(actual, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, ONE)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_another_number_in_place_of_an_odd_one_fails(odd):
    for other in (1.0, -math.inf if odd == math.inf else math.inf):
        with pytest.raises(AssertionError):
            assert_close(torch.tensor([1.0, other]), torch.tensor([1.0, odd]))


def test_any_two_values_meet_and_those_off_the_diagonal_are_slow():
    cases = diagonal("abc", [1, 2], range(5))
    quick = [case.values for case in cases if not case.marks]
    assert quick == [("a", 1, 0), ("a", 2, 3), ("b", 1, 4), ("b", 2, 1), ("c", 1, 2)]
    assert len(cases) == len({case.values for case in cases}) < 30
    met = [{(case.values[i], case.values[j]) for case in cases} for i, j in ((0, 1), (0, 2), (1, 2))]
    assert [len(pairs) for pairs in met] == [3 * 2, 3 * 5, 2 * 5]
    assert all(case.marks == (pytest.mark.slow,) for case in cases if case.values not in quick)


def test_there_are_presets():
    assert len(PRESETS) == 24


@pytest.mark.parametrize("name", PRESETS)
def test_arguments_fit_every_preset(name):
    x, weight, bias = arguments(PRESETS[name])
    assert functional.normalize(x, PRESETS[name], weight, bias).shape == x.shape


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "condition",
    [
        lambda spec: spec.axes == "all_but_batch" and spec.groups > 1 and spec.has_weight,
        lambda spec: spec.axes == (-3, -2, -1) and spec.weight_placement == "before",
        lambda spec: spec.cast == "none" and spec.round_rstd,
        lambda spec: spec.correction == 1 and spec.eps_placement == "clamp" and spec.multiplier == "sqrt_n",
        lambda spec: spec.reduction == "sum" and spec.eps is None and spec.weight_offset == -0.5,
    ],
)
def test_the_strategy_reaches_the_corners(condition):
    assert condition(find(valid_specs(), condition))
