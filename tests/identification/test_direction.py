"""Norms that subtract another direction than all-ones, or a weighted mean: the direction comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.identification import direction
from normkit.identification.behaviour import identify
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed

N = 48
# float32 gives each column of the matrix to about 1e-6.
CLOSE = 1e-4


def drawn(seed, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def readings(norm, shape):
    with undisturbed():
        return direction.centring_readings(Specimen(norm), shape, torch.Generator().manual_seed(0))


class Projected(nn.Module):
    """gain * (x - direction weights.x) / rms of that or of x, plus bias."""

    def __init__(self, direction, weights, of_what_is_left=True):
        super().__init__()
        self.direction, self.weights, self.of_what_is_left = direction, weights, of_what_is_left
        self.gain = nn.Parameter(drawn(3, len(direction)).abs() + 0.5)
        self.bias = nn.Parameter(drawn(4, len(direction)))

    def forward(self, x):
        left = x - (x @ self.weights)[..., None] * self.direction
        measured = left if self.of_what_is_left else x
        return self.gain * left / (measured.square().mean(-1, keepdim=True) + 1e-5).sqrt() + self.bias


@pytest.mark.parametrize("shape", [(2, N), (2, 3, N)])
@pytest.mark.parametrize("of_what_is_left", [True, False])
def test_a_direction(shape, of_what_is_left):
    unit = drawn(1) / drawn(1).norm()
    passport = identify(Projected(unit, unit, of_what_is_left), shape)
    assert (passport.verdict, passport.spec) == ("norm", None)
    reading = passport.readings["centring"]
    found = torch.tensor(reading.value["direction"])
    assert min(float((found - unit).abs().max()), float((found + unit).abs().max())) < CLOSE
    assert reading.value["share"] == pytest.approx(1.0, abs=CLOSE)
    assert "a direction of its own" in reading.evidence[0]
    assert reading.evidence[1].endswith("what is left of the row" if of_what_is_left else "the whole row")


def test_a_weighted_mean():
    weights = drawn(2).softmax(0)
    value = identify(Projected(torch.ones(N), weights), N).readings["centring"].value
    assert value["direction"] == pytest.approx([1.0] * N, abs=CLOSE)
    assert value["weights"] == pytest.approx(weights.tolist(), abs=CLOSE)


def test_half_of_the_mean():
    reading = identify(Projected(torch.ones(N), torch.full((N,), 0.5 / N)), N).readings["centring"]
    assert reading.value["share"] == pytest.approx(0.5, abs=CLOSE)
    assert "it subtracts 0.5 of the mean" in reading.evidence[0]


def test_uneven_squares():
    weights = drawn(2).softmax(0)
    found = readings(lambda x: x / ((x.square() * weights).sum(-1, keepdim=True) + 1e-5).sqrt(), (2, N))
    assert found["centring"].value == {"direction": None}
    assert found["squares"].value["weights"] == pytest.approx((weights * N).tolist(), abs=1e-3)


def test_a_length_that_is_no_root_of_squares():
    found = readings(lambda x: x / x.abs().amax(-1, keepdim=True), (2, N))
    assert found["centring"].value == {"direction": None}
    assert "no root of a weighted sum of squares" in found["centring"].evidence[1]


def test_what_mixes_all_features_is_undecided():
    found = readings(nn.Sequential(nn.LayerNorm(N), nn.Linear(N, N)), (2, N))["centring"]
    assert found.value is None
    assert "not seen to be a gain times a projection" in found.undecidable


@pytest.mark.parametrize("norm", [nn.Sequential(nn.LayerNorm(N), nn.GELU()), nn.Sequential(nn.LayerNorm(N), nn.Tanh())])
def test_what_is_no_matrix_over_a_length_has_no_direction(norm):
    assert readings(norm, (2, N)) == {}


def test_long_rows_are_not_searched():
    found = readings(nn.Identity(), (2, 4096))["centring"]
    assert found.value is None
    assert "these have 4096" in found.undecidable
