"""The formula far from eps: degree, mirror symmetry, centring, gain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit import NormSpec
from normkit.conventions.rows import Rows
from normkit.identification import formula
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import undisturbed

SHAPE = (2, 3, 12)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("norm", "verdict", "reason"),
    [
        (nn.Identity(), "not a norm", "to the power 1.00"),
        (nn.GELU(), "not a norm", "to the power 1.00"),
        (lambda x: x.square(), "not a norm", "to the power 2.00"),
        # The reciprocal of the square root's place: x / var instead of x / sqrt(var).
        (lambda x: x / x.var(-1, keepdim=True), "not a norm", "to the power -1.00"),
        (lambda x: F.layer_norm(x, (12,)) + 0.01 * x.sign() * x.abs().log(), "not a norm", "direction|power"),
        (torch.zeros_like, "not a norm", "its output is zero"),
        (lambda x: x / 0, "not a norm", "not finite"),
        (nn.Softmax(-1), "norm", r"f\(x\) \+ f\(-x\) depends on x"),
        (nn.Sequential(nn.LayerNorm(12), nn.GELU()), "norm", r"f\(x\) \+ f\(-x\) depends on x"),
    ],
)
def test_what_is_not_of_degree_zero_and_odd(norm, verdict, reason, generator):
    with undisturbed(), pytest.raises(UnrecognisedError, match=reason) as refusal:
        formula.check_kind(Specimen(norm), SHAPE, generator)
    assert refusal.value.verdict == verdict


@pytest.mark.parametrize(("power", "degree"), [(1.0, "-1.00"), (2.0, "-3.00")])
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_wrong_power_is_named(bias, power, degree, generator):
    def slip(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5) ** power + bias

    reason = f"to the power {degree}, as where the mean square or variance to the power {power:g} divides"
    with undisturbed(), pytest.raises(UnrecognisedError, match=reason) as refusal:
        formula.check_kind(Specimen(slip), SHAPE, generator)
    assert refusal.value.verdict == "not a norm"


def test_squares_that_overflow_float16_are_undecidable(generator):
    def norm(x):
        return x / x.square().sum(-1, keepdim=True).sqrt()

    with (
        undisturbed(),
        pytest.raises(UnrecognisedError, match="in float16 the squares of its rows may overflow") as error,
    ):
        formula.check_kind(Specimen(norm, dtype=torch.float16), (2, 4096), generator)
    assert error.value.verdict == "undecidable"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_show_the_kind_and_the_centring(dtype, generator):
    spec = NormSpec(centre_numerator=False, statistics_dtype="input", cast="none")
    with undisturbed():
        specimen = Specimen(nk.Norm(spec, 12), dtype=dtype)
        assert "degree" in formula.check_kind(specimen, SHAPE, generator)
        found = formula.fit(formula.respond(specimen, SHAPE, generator), Rows())
    assert found.explains
    assert (found.spec.centre_numerator, found.spec.centre_statistics) == (False, True)


@pytest.mark.parametrize(
    ("norm", "saturates"),
    [
        (nn.Softmax(-1), True),
        (nn.Sequential(nn.Linear(12, 12), nn.Hardtanh()), True),
        (nn.Sequential(nn.LayerNorm(12), nn.GELU()), False),
        (nn.RMSNorm(12), False),
    ],
)
def test_what_only_saturates(norm, saturates, generator):
    with undisturbed():
        assert formula.saturates(Specimen(norm), SHAPE, generator) is saturates


def test_a_norm_is_of_degree_zero(generator):
    with undisturbed():
        line = formula.check_kind(Specimen(nn.LayerNorm(12)), SHAPE, generator)
    assert line == "inputs 64 times as large give the same output (degree 0.0000)"


@pytest.mark.parametrize("numerator", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_each_centring_is_told_from_the_others(numerator, statistics, generator):
    spec = NormSpec(centre_numerator=numerator, centre_statistics=statistics)
    module = nk.Norm(spec, 12)
    with undisturbed():
        specimen = Specimen(module)
        specimen.draw(generator)
        parity = formula.respond(specimen, SHAPE, generator)
        found = formula.fit(parity, Rows())
    assert (found.spec.centre_numerator, found.spec.centre_statistics) == (numerator, statistics)
    assert found.explains
    # float32 noise of the module, averaged over 16 samples; the parameters are of order 1.
    torch.testing.assert_close(found.gain, specimen.parameters["weight"].double().expand(3, 12), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parity.bias, specimen.parameters["bias"].double().expand(3, 12), rtol=1e-5, atol=1e-5)


def test_the_rows_have_different_means_whatever_their_length(generator):
    with undisturbed():
        parity = formula.respond(Specimen(nn.LayerNorm(4096)), (2, 4096), generator)
    # Means of random rows alone would differ by 1/64 of the rows' standard deviation.
    assert parity.x.mean(-1).std() > 0.5 * parity.x.std(-1).mean()


def test_a_norm_by_the_mean_magnitude_is_not_explained(generator):
    with undisturbed():
        parity = formula.respond(Specimen(lambda x: x / x.abs().mean(-1, keepdim=True)), SHAPE, generator)
        assert not formula.fit(parity, Rows()).explains


@pytest.mark.parametrize("numerator", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0, 2.0])
def test_a_gain_in_front(numerator, offset, generator):
    spec = NormSpec(
        centre_numerator=numerator, centre_statistics=False, weight_offset=offset, weight_placement="before"
    )
    with undisturbed():
        specimen = Specimen(nk.Norm(spec, 12))
        specimen.draw(generator)
        parity = formula.respond(specimen, SHAPE, generator)
        assert not formula.fit(parity, Rows()).explains
        found = formula.fit_before(specimen, parity, Rows())
    assert found.name == "weight"
    assert found.spec == spec.replace(eps=0.0, has_bias=False)
    assert found.scale == pytest.approx(1.0, rel=1e-6)


def test_a_gain_in_front_is_not_found_where_there_is_none(generator):
    with undisturbed():
        specimen = Specimen(nn.LayerNorm(12))
        specimen.draw(generator)
        parity = formula.respond(specimen, SHAPE, generator)
        assert formula.fit_before(specimen, parity, Rows()) is None
