"""Rows: whatever else moves with an element is named by its axes and by what it means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.testing import sharing, violations
from normkit.testing.norm_under_test import Subject

ROWS = specs.OLMO


def seen(norm, spec=ROWS, shape=(2, 3, 12), dtype=torch.float32):
    return sharing.rows(Subject(norm, spec, shape, None, None, None, None, torch.float32).in_dtype(spec, dtype))


def over(*axes, groups=1):
    def norm(x):
        y = x.unflatten(-1, (groups, -1)) if groups > 1 else x
        y = (y - y.mean(axes, keepdim=True)) / (y.var(axes, keepdim=True, correction=0) + 1e-5).sqrt()
        return y.flatten(-2) if groups > 1 else y

    return norm


def causal(x):
    count = torch.arange(1, x.shape[1] + 1).reshape(-1, 1)
    return x / (x.pow(2).mean(-1, keepdim=True).cumsum(1) / count + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (over(1), "outputs along axis 1 move: earlier positions feel later ones"),
        (over(1, 2), "outputs along axes 1, 2 move: earlier positions feel later ones"),
        (over(0), "outputs along axis 0 move: samples are coupled"),
        (over(0, 1, 2), "outputs along axes 0, 1, 2 move: samples are coupled"),
        (over(-1, groups=3), "4 outputs along axis 2 move: too few share statistics"),
        (torch.tanh, "1 outputs along no axis move: too few share statistics"),
        (nn.BatchNorm1d(3), "outputs along axes 0, 2 move: samples are coupled"),
        (nn.BatchNorm1d(3).eval(), "along no axis move: too few share statistics"),
        (causal, "outputs along axes 1, 2 move"),
    ],
)
def test_other_rows(norm, words):
    found = seen(norm)
    assert found.check == "rows"
    assert words in found.found
    assert found.expected == "only its own row, 12 outputs along axis 2, to move with one element"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_rows(dtype):
    assert seen(over(2), dtype=dtype) is None
    assert seen(over(-1, groups=3), ROWS.replace(groups=3), dtype=dtype) is None
    assert seen(over(1), specs.CONVNEXT.replace(has_weight=False, has_bias=False), dtype=dtype) is None


def test_rows_that_are_not_those_of_the_spec_end_the_search():
    assert [violation.check for violation in violations(over(1), ROWS, (2, 3, 12))] == ["rows"]
