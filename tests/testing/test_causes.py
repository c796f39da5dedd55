"""A misfit becomes the conventions that differ, in words; what none explains is said with what was seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from faulty_norms import Gain, GainAndBias
from normkit import specs
from normkit.testing import violations

pytestmark = pytest.mark.slow

N = 48
LAYER = specs.TORCH_LAYER_NORM
RMS = specs.OLMO2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("asked", "change", "check", "expected", "found"),
    [
        (
            LAYER,
            {"centre_numerator": False, "centre_statistics": False},
            "centring",
            "the mean subtracted",
            "the mean not subtracted",
        ),
        (LAYER, {"correction": 1}, "divisor", "the sum of squares divided by n", "divided by n - 1"),
        (RMS, {"eps": 1e-5}, "eps", "1e-06 inside the root", "1e-05 inside the root"),
        (RMS, {"eps_placement": "outside"}, "eps", "1e-06 inside the root", "1e-06 outside the root"),
        (RMS, {"eps": 0.0}, "eps", "1e-06 inside the root", "none"),
        (specs.SCALE_NORM, {"eps": 1e-3}, "eps", "1e-05 as a lower bound", "0.001 as a lower bound"),
        (RMS, {"weight_offset": 1.0}, "offset", "weight", "1 + weight"),
        (RMS, {"has_bias": True}, "bias", "none", "added"),
        (specs.NANOCHAT, {"has_weight": True}, "gain", "none", "weight"),
        (specs.MUSE_SPARK, {"weight_placement": "before"}, "gain", "weight", "weight, before normalizing"),
        (specs.LLAMA, {"cast": "late"}, "casts", "rounded before the gain", "rounded once at the end (bfloat16)"),
        (
            specs.NANOCHAT,
            {"round_rstd": True},
            "casts",
            "at the end",
            "1/s rounded, rounded once at the end (bfloat16)",
        ),
        (specs.GEMMA, {"offset_dtype": "parameter"}, "offset dtype", "added in float32", "added in the weight's dtype"),
    ],
)
def test_a_convention_is_named_alone(asked, change, check, expected, found):
    [seen] = violations(nk.Norm(asked.replace(**change), N), asked, N, skip=("constant rows",))
    assert seen.check == check
    assert expected in seen.expected
    assert found in seen.found


def test_an_eps_in_other_words_is_the_same_eps():
    # 1e-6 under a mean of 48 squares is 4.8e-5 under their sum.
    mean = nk.Norm(RMS, N)
    words = RMS.replace(reduction="sum", multiplier="sqrt_n")
    assert violations(mean, words.replace(eps=4.8e-5)) == ()
    [seen] = violations(mean, words)
    assert (seen.check, seen.expected, seen.found) == ("eps", "1e-06 inside the root", "4.8e-05 inside the root")


def test_what_no_spec_describes_is_said_with_what_was_seen():
    class ByTheLargest(Gain):
        def forward(self, x):
            return (self.weight.float() * x.float() / x.float().abs().amax(-1, keepdim=True)).to(x.dtype)

    [seen] = violations(ByTheLargest(), RMS)
    assert seen.check == "formula"
    assert seen.expected == str(RMS)
    assert "in place of" in seen.found

    class Capped(Gain):
        def forward(self, x):
            return (torch.tanh(x) * self.weight).to(x.dtype)

    assert [violation.check for violation in violations(Capped(), RMS)] == ["rows"]


def test_bits_that_no_program_gives():
    class RoundedTwice(GainAndBias):
        def forward(self, x):
            wide = x.float()
            row = (wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(wide.var(-1, keepdim=True, correction=0) + 1e-5)
            return self.affine(row.to(torch.float8_e5m2).float() if x.dtype != torch.float32 else row, x)

    [seen] = violations(RoundedTwice(), LAYER, skip=("input gradient", "gain gradient", "bias gradient"))
    assert seen.check == "casts"
    assert "of the outputs so" in seen.found


def test_a_norm_that_cannot_be_identified_is_still_held_against_its_spec():
    class Stubborn(nn.Module):
        """It takes none of the large inputs that identify it."""

        def forward(self, x):
            assert not bool((x.abs() > 1e6).any())
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)

    checks = [violation.check for violation in violations(Stubborn(), specs.NANOCHAT, N, dtypes=(torch.float32,))]
    assert checks == ["eps"]


class WithoutTail(Gain):
    def forward(self, x):
        wide = x.float()
        squares = wide[..., : x.shape[-1] // 48 * 48].square().sum(-1, keepdim=True) / x.shape[-1]
        return (self.weight.float() * wide * torch.rsqrt(squares + self.eps)).to(x.dtype)


class RoundedGain(Gain):
    def forward(self, x):
        return (self.weight.bfloat16().float() * self.rms(x)).to(x.dtype)


class Clamped(Gain):
    def forward(self, x):
        return (self.weight.float() * self.rms(x.float().clamp(-1000, 1000))).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (WithoutTail(64), "(its statistics leave features out: 4 of 17 that were tried change no other output"),
        (RoundedGain(64), "(the gain acts as weight rounded to bfloat16)"),
        (Clamped(64), "up to a magnitude of 1000, where its input is clamped"),
    ],
)
def test_the_cause_that_identify_names_is_in_the_error(norm, words):
    seen = violations(norm, RMS, dtypes=(torch.float32,))[0]
    assert seen.check == "formula"
    assert words in seen.found
