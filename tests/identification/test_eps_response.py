"""Where eps enters and how large it is, from the length of outputs for small inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import NormSpec
from normkit.identification.eps_response import roll_off
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import undisturbed

PLAIN = NormSpec(has_weight=False, has_bias=False)


def felt(norm, n=12, spec=PLAIN):
    with undisturbed():
        return roll_off(Specimen(norm), spec, (2, 3, n), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1.5625e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
def test_every_placement_and_size(placement, eps, centred):
    spec = PLAIN.replace(centre_numerator=centred, centre_statistics=centred, eps=eps, eps_placement=placement)
    found = felt(nk.Norm(spec, 12))
    assert found.placement == placement
    # r is good to a few float32 epsilons, and eps to about four times that near the middle of the window.
    assert found.eps == pytest.approx(eps, rel=1e-6)
    assert found.error < 5e-5


@pytest.mark.parametrize("n", [6, 768])
def test_bessel_and_sum_are_felt_as_another_eps(n):
    # v / (n - 1) + eps is v / n + eps (n - 1) / n, times n / (n - 1).
    assert felt(nk.Norm(PLAIN.replace(correction=1), n), n).eps == pytest.approx(1e-5 * (n - 1) / n, rel=1e-6)
    outside = PLAIN.replace(reduction="sum", eps_placement="clamp")
    assert felt(nk.Norm(outside, n), n).eps == pytest.approx(1e-5 / math.sqrt(n), rel=1e-6)


def test_no_eps():
    found = felt(nk.Norm(PLAIN.replace(eps=0.0), 12))
    assert found.eps == 0.0
    assert "no eps" in found.evidence
    assert found.undecidable is None


def test_an_eps_too_small_to_be_felt_is_not_said_to_be_absent():
    found = felt(lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-30))
    assert "too small to be felt" in found.undecidable


def test_an_unknown_gain_does_not_matter():
    weight = torch.linspace(-2, 3, 12)
    assert felt(lambda x: nn.functional.layer_norm(x, (12,), weight)).eps == pytest.approx(1e-5, rel=1e-6)


def test_a_clip_is_not_a_norm_with_a_large_eps():
    with pytest.raises(UnrecognisedError, match="shorter than rms 2 as they are: a clip"):
        felt(lambda x: x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(2.0))


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
        felt(function, spec=PLAIN.replace(centre_numerator=False, centre_statistics=False))
    assert refusal.value.verdict == "norm"
