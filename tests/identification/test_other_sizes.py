"""Norms whose divisor is the size of another axis than the row's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normkit as nk


class DividesBy(nn.Module):
    """A norm whose sum of squares is divided by what `size` says of its input."""

    def __init__(self, size: Callable[[Tensor], int], *, centred: bool = False, n: int = 64) -> None:
        super().__init__()
        self.size, self.centred = size, centred
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        mean = x.square().sum(-1, keepdim=True) / self.size(x)
        return x * torch.rsqrt(mean + 1e-6) * self.weight + self.bias


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [64, (7, 64), (2, 7, 64), (2, 3, 7, 64)])
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_the_axis_whose_size_divides_is_named(axis, shape, centred):
    passport = nk.identify(DividesBy(lambda x: x.size(axis), centred=centred), shape)
    assert passport.verdict == "norm"
    assert passport.spec is None
    named = axis if axis >= 0 or isinstance(shape, int) or len(shape) == 2 else axis + len(shape)
    assert passport.cause.startswith(f"the sum of squares is divided by shape[{named}], not by n = 64: the same rows")
    assert f"other axes  the sum of squares is divided by shape[{named}], not by n = 64" in str(passport)


def test_the_number_of_rows_is_no_single_axis():
    passport = nk.identify(DividesBy(lambda x: x.numel() // x.shape[-1]), (2, 7, 64))
    assert passport.spec is None
    assert passport.cause.startswith("the same rows leave 1.369 times as long in an input of shape (3, 5, 64)")


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (DividesBy(lambda x: x.shape[-1]), 64),
        (DividesBy(lambda x: x.shape[-1]), (2, 7, 64)),
        (DividesBy(lambda x: x.shape[-1], n=5), 5),
        (nn.LayerNorm(3), (3, 3)),
        (nn.LayerNorm((5, 7)), (2, 5, 7)),
        (nn.GroupNorm(2, 6), (2, 6)),
        (nn.GroupNorm(2, 6), (2, 6, 4, 4)),
        (nn.InstanceNorm1d(6), (2, 6, 8)),
        (lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), 64),
        (lambda x: torch.nn.functional.normalize(x, dim=1), 64),
    ],
)
def test_right_norms_have_a_formula(norm, shape):
    passport = nk.identify(norm, shape)
    assert passport.spec is not None
    assert "other sizes" not in passport.readings


def test_a_violation_says_so():
    first, *_ = nk.testing.violations(DividesBy(lambda x: x.shape[1]), nk.specs.LLAMA, (2, 7, 64))
    assert first.check == "batch position"
    assert "(the sum of squares is divided by shape[1], not by n = 64" in first.found
