"""What divides the sum of squares, from the length of rows and the roundness of eps."""

from __future__ import annotations

import math

import pytest

from normkit.identification import divisor
from normkit.identification.divisor import Divisor, choose, roundness
from normkit.identification.response import RollOff
from normkit.identification.specimen import UnrecognisedError


def felt(eps, placement="inside", spread=1e-7):
    return RollOff(placement=placement, eps=eps, spread=spread, evidence="")


@pytest.mark.parametrize(
    ("value", "level", "rounded"),
    [
        (0.0, 0, 0.0),
        (1e-5, 0, 1e-5),
        (1.0000003e-5, 0, 1e-5),
        (1.999999e-3, 0, 2e-3),
        (5e-13, 0, 5e-13),
        (2.0**-23, 0, 2.0**-23),
        (2.0**-7, 0, 2.0**-7),
        (3e-6, 1, 3e-6),
        (1.5e-6, 1, 1.5e-6),
        (1.5625e-7, 2, 1.5625e-7),
        (8.333333e-6, 3, 8.333333e-6),
        (1.00002e-5, 3, 1.00002e-5),
    ],
)
def test_roundness(value, level, rounded):
    assert roundness(value, 1e-6) == (level, rounded)


@pytest.mark.parametrize("n", [6, 64, 768, 4096])
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_a_known_length_settles_the_divisor(n, placement, eps):
    for wanted in (Divisor(), Divisor(correction=1), Divisor(reduction="sum")):
        over_n = {"mean": (n - wanted.correction) / n, "sum": 1 / n}[wanted.reduction]
        seen = eps * over_n if placement == "inside" else eps * math.sqrt(over_n)
        found = choose(n, math.sqrt(over_n), felt(seen, placement))
        assert found.divisor == wanted
        assert found.eps == eps
        assert found.doubts == ()


def test_the_round_eps_tells_l2_times_sqrt_n_from_the_mean():
    # Both make rows of rms 1: x-transformers' clamp on the L2 norm, and GLM's odd eps under a mean.
    assert choose(64, 1.0, felt(1e-12 / 8, "clamp")).divisor == Divisor(reduction="sum", multiplier="sqrt_n")
    glm = choose(64, 1.0, felt(1.5625e-7))
    assert (glm.divisor, glm.eps) == (Divisor(), 1.5625e-7)
    assert choose(48, 1.0, felt(1e-5 / 48)).divisor == Divisor(reduction="sum", multiplier="sqrt_n")


def test_with_an_unknown_gain_only_a_round_eps_tells():
    bessel = choose(768, None, felt(1e-5 * 767 / 768))
    assert (bessel.divisor, bessel.eps, bessel.doubts) == (Divisor(correction=1), 1e-5, ())
    plain = choose(768, None, felt(1e-5))
    assert (plain.divisor, plain.eps, plain.doubts) == (Divisor(), 1e-5, ())
    clamp = choose(64, None, felt(1e-12 / 8, "clamp"))
    assert (clamp.divisor, clamp.eps) == (Divisor(reduction="sum"), 1e-12)
    assert "may as well be divided by n" in clamp.doubts[0]  # by n, eps would be 1.25e-13
    for nothing in (0.0, 1.234567e-5):
        assert "eps tells no difference" in choose(768, None, felt(nothing)).doubts[0]


def test_a_machine_epsilon_may_be_none():
    assert "eps=None" in choose(64, 1.0, felt(2.0**-23)).doubts[0]


def test_a_length_that_no_spec_has():
    with pytest.raises(UnrecognisedError, match=r"root mean square 0\.7 "):
        choose(64, 0.7, felt(1e-5))
    assert divisor.is_length(math.sqrt(5 / 6), 6)
    assert not divisor.is_length(math.sqrt(5 / 6), 7)
