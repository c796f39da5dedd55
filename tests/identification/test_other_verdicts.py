"""The verdict where no spec fits: each kind with its most telling line first; batch norms; norms with a wrong power."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from faulty_norms import GainAndBias
from normkit.errors import IdentificationError
from normkit.identification.behaviour import identify
from normkit.identification.passport import Passport
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.reference import forward
from normkit.spec import NormSpec


@pytest.mark.parametrize(
    ("norm", "shape", "verdict", "first"),
    [
        (nn.Identity(), 6, "identity", "its outputs are its inputs, bit for bit"),
        (nn.BatchNorm1d(6), 6, "batch", "in training mode, changing one sample moves the others"),
        (lambda x: x - x.mean(0), 6, "linear", "f(x + y) = f(x) + f(y) - f(0)"),
        (lambda x, gate: F.rms_norm(x, (6,)) * gate, 6, "gated", "gate multiplies elementwise after the norm"),
        (nn.Softmax(0), 6, "softmax", "outputs are positive, sum to 1 along axis 0"),
        (lambda x: F.dropout(x, 0.5), 6, "undecidable", "the same input gives different outputs"),
        (lambda x: x * (1 + 1e-6 * torch.rand(())), 6, "undecidable", "the same input gives different outputs"),
        (lambda x: x / x.abs().amax(-1, keepdim=True), 6, "norm", "it does not grow with its input"),
        (nn.Sequential(nn.Linear(6, 6), nn.Hardtanh()), 6, "not a norm", ""),
        (nn.Dropout(0.5), 6, "identity", ""),
        (nn.Linear(6, 6), 6, "linear", ""),
        (nn.Linear(6, 3), 6, "not a norm", ""),
        (nn.LSTM(6, 6), 6, "not a norm", ""),
        (lambda x, gate: torch.tanh(x) * gate, 6, "not a norm", ""),
        (nn.BatchNorm1d(6, track_running_stats=False), 6, "batch", ""),
        (nn.Sequential(nn.LayerNorm(6), nn.GELU()), 6, "norm", ""),
        (nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), 6, "not a norm", "its output grows"),
    ],
)
def test_each_has_its_line_first(norm, shape, verdict, first):
    passport = identify(norm, shape)
    assert (passport.verdict, passport.spec) == (verdict, None)
    assert next(iter(passport.readings)) == "kind"
    assert passport.evidence[0].startswith(first)
    again = Passport.from_json(json.loads(json.dumps(passport.to_json(), allow_nan=False)))
    assert again.verdict == verdict
    assert again.readings["kind"].value == verdict


def test_what_is_scale_invariant_but_for_its_bias_saturates():
    # With a bias in front, a norm behind it is no norm of the input.
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())
    passport = identify(module, 6)
    assert passport.verdict == "not a norm"
    assert "it saturates" in passport.evidence[1]


def test_several_tensors_without_a_norm_among_them():
    assert identify(lambda x: (x + 1, x), 6).verdict == "not a norm"
    with pytest.raises(IdentificationError, match=r"norm\(x\)\[1\]"):
        identify(lambda x: (x, F.layer_norm(x, (6,))), 6)


@pytest.mark.parametrize("norm", [torch.tanh, nn.Linear(6, 6), nn.Softmax(-1)])
def test_a_passport_without_a_formula_cannot_be_called(norm):
    with pytest.raises(IdentificationError, match="cannot be called"):
        identify(norm, 6)(torch.ones(2, 6))


def test_the_parameters_are_those_of_the_module_not_of_the_search():
    module = nn.BatchNorm1d(3)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([2.0, 3.0, 4.0]))
    assert identify(module, 3).weight.tolist() == pytest.approx([2.0, 3.0, 4.0], rel=1e-4)


N = 32


class Powered(GainAndBias):
    """A norm that divides by the variance or mean square to any power."""

    def __init__(self, power: float, centred: bool) -> None:
        super().__init__(N)
        self.power, self.centred = power, centred

    def forward(self, x):
        row = x - x.mean(-1, keepdim=True) if self.centred else x
        return self.weight * row / (row.square().mean(-1, keepdim=True) + self.eps) ** self.power + self.bias


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("power", [2.0, 1.0, 0.25, -0.5])
def test_the_power_is_read(power, centred):
    passport = identify(Powered(power, centred), (2, 5, N))
    assert passport.verdict == "not a norm"
    assert passport.readings["degree"].value == pytest.approx(1 - 2 * power, abs=0.01)
    assert ("standard deviation" if centred else "root mean square") in passport.readings["degree"].evidence[0]


def test_a_norm_and_an_identity_have_none():
    assert "degree" not in identify(Powered(0.5, True), N).readings
    assert "degree" not in identify(Powered(0.0, False), N).readings


class Gate(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x.mean(-1, keepdim=True))


class Sum(nn.Module):
    def forward(self, x):
        return x * x.sum(-1, keepdim=True)


class Mixes(nn.Module):
    def forward(self, x):
        return x @ x.transpose(-1, -2) @ x


@pytest.mark.parametrize(
    "module", [Gate(), Sum(), Mixes(), nn.GELU(), nn.Softmax(-1), nn.LogSoftmax(-1), nn.Linear(N, N)]
)
def test_other_maps_have_none(module):
    assert "degree" not in identify(module, (2, 5, N)).readings


def test_a_model_lists_it_among_the_norms_without_a_spec():
    model = nn.Sequential(nn.Linear(N, N), Powered(2.0, True), nn.Linear(N, N), nn.ReLU(), nn.LayerNorm(N))
    x = torch.randn(2, 5, N)
    with torch.no_grad():
        sites, others = find_sites(model, trace(model, lambda: model(x)))
    assert [site.path for site in sites] == ["4"]
    assert [other.path for other in others] == ["1"]
    assert "to the power -3.00, not 0" in others[0].reason


def test_a_constant_that_nearly_cancels():
    module = nn.BatchNorm1d(8).eval()
    with torch.no_grad():
        module.running_mean.copy_(torch.linspace(0.5, 1.5, 8))
        # bias - mean / sqrt(var + eps) * weight is 1e-8 here, and 3e-8 of that is rounding.
        module.bias.copy_(module.running_mean / (1 + module.eps) ** 0.5 + 1e-8)
    for shape in ((4, 8), (4, 8, 5)):
        assert identify(module, shape).verdict == "batch"


def trained(module, shape):
    """With running statistics, gain and bias that are not those of the start."""
    module.train()
    for _ in range(3):
        module(3 * torch.randn(shape) + 1)
    if module.affine:
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, 2, module.num_features))
            module.bias.copy_(torch.linspace(-1, 1, module.num_features))
    return module.eval()


@pytest.mark.parametrize(
    ("module", "shape", "axes"),
    [
        (nn.BatchNorm1d(6), (4, 6), [0]),
        (nn.BatchNorm1d(6, eps=1e-3), (4, 6, 5), [0, 2]),
        (nn.BatchNorm2d(3), (2, 3, 8, 8), [0, 2, 3]),
        (nn.BatchNorm2d(3, affine=False), (2, 3, 8, 8), [0, 2, 3]),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 6, 6), [2, 3]),
        (nn.InstanceNorm1d(4, track_running_stats=True), (2, 4, 9), [2]),
    ],
)
def test_running_statistics(module, shape, axes):
    trained(module, shape)
    passport = identify(module, shape)
    assert (passport.verdict, passport.spec) == ("batch", None)
    assert passport.readings["batch"].value == {
        "axes": axes,
        "mode": "training",
        "centred": True,
        "eps": module.eps,
        "eps_placement": "inside",
        "correction": 0,
    }
    x = torch.randn(5, *shape[1:])
    assert torch.allclose(passport(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zeros", [slice(0, 1), slice(2, None), slice(None)], ids=["first", "most", "all"])
def test_a_batch_norm_with_gains_of_0(zeros):
    module = trained(nn.BatchNorm2d(4), (2, 4, 6, 6))
    with torch.no_grad():
        module.weight[zeros] = 0
    passport = identify(module, (2, 4, 6, 6))
    assert (passport.verdict, passport.readings["batch"].value["axes"]) == ("batch", [0, 2, 3])
    assert torch.equal((passport.weight.flatten() == 0).expand(4), module.weight == 0)
    # With all of them 0, training mode has the same output.
    output = passport.readings["training"].value["output"]
    assert output == ("batch statistics" if module.weight.any() else "as in eval")


@pytest.mark.parametrize(
    ("norm", "shape", "axes"),
    [
        (nn.BatchNorm1d(6, track_running_stats=False), (4, 6), [0]),
        (nn.BatchNorm2d(3, track_running_stats=False), (2, 3, 4, 4), [0, 2, 3]),
        (lambda x: (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt(), (2, 3, 6), [0, 1, 2]),
    ],
)
def test_samples_that_are_coupled_in_eval_mode_too(norm, shape, axes):
    passport = identify(norm, shape)
    assert passport.verdict == "batch"
    value = passport.readings["batch"].value
    assert (value["axes"], value["mode"], value["centred"], value["eps"]) == (axes, "always", True, 1e-5)
    assert "changing one sample moves the others" in passport.evidence[0]


@pytest.mark.slow
def test_other_conventions_of_batch_statistics():
    def rms(x):
        return x / (x.square().mean((0, 2), keepdim=True).sqrt() + 1e-3)

    value = identify(rms, (2, 3, 6)).readings["batch"].value
    assert (value["centred"], value["eps"], value["eps_placement"]) == (False, 1e-3, "outside")
    unbiased = identify(lambda x: (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt(), 6).readings["batch"].value
    assert unbiased["correction"] == 1


def test_statistics_that_no_formula_explains():
    def by_range(x):
        centred = x - x.mean(0)
        # Of two samples, this is a batch norm: more are looked at than are given.
        return centred / centred.abs().amax(0)

    passport = identify(by_range, 6)
    assert passport.verdict == "batch"
    assert passport.readings["batch"].value == {"axes": [0], "mode": "always"}
    assert any("no formula" in line for line in passport.evidence)


@pytest.mark.parametrize(
    ("norm", "shape", "verdict"),
    [
        (nn.InstanceNorm2d(4), (2, 4, 6, 6), "norm"),
        (nn.InstanceNorm2d(4, affine=True), (2, 4, 6, 6), "norm"),
        (nn.InstanceNorm1d(4), (2, 4, 9), "norm"),
        # A block that holds a batch norm is none; nor is a map that draws random numbers in training mode.
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (2, 6), "linear"),
        (nn.Dropout(0.5), (2, 6), "identity"),
    ],
)
def test_what_is_no_batch_norm(norm, shape, verdict):
    assert identify(norm, shape).verdict == verdict


@pytest.mark.parametrize("affine", [False, True])
def test_instance_norms_are_specs(affine):
    module = nn.InstanceNorm2d(4, affine=affine)
    passport = identify(module, (2, 4, 6, 6))
    assert (passport.spec.has_weight, passport.spec.has_bias, passport.spec.eps) == (affine, affine, 1e-5)
    x = torch.randn(3, 4, 5, 7)
    assert torch.allclose(passport(x), module(x), atol=1e-5)


def test_the_module_keeps_its_statistics():
    module = nn.BatchNorm1d(6).train()
    identify(module, (4, 6))
    assert int(module.num_batches_tracked) == 0
    assert bool((module.running_mean == 0).all())
    assert module.training


class Narrow(nn.LayerNorm):
    """It rounds to 16 bits at one place, whatever dtype it is given."""

    def __init__(self, place, dtype=torch.bfloat16):
        super().__init__(64)
        self.place, self.dtype = place, dtype

    def at(self, place, x):
        return x.to(self.dtype).to(x.dtype) if place == self.place else x

    def forward(self, x):
        x = self.at("input", x)
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        rows = (x - self.at("statistics", mean)) * torch.rsqrt(self.at("statistics", variance) + 1e-5)
        return self.weight * self.at("rows", rows) + self.bias


@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        ("input", torch.bfloat16),
        ("statistics", torch.bfloat16),
        ("rows", torch.bfloat16),
        ("rows", torch.float16),
        ("", torch.bfloat16),
    ],
)
def test_a_norm_that_rounds_to_16_bits_whatever_it_is_given(place, dtype):
    passport = identify(Narrow(place, dtype), 64)
    if not place:
        assert passport.spec is not None
        return
    reading = passport.readings["rounding"]
    assert reading.value == str(dtype).removeprefix("torch.")
    assert reading.evidence[0].startswith(f"it rounds its {place} to {reading.value} whatever dtype it is given")
    assert "its formula in" in reading.evidence[0]
    assert "(x - mean(x)) / sqrt(var(x) + 1e-05)" in reading.evidence[0]


@pytest.mark.slow
@pytest.mark.parametrize("n", [48, 64])
def test_a_sum_of_squares_over_another_number_than_n_is_no_rounding(n):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(n))

        def forward(self, x):
            # A block of 64 holds 48 features; or a running average counts one too many.
            count = 64 if n == 48 else n + 1
            return self.weight * x * torch.rsqrt(x.square().sum(-1, keepdim=True) / count + 1e-6)

    passport = identify(Padded(), n)
    assert (passport.verdict, passport.spec) == ("norm", None)
    assert "rounding" not in passport.readings
    words = "64, the next power of two" if n == 48 else "65, n + 1"
    line = f", as where the sum of squares is divided by {words}, in place of n = {n}: no spec has"
    assert passport.cause.endswith(line)


class NarrowMean(nn.Module):
    """Its mean square or variance is computed in float16; its rows, too, where they are `all`."""

    def __init__(self, is_centred, whole):
        super().__init__()
        self.weight, self.is_centred, self.whole = nn.Parameter(torch.ones(64)), is_centred, whole

    def forward(self, x):
        narrow = x.half()
        mean = narrow.mean(-1, keepdim=True) if self.is_centred else torch.zeros((), dtype=torch.float16)
        variance = (narrow - mean).square().mean(-1, keepdim=True)
        if self.whole:
            return self.weight * ((narrow - mean) * torch.rsqrt(variance + 1e-5)).to(x.dtype)
        return self.weight * ((x - mean.to(x.dtype)) * torch.rsqrt(variance.to(x.dtype) + 1e-5))


@pytest.mark.parametrize("is_centred", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_norm_whose_statistics_are_computed_in_float16_whatever_it_is_given(is_centred, whole):
    """Its outputs for the large rows of the search are 0 or infinite: it was called no norm."""
    norm = NarrowMean(is_centred, whole)
    x = torch.randn(4, 64)
    exact = forward(
        x.double(),
        NormSpec(centre_numerator=is_centred, centre_statistics=is_centred, has_bias=False),
        norm.weight.double(),
    )
    off = float((norm(x).detach() - exact.detach()).norm() / exact.detach().norm())
    assert 1e-5 < off < torch.finfo(torch.float16).eps
    passport = identify(norm, 64)
    reading = passport.readings["rounding"]
    assert (passport.verdict, passport.spec, reading.value) == ("norm", None, "float16")
    place = "input" if whole else "statistics"
    assert reading.evidence[0].startswith(f"it rounds its {place} to float16 whatever dtype it is given")
    assert ("mean(x)) / sqrt(var(x)" if is_centred else "x / sqrt(mean(x^2)") in reading.evidence[0]


def test_what_overflows_and_is_no_norm_stays_none():
    def tanh_of_a_square(x):
        return torch.tanh(x) / (1 + x.half().square().float())

    assert identify(tanh_of_a_square, 64).verdict == "elementwise"
