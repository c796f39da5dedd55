"""Rows with a large mean, constant rows, zero rows, and a rescale in front."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit import NormSpec
from normkit.identification import conditioning
from normkit.identification.behaviour import identify
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed

PLAIN = NormSpec(has_weight=False, has_bias=False)
RMS = PLAIN.replace(centre_numerator=False, centre_statistics=False)


def read(norm, spec=PLAIN, shape=(2, 3, 64)):
    with undisturbed():
        return conditioning.readings(Specimen(norm), spec, shape, torch.Generator().manual_seed(0))


def one_pass(x, eps=1e-5, least=0.0):
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) * torch.rsqrt(variance.clamp_min(least) + eps)


def two_passes(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


def spiky(x, eps=1e-5):
    x = x / x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("n", [8, 64, 4096])
def test_a_cancelling_variance(n):
    found = read(one_pass, shape=(2, 3, n))["conditioning"]
    assert found.value["cancels"]
    assert found.value["mean_over_std"] == 1024
    assert found.value["error"] > 1e-3
    assert "E[x^2] - E[x]^2, which this norm must compute" in found.evidence[0]


@pytest.mark.parametrize("n", [8, 64, 4096])
@pytest.mark.parametrize("norm", [two_passes, lambda x: F.layer_norm(x, x.shape[-1:])])
def test_two_passes_do_not_cancel(norm, n):
    found = read(norm, shape=(2, 3, n))["conditioning"]
    assert not found.value["cancels"]
    assert found.value["error"] < 1e-3


def test_a_gain_and_a_bias_do_not_matter():
    for module in (nn.LayerNorm(64), nk.LayerNorm(64)):
        with torch.no_grad():
            module.weight.uniform_(0.5, 1.5)
            module.bias.uniform_(-1, 1)
        assert not read(module)["conditioning"].value["cancels"]


def test_only_a_mean_can_cancel():
    assert "conditioning" not in read(nn.RMSNorm(64), RMS)


@pytest.mark.parametrize(
    ("norm", "spec", "value"),
    [
        (nn.LayerNorm(64), PLAIN, {"zeros": "finite", "constant": "finite", "zeros in float16": "finite"}),
        (
            lambda x: F.rms_norm(x, (64,), eps=0.0),
            RMS,
            {"zeros": "NaN", "constant": "finite", "zeros in float16": "NaN"},
        ),
        (
            lambda x: one_pass(x, 1e-12, -1e4),
            PLAIN,
            {"zeros": "finite", "constant": "NaN", "zeros in float16": "NaN"},
        ),
        (
            lambda x: one_pass(x.float()).to(x.dtype),
            PLAIN,
            {"zeros": "finite", "constant": "finite", "zeros in float16": "finite"},
        ),
    ],
)
def test_degenerate_rows(norm, spec, value):
    assert read(norm, spec)["degenerate rows"].value == value


def test_an_eps_that_float16_loses_is_told():
    def norm(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.tensor(1e-8).to(x.dtype))

    assert read(norm, RMS)["degenerate rows"].evidence[0].endswith("zeros in float16: NaN: eps is lost there")


@pytest.mark.parametrize("n", [16, 64, 1024])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3])
def test_a_rescale_in_front_of_eps(eps, n):
    with undisturbed():
        found = conditioning.rescaled_eps(
            Specimen(lambda x: spiky(x, eps)), RMS, (2, n), torch.Generator().manual_seed(0)
        )
    # It is read from a share of 1e-5 of a length that float32 knows to 1e-7.
    assert found == pytest.approx(eps, rel=0.05)


@pytest.mark.parametrize("norm", [nn.RMSNorm(64), nn.RMSNorm(64, eps=0.0), lambda x: F.normalize(x, dim=-1)])
def test_no_rescale(norm):
    with undisturbed():
        assert conditioning.rescaled_eps(Specimen(norm), RMS, (2, 64), torch.Generator().manual_seed(0)) is None


def test_another_length_is_no_rescale():
    def by_magnitude(x):
        return x / x.abs().mean(-1, keepdim=True)

    with undisturbed():
        generator = torch.Generator().manual_seed(0)
        assert conditioning.rescaled_eps(Specimen(by_magnitude), RMS, (2, 64), generator) is None


def test_identify_tells_them():
    assert identify(one_pass, 64).readings["conditioning"].value["cancels"]
    assert identify(nn.LayerNorm(64), 64).readings["degenerate rows"].value["constant"] == "finite"
    passport = identify(spiky, 64)
    assert (passport.verdict, passport.spec) == ("norm", None)
    assert any("multiplied by the square of a row's largest element: 1e-05" in line for line in passport.evidence)
