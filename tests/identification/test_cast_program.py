"""Where a norm rounds to 16 bits, from its bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit import NormSpec, reference, specs
from normkit.identification import cast_program
from normkit.identification.gain_and_bias import Affine
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed

BOTH = Affine(weight="weight", bias="bias")
WEIGHT = Affine(weight="weight")


def recovered(norm, spec, affine, n=64, seed=0):
    with undisturbed():
        return cast_program.recover(Specimen(norm), spec, affine, (2, 3, n), torch.Generator().manual_seed(seed))


def opened(found):
    return {name: reading.undecidable for name, reading in found.readings.items() if reading.undecidable}


def seen(found):
    return " ".join(line for reading in found.readings.values() for line in reading.evidence)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("output_dtype", ["input", "promote", "weight", "float32"])
@pytest.mark.parametrize(
    "casts",
    [
        {"cast": "late"},
        {"cast": "early"},
        {"cast": "weight"},
        # 1 + weight in float32, then rounded, has the bits of a sum in 16 bits.
        {"cast": "input", "weight_offset": 0.0},
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

    spec = NormSpec(**{"weight_offset": 1.0, "output_dtype": output_dtype, **casts})
    plain = NormSpec(weight_offset=spec.weight_offset)
    found = recovered(Exact(spec, 64), plain, BOTH)
    assert found.spec == spec
    assert found.rate == 1.0
    assert opened(found) == {}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_offset_of_a_short_weight_is_drawn_often_enough(seed):
    # One draw of four entries loses no bit to the offset in one case of three.
    spec = NormSpec(weight_offset=1.0, offset_dtype="parameter")
    assert recovered(nk.Norm(spec, 4), NormSpec(weight_offset=1.0), BOTH, n=4, seed=seed).spec == spec


def test_what_makes_no_difference_stays_simple():
    plain = NormSpec(has_weight=False, has_bias=False)
    found = recovered(nk.Norm(plain.replace(cast="early", output_dtype="promote"), 64), plain, Affine())
    assert (found.spec, opened(found)) == (plain, {})


@pytest.mark.parametrize("n", [8, 384])
@pytest.mark.parametrize(
    ("module", "spec"),
    [
        (lambda n: nn.LayerNorm(n), specs.TORCH_LAYER_NORM),
        (lambda n: nn.RMSNorm(n, eps=1e-6), specs.OLMO2),
        (lambda n: nk.LayerNorm(n), specs.TORCH_LAYER_NORM),
        (lambda n: nk.RMSNorm(n, eps=1e-6), specs.OLMO2),
        (lambda n: nk.Norm(specs.LLAMA, n), specs.LLAMA),
    ],
)
def test_kernels_round_once(module, spec, n):
    found = recovered(module(n), spec.replace(cast="late", output_dtype="input"), BOTH if spec.has_bias else WEIGHT, n)
    assert (found.spec, opened(found)) == (spec, {})
    # 99.9 % is the bar; float32 in place of float64 flips a few in ten thousand.
    assert found.rate > 0.999


def test_the_runner_up_and_both_dtypes_are_told():
    line = recovered(nk.Norm(specs.LLAMA, 64), specs.OLMO2, WEIGHT).readings["casts"].evidence[0]
    own, other = line.split("; next best program ")
    assert "in bfloat16 and" in own
    assert own.startswith("the program (statistics in float32, rounded before the gain) gives ")
    assert float(other.split(": ")[-1].split("%")[0]) < 96


class EarlyIn(nn.Module):
    """LLAMA's casts for inputs of some dtypes, OLMO2's for others."""

    def __init__(self, *dtypes):
        super().__init__()
        self.weight, self.dtypes = nn.Parameter(torch.ones(64)), dtypes

    def forward(self, x):
        spec = specs.LLAMA.replace(output_dtype="input") if x.dtype in self.dtypes else specs.OLMO2
        return reference.forward(x, spec, self.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_program_that_depends_on_the_dtype_is_open_and_told(dtype):
    reason = opened(recovered(EarlyIn(dtype), specs.OLMO2, WEIGHT))["casts"]
    late, early = ("bfloat16", "float16") if dtype == torch.float16 else ("float16", "bfloat16")
    assert "depends on the input's dtype" in reason
    assert f"in {early} statistics in float32, rounded before the gain" in reason
    assert f"in {late} statistics in float32, rounded once at the end" in reason


def test_one_program_in_both_is_not_taken_for_two():
    found = recovered(EarlyIn(torch.float16, torch.bfloat16), specs.OLMO2, WEIGHT)
    assert (found.spec.cast, opened(found)) == ("early", {})


def test_what_runs_in_one_dtype_only_is_decided_there():
    class NotInFloat16(nk.Norm):
        def forward(self, x):
            if torch.float16 in (x.dtype, self.weight.dtype):
                raise RuntimeError("no float16")
            return super().forward(x)

    found = recovered(NotInFloat16(specs.LLAMA, 64), specs.OLMO2, WEIGHT)
    assert found.spec == specs.LLAMA
    assert found.readings["casts"].evidence[1] == "the norm runs in bfloat16, not in the other 16-bit dtype"


def test_a_late_cast_of_99_percent_is_not_enough():
    class Noisy(nn.Module):
        """One output in 200 is an ulp off."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            y = reference.forward(x, specs.OLMO2, self.weight)
            off = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.005
            return torch.where(off, y * (1 + 2 * torch.finfo(y.dtype).eps), y)

    found = recovered(Noisy(), specs.OLMO2, WEIGHT)
    assert (
        "no program gives its bits; the nearest (statistics in float32, rounded once at the end) gives 99."
        in opened(found)["casts"]
    )
    assert not found.is_matched


