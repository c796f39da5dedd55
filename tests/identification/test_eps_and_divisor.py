"""The response to small inputs, and the divisor and eps that are read off it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import NormSpec
from normkit.conventions.divisor import Divisor
from normkit.identification.eps_and_divisor import RollOff, choose, is_length, roll_off, roundness, settle_machine_eps
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import undisturbed

PLAIN = NormSpec(has_weight=False, has_bias=False)


def response(norm, n=12, spec=PLAIN):
    with undisturbed():
        return roll_off(Specimen(norm), spec, (2, 3, n), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1.5625e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
def test_every_placement_and_size(placement, eps, centred):
    spec = PLAIN.replace(centre_numerator=centred, centre_statistics=centred, eps=eps, eps_placement=placement)
    found = response(nk.Norm(spec, 12))
    assert found.placement == placement
    # r is good to a few float32 epsilons, and eps to about four times that near the middle of the window.
    assert found.eps == pytest.approx(eps, rel=1e-6)
    assert found.error < 5e-5


@pytest.mark.parametrize("n", [6, 768])
def test_bessel_and_sum_are_felt_as_another_eps(n):
    # v / (n - 1) + eps is v / n + eps (n - 1) / n, times n / (n - 1).
    assert response(nk.Norm(PLAIN.replace(correction=1), n), n).eps == pytest.approx(1e-5 * (n - 1) / n, rel=1e-6)
    outside = PLAIN.replace(reduction="sum", eps_placement="clamp")
    assert response(nk.Norm(outside, n), n).eps == pytest.approx(1e-5 / math.sqrt(n), rel=1e-6)


@pytest.mark.parametrize("n", [4, 64, 768])
def test_a_thousand_rounded_numbers_tell_the_machine_epsilons_apart(n):
    # In bfloat16 an eps is read to 5 %; 2**-23 and 2**-7 are a factor of 65,536 apart.
    with undisturbed():
        specimen = Specimen(nn.RMSNorm(n)).in_dtype(torch.bfloat16)
        spec = PLAIN.replace(centre_numerator=False, centre_statistics=False)
        found = roll_off(specimen, spec, (2, 3, n), torch.Generator().manual_seed(0), 1024)
    assert found.eps == pytest.approx(2.0**-23, rel=0.05)


def test_no_eps():
    found = response(nk.Norm(PLAIN.replace(eps=0.0), 12))
    assert found.eps == 0.0
    assert "no eps" in found.evidence
    assert found.undecidable is None


def test_an_eps_too_small_to_be_felt_is_not_said_to_be_absent():
    found = response(lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-30))
    assert "too small to be felt" in found.undecidable


def test_an_unknown_gain_does_not_matter():
    weight = torch.linspace(-2, 3, 12)
    assert response(lambda x: nn.functional.layer_norm(x, (12,), weight)).eps == pytest.approx(1e-5, rel=1e-6)


def test_a_clip_is_not_a_norm_with_a_large_eps():
    with pytest.raises(UnrecognisedError, match="shorter than rms 2 as they are: a clip"):
        response(lambda x: x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(2.0))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-5) ** 0.25 / x.norm(dim=-1, keepdim=True) ** 0.5,
            "fits",
        ),
        (lambda x: x / (x.square().mean(-1, keepdim=True) - 1e-5).sqrt(), "not finite"),
    ],
)
def test_other_ways_to_shorten_small_rows_are_named(function, reason):
    with pytest.raises(UnrecognisedError, match=reason) as refusal:
        response(function, spec=PLAIN.replace(centre_numerator=False, centre_statistics=False))
    assert refusal.value.verdict == "norm"


def felt(eps, placement="inside", error=1e-6):
    return RollOff(placement=placement, eps=eps, error=error, evidence="")


def opened(choice):
    return {name: reading.undecidable for name, reading in choice.readings.items() if reading.undecidable}


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
        assert opened(found) == {}


def test_the_round_eps_tells_l2_times_sqrt_n_from_the_mean():
    # Both make rows of rms 1: x-transformers' clamp on the L2 norm, and GLM's odd eps under a mean.
    assert choose(64, 1.0, felt(1e-12 / 8, "clamp")).divisor == Divisor(reduction="sum", multiplier="sqrt_n")
    glm = choose(64, 1.0, felt(1.5625e-7))
    assert (glm.divisor, glm.eps) == (Divisor(), 1.5625e-7)
    assert choose(48, 1.0, felt(1e-5 / 48)).divisor == Divisor(reduction="sum", multiplier="sqrt_n")


def test_with_an_unknown_gain_only_a_round_eps_tells():
    bessel = choose(768, None, felt(1e-5 * 767 / 768))
    assert (bessel.divisor, bessel.eps, opened(bessel)) == (Divisor(correction=1), 1e-5, {})
    plain = choose(768, None, felt(1e-5))
    assert (plain.divisor, plain.eps, opened(plain)) == (Divisor(), 1e-5, {})
    clamp = choose(64, None, felt(1e-12 / 8, "clamp"))
    assert (clamp.divisor, clamp.eps) == (Divisor(reduction="sum"), 1e-12)
    assert "may as well be divided by n" in opened(clamp)["divisor"]  # by n, eps would be 1.25e-13
    for nothing in (0.0, 1.234567e-5):
        assert "eps tells no difference" in choose(768, None, felt(nothing)).readings["divisor"].undecidable


def settled(in_other, dtype=torch.float32, found=2.0**-23):
    """The choice for a norm with eps `found` in this dtype, and these in others (absent: it does not run there)."""

    def felt_in(other):
        if other not in in_other:
            raise UnrecognisedError("norm", "refused")
        return felt(in_other[other])

    return settle_machine_eps(choose(64, 1.0, felt(found)), 64, dtype, felt_in)


def test_a_machine_epsilon_is_told_from_none_in_other_dtypes():
    wide, half = torch.float64, torch.bfloat16
    none = settled({wide: 2.0**-52, half: 2.0**-23})
    assert (none.eps, opened(none)) == (None, {})
    assert none.readings["eps"].value == {"eps": None, "eps_placement": "inside"}
    assert settled({wide: 2.0**-52}).eps is None
    constant = settled({wide: 2.0**-23, half: 2.0**-23})
    assert (constant.eps, opened(constant)) == (2.0**-23, {})
    found_wide = settled({torch.float32: 2.0**-23, half: 2.0**-23}, wide, 2.0**-52)
    assert (found_wide.eps, opened(found_wide)) == (None, {})


def test_a_machine_epsilon_that_stays_open():
    wide, half = torch.float64, torch.bfloat16
    assert "does not run in float64" in opened(settled({}))["eps"]
    of_the_input = settled({wide: 2.0**-52, half: 2.0**-7})
    assert of_the_input.eps == 2.0**-23
    assert "in bfloat16 0.0078125" in opened(of_the_input)["eps"]


def test_other_eps_are_not_asked_for_in_other_dtypes():
    plain = choose(64, 1.0, felt(1e-5))
    assert settle_machine_eps(plain, 64, torch.float32, None) is plain


def test_what_a_coarse_eps_says():
    assert choose(64, 1.0, felt(1.003e-5, error=5e-3)).eps == 1e-5
    read = choose(64, 1.0, felt(1.003e-5, error=5e-3)).readings["eps"]
    assert read.confidence == 0.95
    assert "good to 0.5%" in read.evidence[1]
    assert "measured to 4% only" in opened(choose(64, 1.0, felt(1.003e-5, error=0.04)))["eps"]
    # Of two round numbers the nearer: float16's machine epsilon is 9.77e-4.
    assert choose(64, 1.0, felt(0.99e-3, error=0.02)).eps == 1e-3


def test_a_coarse_length_leaves_two_divisors_of_a_long_row():
    found = choose(768, 1.0005, felt(1.001e-5, error=5e-3), tolerance=2e-3)
    assert found.rival == Divisor(correction=1)
    assert "may as well be divided by n - 1" in opened(found)["divisor"]
    decided = found.decided(found.rival, "bits")
    assert (decided.divisor, opened(decided)) == (Divisor(correction=1), {})
    assert opened(found.decided(found.divisor, "bits")) == {}
    # Only a mean costs a degree of freedom.
    assert opened(choose(768, 1.0005, felt(1.001e-5, error=5e-3), tolerance=2e-3, centred=False)) == {}
    assert opened(choose(64, 1.0005, felt(1.001e-5, error=5e-3), tolerance=2e-3)) == {}


def test_two_ways_to_say_the_same_are_both_told():
    # rms clamped at 1e-6 is, at n = 100, the L2 norm clamped at 1e-5.
    found = choose(100, 1.0, felt(1e-6, "clamp"))
    assert set(opened(found)) == {"divisor", "eps"}
    assert "not divided (L2), the row multiplied by sqrt(n), eps = 1e-05" in opened(found)["eps"]
    assert opened(choose(96, 1.0, felt(1e-6, "clamp"))) == {}
    assert opened(choose(100, 1.0, felt(0.0))) == {}
    assert opened(choose(100, 1.0, felt(1e-5))) == {}


def test_a_length_that_no_spec_has():
    with pytest.raises(UnrecognisedError, match=r"root mean square 0\.7 "):
        choose(64, 0.7, felt(1e-5))
    assert is_length(math.sqrt(5 / 6), 6)
    assert not is_length(math.sqrt(5 / 6), 7)
