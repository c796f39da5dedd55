"""Each divisor: its numbers are those of rows, and its words are its own."""

from __future__ import annotations

import pytest
import torch

from normkit.conventions.divisor import DIVISORS
from normkit.reference import forward
from normkit.spec import NormSpec

N = 6
ROW = torch.tensor([1.0, -2.0, 4.0, 0.5, 3.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize("divisor", DIVISORS.values())
def test_v_is_the_sum_over_the_count_and_the_radius_is_the_length_of_a_row(divisor):
    assert divisor.of_squares(ROW.square()).item() == pytest.approx(ROW.square().sum().item() / divisor.count(N))
    spec = NormSpec(centre_numerator=False, centre_statistics=False, eps=0.0, **divisor.conventions())
    assert forward(ROW, spec).norm().item() == pytest.approx(divisor.radius(N), rel=1e-14)
    correction = (divisor.count(N) / N) ** 0.5 if divisor.correction else 1.0
    assert divisor.rms(N) * correction == pytest.approx(divisor.radius(N) / N**0.5, rel=1e-14)
    assert divisor.multiplied(ROW).equal(ROW * divisor.factor(N))
    assert spec.divisor is divisor


@pytest.mark.parametrize("text", ["words", "radius_in_words"])
def test_words_tell_all_apart(text):
    words = {getattr(divisor, text) for divisor in DIVISORS.values()}
    # A sum times sqrt(n) has the radius of a mean.
    assert len(words) == {"words": 6, "radius_in_words": 5}[text]
