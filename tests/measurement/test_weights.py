"""Gains and biases described, matrices as drawn or trained, batch norms without statistics."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.facts import Spectrum
from normkit.measurement.weights import gradient_errors, recurring_outliers, row_scatter, spectrum

INITIALISERS = (
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    lambda weight: nn.init.sparse_(weight, 0.5),
)


def test_the_entries_are_described():
    values = torch.tensor([[3.0, -1.0], [0.0, 2.0]])
    found = spectrum(values, 1.0)
    assert found.size == 4
    assert found.mean == 1.0
    assert found.quantiles == pytest.approx((-1.0, -0.85, -0.25, 1.0, 2.25, 2.85, 3.0))
    assert found.negative == 0.25
    assert found.nonfinite == 0


@pytest.mark.parametrize(
    ("values", "neutral", "expected"),
    [
        ([1.0, 1.0], 1.0, True),
        ([0.0, 0.0], 0.0, True),
        ([1.0, 1.0], 0.0, False),
        ([1.0, 1.0 + 1e-15], 1.0, False),
        ([1.0, math.nan], 1.0, False),
    ],
)
def test_at_initialisation_means_exactly(values, neutral, expected):
    assert spectrum(torch.tensor(values, dtype=torch.float64), neutral).at_initialisation is expected


def test_outliers_come_farthest_first():
    values = torch.randn(1000, dtype=torch.float64) * 0.1 + 1
    values[[7, 500, 999]] = torch.tensor([9.0, -30.0, 4.0], dtype=torch.float64)
    assert spectrum(values, 1.0).outliers == ((500, -30.0), (7, 9.0), (999, 4.0))


def test_an_outlier_is_more_than_six_robust_deviations_away():
    # The median is 0 and so many entries lie at -1 and 1 that the median absolute deviation is 1.
    values = torch.cat([torch.ones(30), -torch.ones(30), torch.tensor([0.0, 6 * 1.4826 + 0.01, -6 * 1.4826 + 0.01])])
    assert [index for index, _ in spectrum(values, 0.0).outliers] == [61]


def test_at_most_sixteen_outliers():
    values = torch.zeros(200)
    values[:40] = torch.arange(1.0, 41.0)
    outliers = spectrum(values, 0.0).outliers
    assert [value for _, value in outliers] == list(range(40, 24, -1))


def test_neighbouring_16_bit_numbers_are_no_outliers():
    # More than half of the entries agree, so the median absolute deviation is 0.
    values = torch.full((100,), 1.0)
    values[:20] = 1 + torch.finfo(torch.bfloat16).eps
    assert spectrum(values, 1.0).outliers == ()


def test_entries_that_are_not_finite_are_counted_and_left_out():
    values = torch.linspace(0.5, 1.5, 101, dtype=torch.float64)
    clean = spectrum(values, 1.0)
    broken = spectrum(torch.cat([torch.tensor([math.nan, -math.inf, math.inf]), values]), 1.0)
    assert broken.nonfinite == 3
    assert broken.size == 104
    assert (broken.mean, broken.quantiles, broken.outliers) == (clean.mean, clean.quantiles, clean.outliers)


def test_nothing_finite():
    found = spectrum(torch.tensor([math.nan, math.inf]), 1.0)
    assert (found.size, found.nonfinite, found.outliers, found.at_initialisation) == (2, 2, (), False)
    assert math.isnan(found.mean)
    assert all(math.isnan(value) for value in found.quantiles)


def with_outliers(size: int, *indices: int) -> Spectrum:
    return Spectrum(
        size=size,
        mean=1.0,
        quantiles=(1.0,) * 7,
        negative=0.0,
        at_initialisation=False,
        nonfinite=0,
        outliers=tuple((index, 9.0) for index in indices),
    )


def test_a_feature_recurs_at_three_sites_of_one_size():
    spectra = {
        "a": with_outliers(64, 5, 11),
        "q": with_outliers(16, 11),
        "b": with_outliers(64, 5, 11),
        "c": with_outliers(64, 5),
        "d": with_outliers(64, 7),
    }
    assert recurring_outliers(spectra) == ((5, ("a", "b", "c")),)


@pytest.mark.parametrize(("sites", "expected"), [(12, ((3, ("0", "1", "2")),)), (13, ())])
def test_a_feature_recurs_at_a_quarter_of_the_sites(sites, expected):
    assert recurring_outliers({str(i): with_outliers(64, *([3] if i < 3 else [])) for i in range(sites)}) == expected


def test_the_most_frequent_feature_comes_first():
    spectra = {str(i): with_outliers(8, *([2, 6, 1] if i else [6])) for i in range(4)}
    assert [index for index, _ in recurring_outliers(spectra)] == [6, 1, 2]


def model(initialise, layers=8):
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    for number, layer in enumerate(made):
        initialise(layer.weight)
        layer.weight.data *= 0.5**number
    return made


@pytest.mark.parametrize("initialise", INITIALISERS)
def test_independent_entries_of_any_distribution_and_scale(initialise):
    # The variance of 64 numbers is off by 18 %, the median of eight such by 8 %.
    assert row_scatter(model(initialise)) == pytest.approx(1.0, abs=0.3)


def test_rows_of_several_lengths():
    made = model(nn.init.normal_)
    for layer in made:
        layer.weight.data *= torch.linspace(0.7, 1.3, 64)[:, None]
    assert row_scatter(made) > 2


def test_rows_of_zeros_and_small_matrices_do_not_count():
    made = model(nn.init.normal_)
    for layer in made:
        layer.weight.data[:8] = 0
    assert row_scatter(made) == pytest.approx(1.0, abs=0.3)
    assert math.isnan(row_scatter(nn.Linear(8, 8)))


WIDTH = 64
# One rounding of a sum taken in float32, in bfloat16 and float16; and what sums in 16 bits leave over 4096 rows.
ROUNDED = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
SUMMED_IN_HALF = {torch.bfloat16: 0.1, torch.float16: 1e-2}


class Own(nn.Module):
    """An RMSNorm whose gain's gradient is rounded once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x):
        self.calls += x.shape[0] > 100
        wide = x.float()
        return (self.weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


class Detached(Own):
    def forward(self, x):
        return super().forward(x).detach()


class Called(nn.Module):
    """Norms as functions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        x = F.layer_norm(self.inner(x), (WIDTH,), self.gain, self.bias)
        return F.rms_norm(self.inner(x), (WIDTH,), self.gain, 1e-6)


def errors(model, dtype, entering=None):
    model = model.to(dtype)
    x = torch.randn(2, WIDTH).to(dtype)
    with torch.no_grad():
        sites, _ = find_sites(model, trace(model, lambda: model(x)))
        name = str(entering or dtype).removeprefix("torch.")
        return gradient_errors(sites, {site.path: name for site in sites})


def gain_errors(*arguments):
    """Those of the gains alone."""
    return {path: each.of_gain for path, each in errors(*arguments).items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_layer_norm_sums_in_16_bits_on_the_cpu(dtype):
    found = gain_errors(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Own()), dtype)
    assert found["0"] > SUMMED_IN_HALF[dtype]
    assert found["2"] < ROUNDED[dtype]


def test_functions_are_tried_too():
    layer, root = gain_errors(Called(), torch.bfloat16).values()
    assert layer > SUMMED_IN_HALF[torch.bfloat16]
    assert root < ROUNDED[torch.bfloat16]


def test_in_float32_no_gain_is_tried_but_16_bit_inputs_of_float32_gains_are():
    assert math.isnan(gain_errors(Own(), torch.float32)[""])
    assert gain_errors(Own(), torch.float32, torch.bfloat16)[""] < ROUNDED[torch.bfloat16]


def test_what_has_no_gradient_is_not_known():
    model = nn.Sequential(Detached(), nn.LayerNorm(WIDTH, elementwise_affine=False))
    found = errors(model, torch.bfloat16)
    assert all(math.isnan(each.of_gain) for each in found.values())
    assert [math.isnan(each.of_input) for each in found.values()] == [True, False]


class Constant(Own):
    """Statistics without a gradient."""

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (self.weight.float() * (wide * scale.detach())).to(x.dtype)


class Shared(Constant):
    """The same where it is told to."""

    def __init__(self, is_detached):
        super().__init__()
        self.is_detached = is_detached

    def forward(self, x):
        return super().forward(x) if self.is_detached else Own.forward(self, x)


class Cut(Own):
    """The gain alone has a gradient."""

    def forward(self, x):
        return super().forward(x.detach())


class InPlace(nn.Module):
    def forward(self, x):
        return x.div_(x.square().mean(-1, keepdim=True).add(1e-6).sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_input_shows_statistics_without_one(dtype):
    norms = [Own(), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, elementwise_affine=False), InPlace()]
    norms += [Shared(is_detached=False), Constant(), Shared(is_detached=True), Cut()]
    found = [each.of_input for each in errors(nn.Sequential(*norms), dtype).values()]
    assert max(found[:5]) < (2e-2 if dtype == torch.bfloat16 else 1e-6)
    # Of the output's gradient 0.5 + x + noise, x is along the row; without it a square of 1.25 is left.
    assert found[5:7] == pytest.approx([math.sqrt(1 / 1.25)] * 2, rel=0.03)
    assert found[7] == 1.0


@pytest.mark.slow
def test_the_gradient_of_a_function_and_of_rows_of_channels_is_that_of_its_formula():
    assert all(each.of_input < 1e-6 for each in errors(Called(), torch.float32).values())
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 1), nn.LayerNorm((8, 5, 5)))
    x = torch.randn(2, 8, 5, 5)
    with torch.no_grad():
        sites, _ = find_sites(model, trace(model, lambda: model(x)))
    found = gradient_errors(sites, {site.path: "float32" for site in sites})
    assert len(found) == 2
    assert all(each.of_input < 1e-6 for each in found.values())


def test_like_norms_are_tried_once_and_left_as_they_are(monkeypatch):
    from normkit.measurement import weights

    tried, measure = [], weights._errors
    monkeypatch.setattr(weights, "_errors", lambda site, *rest: tried.append(site.path) or measure(site, *rest))
    model = nn.Sequential(Own(), nn.Linear(WIDTH, WIDTH), Own(), nn.LayerNorm(WIDTH))
    found = errors(model, torch.bfloat16)
    assert tried == ["0", "3"]
    assert found["0"] == found["2"]
    assert model[0].calls == 0
    assert model[0].weight.grad is None


def test_classes_that_share_a_name_are_tried_apart():
    class LayerNorm(nn.Module):
        """In float32 inside, so that the gain's gradient is rounded once."""

        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            return F.layer_norm(x.float(), (WIDTH,), self.weight.float(), self.bias.float()).to(x.dtype)

    model = nn.Sequential(LayerNorm(), nn.LayerNorm(WIDTH))
    own, torchs = gain_errors(model, torch.bfloat16).values()
    assert own < 1e-2 < torchs