@pytest.mark.parametrize("shape", [(), (1,), (64,), (3, 64)])
@pytest.mark.parametrize("offset_dtype", ["float32", "parameter"])
def test_an_offset_on_weights_of_any_shape(shape, offset_dtype):
    class Shaped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

        def forward(self, x):
            return reference.forward(x, specs.GEMMA.replace(offset_dtype=offset_dtype), self.weight)

    found = recovered(Shaped(), specs.GEMMA, WEIGHT)
    assert (found.spec.offset_dtype, opened(found)) == (offset_dtype, {})
    assert "added in" in found.readings["offset dtype"].evidence[0]


def test_the_eps_of_the_inputs_own_dtype_is_seen_in_its_bits():
    class Own(nn.RMSNorm):
        def forward(self, x):
            return F.rms_norm(x, self.normalized_shape, self.weight, torch.finfo(x.dtype).eps)

    found = recovered(Own(64), specs.TORCH_RMS_NORM, WEIGHT)
    assert "0.0078125 in bfloat16 and 0.000976562 in float16" in opened(found)["eps"]
    assert found.spec == specs.TORCH_RMS_NORM.replace(eps=2.0**-23)
    assert "eps" not in recovered(nn.RMSNorm(64), specs.TORCH_RMS_NORM, WEIGHT).readings


def test_squares_that_overflow_in_float16():
    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    found = recovered(rms, specs.NANOCHAT, Affine())
    assert (found.spec.statistics_dtype, found.spec.cast) == ("input", "none")
    assert "overflow in float16" in seen(found)
    wide = recovered(lambda x: rms(x.float()).to(x.dtype), specs.NANOCHAT, Affine())
    assert wide.spec == specs.NANOCHAT
    assert "overflow" not in seen(wide)


def test_an_overflow_tells_the_statistics_where_no_program_gives_the_bits():
    def coarse(x):
        return rms(x.to(torch.float8_e4m3fn).to(x.dtype))

    def rms(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    found = recovered(coarse, specs.NANOCHAT, Affine())
    assert "no program gives its bits" in opened(found)["casts"]
    assert found.readings["casts"].value == {"statistics_dtype": "input"}
    assert recovered(lambda x: coarse(x.float()).to(x.dtype), specs.NANOCHAT, Affine()).readings["casts"].value is None


@pytest.mark.parametrize("n", [4, 6])
def test_overflow_in_rows_so_short_that_some_have_one_sign(n):
    found = recovered(lambda x: x / (x.var(-1, keepdim=True) + 1e-6).sqrt(), specs.NANOCHAT, Affine(), n=n)
    assert found.spec.statistics_dtype == "input"
    assert "overflow in float16" in seen(found)


class GainFirst(nn.Module):
    """As `PocketTTSTimestepNorm` writes it: the gain goes into 1/s."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x * (self.weight * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5))


def test_the_order_of_operations_decides_bits_and_is_told():
    found = recovered(GainFirst(), specs.POCKET_TTS, WEIGHT)
    assert found.spec == specs.POCKET_TTS
    assert found.rate == 1.0
    assert "computed as x * (gain / s), v by torch.var" in seen(found)


def test_bits_that_no_program_gives_are_doubted():
    class Twice(GainFirst):
        """Rounds to 8 bits on the way."""

        def forward(self, x):
            return super().forward(x.to(torch.float8_e4m3fn).to(x.dtype))

    found = recovered(Twice(), specs.POCKET_TTS, WEIGHT)
    assert found.rate < 0.6
    assert "no program gives its bits" in opened(found)["casts"]


def test_a_gain_out_of_reach_is_doubted():
    weight = torch.full((64,), 2.0)
    found = recovered(lambda x: F.rms_norm(x, (64,), weight), specs.OLMO2, Affine(weight=weight))
    assert found.spec == specs.OLMO2
    assert "no parameter that can be set" in opened(found)["casts"]


def test_what_does_not_run_in_bfloat16_is_doubted():
    class Float32Only(nn.LayerNorm):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return super().forward(x)

    found = recovered(Float32Only(64), specs.TORCH_LAYER_NORM, BOTH)
    assert "does not run in bfloat16 or float16" in opened(found)["casts"]


def test_the_rate_of_another_instance():
    with undisturbed():
        generator = torch.Generator().manual_seed(0)
        specimen = Specimen(nk.Norm(specs.LLAMA, 64))
        specimen.draw(generator)
        assert cast_program.rate_of(specimen, specs.LLAMA, WEIGHT, (2, 64), generator) == 1.0
        assert cast_program.rate_of(specimen, specs.OLMO2, WEIGHT, (2, 64), generator) < 0.9


@pytest.mark.parametrize(("norm", "spec", "affine"), [(nn.LayerNorm(64), specs.TORCH_LAYER_NORM, BOTH)])
def test_rows_are_normalized_once_for_programs_that_round_them_alike(norm, spec, affine, monkeypatch):
    made = []
    monkeypatch.setattr(reference, "normalized", lambda *given, run=reference.normalized: made.append(1) or run(*given))
    assert seen(recovered(norm, spec, affine))
    # Four ways to round 1/s and the statistics, two runs for each of two dtypes; 66 without what they share.
    assert 0 < len(made) <= 20
