"""Where a norm rounds to 16 bits, from its bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit import NormSpec, reference, specs
from normkit.identification import program
from normkit.identification.affine import Affine
from normkit.identification.specimen import Specimen, undisturbed

BOTH = Affine(weight="weight", bias="bias")
WEIGHT = Affine(weight="weight")


def recovered(norm, spec, affine, n=64, seed=0):
    with undisturbed():
        return program.recover(Specimen(norm), spec, affine, (2, 3, n), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("output_dtype", ["input", "promote", "weight"])
@pytest.mark.parametrize(
    "casts",
    [
        {"cast": "late"},
        {"cast": "early"},
        {"cast": "weight"},
        {"cast": "none", "statistics_dtype": "input"},
        {"cast": "late", "round_rstd": True},
        {"cast": "early", "offset_dtype": "parameter"},
        {"cast": "late", "offset_dtype": "parameter"},
    ],
)
def test_every_program_is_told_from_the_others(casts, output_dtype):
    class Exact(nk.Norm):
        """By the reference: kernels differ from it in the last bit of a float32, as two of these programs do."""

        def forward(self, x):
            return reference.forward(x, self.spec, self.weight, self.bias)

    spec = NormSpec(weight_offset=1.0, output_dtype=output_dtype, **casts)
    plain = NormSpec(weight_offset=1.0)
    found = recovered(Exact(spec, 64), plain, BOTH)
    assert found.spec == spec
    assert found.rate == 1.0
    assert found.doubts == ()


@pytest.mark.parametrize("seed", range(5))
def test_the_offset_of_a_short_weight_is_drawn_often_enough(seed):
    # One draw of four entries loses no bit to the offset in one case of three.
    spec = NormSpec(weight_offset=1.0, offset_dtype="parameter")
    assert recovered(nk.Norm(spec, 4), NormSpec(weight_offset=1.0), BOTH, n=4, seed=seed).spec == spec


def test_what_makes_no_difference_stays_simple():
    plain = NormSpec(has_weight=False, has_bias=False)
    found = recovered(nk.Norm(plain.replace(cast="early", output_dtype="promote"), 64), plain, Affine())
    assert (found.spec, found.doubts) == (plain, ())


def test_torch_rounds_once():
    # Float32 in place of the reference's float64 flips a rounding in a thousand.
    for module, affine in ((nn.LayerNorm(384), BOTH), (nn.RMSNorm(384, eps=1e-6), WEIGHT)):
        spec = specs.TORCH_LAYER_NORM if affine is BOTH else specs.OLMO2
        found = recovered(module, spec, affine, n=384)
        assert found.spec == spec
        assert found.rate > 0.995


def test_squares_that_overflow_in_float16():
    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    found = recovered(rms, specs.NANOCHAT, Affine())
    assert (found.spec.statistics_dtype, found.spec.cast) == ("input", "none")
    assert "overflow in float16" in found.evidence[-1]
    wide = recovered(lambda x: rms(x.float()).to(x.dtype), specs.NANOCHAT, Affine())
    assert wide.spec == specs.NANOCHAT
    assert not any("overflow" in line for line in wide.evidence)


@pytest.mark.parametrize("n", [4, 6])
def test_overflow_in_rows_so_short_that_some_have_one_sign(n):
    found = recovered(lambda x: x / (x.var(-1, keepdim=True) + 1e-6).sqrt(), specs.NANOCHAT, Affine(), n=n)
    assert found.spec.statistics_dtype == "input"
    assert "overflow in float16" in found.evidence[-1]


def test_bits_that_no_program_gives_are_doubted():
    class GainFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return x * (self.weight * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5))

    found = recovered(GainFirst(), specs.POCKET_TTS, WEIGHT)
    assert found.spec == specs.POCKET_TTS
    assert found.rate < 0.6
    assert "no program gives its bits" in found.doubts[0]


def test_a_gain_out_of_reach_is_doubted():
    weight = torch.full((64,), 2.0)
    found = recovered(lambda x: F.rms_norm(x, (64,), weight), specs.OLMO2, Affine(weight=weight))
    assert found.spec == specs.OLMO2
    assert found.doubts == ("its casts: gain or bias is no parameter that can be set",)


def test_what_does_not_run_in_bfloat16_is_doubted():
    class Float32Only(nn.LayerNorm):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return super().forward(x)

    found = recovered(Float32Only(64), specs.TORCH_LAYER_NORM, BOTH)
    assert found.doubts == ("its casts: it does not run in bfloat16",)


def test_the_rate_of_another_instance():
    with undisturbed():
        generator = torch.Generator().manual_seed(0)
        specimen = Specimen(nk.Norm(specs.LLAMA, 64))
        specimen.draw(generator)
        assert program.rate_of(specimen, specs.LLAMA, WEIGHT, (2, 64), generator) == 1.0
        assert program.rate_of(specimen, specs.OLMO2, WEIGHT, (2, 64), generator) < 0.9
