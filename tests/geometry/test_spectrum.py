"""Spectra against dense decompositions, the exact norm and its bound; the condition number of the problem behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import jacrev, vmap

from helpers import arguments, assert_close, valid_specs
from normkit import NormSpec, demo, reference, specs
from normkit.errors import DtypeError, ShapeError, SpecError
from normkit.geometry import (
    centre,
    gauss_newton_condition,
    jacobian,
    jacobian_norm,
    jacobian_norm_bound,
    jacobian_spectrum,
    preconditioning,
)

EPS = st.sampled_from([0.0, 1e-12, 1e-5, 0.3, 10.0, None])
ANY_SPEC = valid_specs(eps=EPS, max_groups=1).map(lambda spec: spec.replace(axes=(-1,)))
LAYER_NORM = NormSpec(has_weight=False, has_bias=False, eps=0.3)
RMS_NORM = specs.NANOCHAT.replace(eps=0.3)
KINDS = [
    pytest.param(base.replace(eps_placement=placement), id=f"{name}-{placement}")
    for name, base in (
        ("layer", LAYER_NORM),
        ("rms", RMS_NORM),
        ("numerator", LAYER_NORM.replace(centre_statistics=False)),
        ("statistics", LAYER_NORM.replace(centre_numerator=False)),
    )
    for placement in ("inside", "outside", "clamp")
]


@pytest.mark.slow
@given(ANY_SPEC, st.integers(0, 99), st.integers(2, 12))
def test_spectrum_is_that_of_the_dense_jacobian(spec, seed, n):
    x, _, _ = arguments(spec, seed=seed, features=n)
    spectrum = jacobian_spectrum(x, spec)
    matrix = jacobian(x, spec)
    # What is subtracted to form the small ones; a whole Jacobian may vanish.
    size = spectrum.bulk[:, None] + torch.linalg.matrix_norm(matrix)[:, None]
    expected = torch.linalg.svdvals(matrix).flip(-1)
    assert_close(spectrum.singular_values(n), expected, units=64, terms=size)
    # The two eigenvalues, by their sum and their product.
    trace = spectrum.bulk * (n - 2) + spectrum.eigenvalues.sum(-1)
    assert_close(trace, matrix.diagonal(dim1=-2, dim2=-1).sum(-1), units=64, length=n, terms=n * size[:, 0])
    determinant = spectrum.bulk ** (n - 2) * spectrum.eigenvalues.prod(-1)
    assert_close(determinant, torch.linalg.det(matrix), units=64, length=n, terms=size[:, 0] ** n)


@pytest.mark.slow
@given(ANY_SPEC, st.integers(0, 99))
def test_one_feature_has_one_singular_value(spec, seed):
    spec = spec.replace(correction=0)
    x, _, _ = arguments(spec, seed=seed, features=1)
    expected = jacobian(x, spec).abs().squeeze(-1)
    spectrum = jacobian_spectrum(x, spec)
    assert_close(spectrum.singular_values(1), expected, units=64, terms=spectrum.bulk[:, None])
    assert_close(jacobian_norm(x, spec), expected.squeeze(-1), units=64, terms=spectrum.bulk)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_layer_norm(eps):
    x = torch.randn(3, 7, dtype=torch.float64)
    spec = LAYER_NORM.replace(eps=eps)
    spectrum, matrix = jacobian_spectrum(x, spec), jacobian(x, spec)
    scale = (x.var(-1, correction=0) + eps).sqrt()
    small = eps / scale**3
    assert_close(spectrum.bulk, 1 / scale)
    # To the last digits of the small value, which no dense decomposition finds.
    assert_close(spectrum.block, torch.stack([torch.zeros(3).double(), small], -1))
    assert_close(matrix, matrix.mT)
    assert_close((matrix @ torch.ones(7).double()), torch.zeros(3, 7).double(), terms=1 / scale[:, None])
    direction = centre(x)
    along = (matrix @ direction[..., None]).squeeze(-1)
    assert_close(along, small[:, None] * direction, units=16, terms=direction.abs().max() / scale[:, None])
    assert_close(matrix.diagonal(dim1=-2, dim2=-1).sum(-1), 5 / scale + small, length=7)
    assert_close(matrix.square().sum((-2, -1)), 5 / scale**2 + small**2, length=49)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_rms_norm(eps):
    x = torch.randn(3, 7, dtype=torch.float64)
    spec = RMS_NORM.replace(eps=eps)
    spectrum, matrix = jacobian_spectrum(x, spec), jacobian(x, spec)
    scale = (x.square().mean(-1) + eps).sqrt()
    small = eps / scale**3
    assert_close(spectrum.block, torch.stack([small, 1 / scale], -1))
    assert_close(spectrum.eigenvalues, torch.stack([1 / scale, small], -1))
    along = (matrix @ x[..., None]).squeeze(-1)
    assert_close(along, small[:, None] * x, units=16, terms=x.abs().max() / scale[:, None])
    assert_close(matrix.diagonal(dim1=-2, dim2=-1).sum(-1), 6 / scale + small, length=7)


@pytest.mark.parametrize("spec", KINDS[6:])
def test_block_of_a_norm_that_centres_half(spec):
    x = torch.randn(9, dtype=torch.float64) + 0.5
    basis = torch.stack([torch.ones_like(x) / 3, centre(x) / centre(x).norm()], -1)
    matrix = jacobian(x, spec)
    block = basis.mT @ matrix @ basis
    assert_close(matrix @ basis, basis @ block, units=16)
    spectrum = jacobian_spectrum(x, spec)
    assert_close(spectrum.block, torch.linalg.svdvals(block).flip(-1), units=16)
    eigenvalues = torch.linalg.eigvals(block).real.sort().values
    assert_close(spectrum.eigenvalues.sort().values, eigenvalues, units=16, terms=spectrum.bulk)
    # Neither is the other: the Jacobian is not normal.
    assert (spectrum.block - spectrum.eigenvalues.abs().sort().values).abs().max() > 1e-3


def test_one_feature_of_a_negative_eps():
    """It was the smaller value of the block, 2.236, which is that of no direction there."""
    spec = NormSpec(centre_numerator=False, centre_statistics=False, eps=-0.8)
    x = torch.ones(1, dtype=torch.float64)
    found = jacobian_spectrum(x, spec).singular_values(1)
    # |eps| / s**3 with s**2 = 0.2.
    assert_close(found, torch.tensor([0.8 / 0.2**1.5], dtype=torch.float64))
    assert_close(found, jacobian(x, spec)[0].abs())


@pytest.mark.parametrize("spec", KINDS)
def test_negative_eps_turns_the_radial_direction_round(spec):
    x = torch.randn(4, 6, dtype=torch.float64) + 0.5
    spec = spec.replace(eps=-0.1)
    spectrum, matrix = jacobian_spectrum(x, spec), jacobian(x, spec)
    assert_close(spectrum.singular_values(6), torch.linalg.svdvals(matrix).flip(-1), units=32)
    trace = 4 * spectrum.bulk + spectrum.eigenvalues.sum(-1)
    assert_close(trace, matrix.diagonal(dim1=-2, dim2=-1).sum(-1), units=32)


@pytest.mark.parametrize("spec", KINDS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_zero_and_constant_rows_are_finite_and_right(spec, n):
    x = torch.stack([torch.zeros(n), torch.full((n,), 2.0)]).double()
    expected = torch.linalg.svdvals(jacobian(x, spec)).flip(-1)
    values = jacobian_spectrum(x, spec).singular_values(n)
    assert_close(values, expected, units=16)
    assert_close(jacobian_norm(x, spec), expected[:, -1], units=16)
    for function in (
        lambda x: jacobian_spectrum(x, spec).singular_values(n),
        lambda x: jacobian_spectrum(x, spec).eigenvalues,
        lambda x: jacobian_norm(x, spec),
        lambda x: jacobian_norm(x, spec, torch.linspace(-1, 1, n).double()),
        lambda x: jacobian_norm_bound(x, spec, torch.linspace(-1, 1, n).double()),
    ):
        assert vmap(jacrev(function))(x).isfinite().all()


def test_shift_of_a_layer_norm_leaves_its_spectrum():
    x = torch.tensor([-1.0, 0.25, 0.5, 3.0], dtype=torch.float64)
    values = jacobian_spectrum(x, LAYER_NORM).singular_values(4)
    assert_close(jacobian_spectrum(x + 1e8, LAYER_NORM).singular_values(4), values)


def test_undefined_is_nan_in_its_own_row():
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]])
    spec = NormSpec(eps=0.0)
    assert jacobian_spectrum(x, spec).bulk.isfinite().tolist() == [False, True]
    for weight in (None, torch.tensor([1.0, 2.0, 3.0])):
        norm = jacobian_norm(x, spec, weight)
        assert norm.isnan().tolist() == [True, False]


@pytest.mark.slow
@given(ANY_SPEC, st.integers(0, 99), st.integers(2, 12))
def test_norm_is_the_largest_stretch(spec, seed, n):
    x, weight, _ = arguments(spec, seed=seed, features=n)
    matrix = jacobian(x, spec, weight)
    norm = jacobian_norm(x, spec, weight)
    size = jacobian_spectrum(x, spec).bulk + torch.linalg.matrix_norm(matrix)
    assert_close(norm, torch.linalg.matrix_norm(matrix, ord=2), units=64, terms=size)
    directions = torch.randn(n, 100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    stretch = (matrix @ directions).norm(dim=-2) / directions.norm(dim=-2)
    assert (stretch <= norm[:, None] + 1e-12 * size[:, None]).all()


@pytest.mark.slow
@given(ANY_SPEC, st.integers(0, 99), st.integers(1, 12))
def test_bound_holds(spec, seed, n):
    spec = spec.replace(correction=0) if n == 1 else spec
    x, weight, _ = arguments(spec, seed=seed, features=n)
    norm, bound = jacobian_norm(x, spec, weight), jacobian_norm_bound(x, spec, weight)
    gain = torch.ones(()) if weight is None else reference.effective_weight(weight, spec, x.dtype)
    inner = gain * x if spec.weight_placement == "before" else x
    rounding = 1e-14 * gain.abs().max() * jacobian_spectrum(inner, spec).bulk
    # At eps = 0 a centred row of one feature divides by 0.
    assert ((norm <= bound + rounding) | norm.isnan()).all()


@pytest.mark.parametrize(
    ("spec", "x", "gain"),
    [
        pytest.param(LAYER_NORM, [2.0, 2.0, 1.0, -4.0, 0.5], [-3.0, 3.0, 1.0, 0.1, 2.0], id="layer, two gains"),
        pytest.param(RMS_NORM, [0.0, 2.0, 1.0, -4.0], [-3.0, 2.9, 1.0, 0.1], id="rms, one gain at a zero"),
        pytest.param(LAYER_NORM, [0.0, 2.0, 1.0, -4.0], [3.0], id="layer, one gain for all"),
        pytest.param(RMS_NORM.replace(eps=0.0), [7.0, 2.0, 1.0, -4.0], [-3.0], id="rms, one gain for all"),
    ],
)
def test_bound_is_reached(spec, x, gain):
    x, gain = torch.tensor(x, dtype=torch.float64), torch.tensor(gain, dtype=torch.float64)
    spec = spec.replace(has_weight=True)
    for weight in (gain, gain - 1):
        spec = spec.replace(weight_offset=0.0 if weight is gain else 1.0)
        bound = jacobian_norm_bound(x, spec, weight)
        assert_close(bound, 3 / reference.statistics(x, spec, spec.eps).scale.squeeze(-1), units=4)
        assert_close(jacobian_norm(x, spec, weight), bound, units=16)


def test_bound_is_not_the_norm_elsewhere():
    x, gain = torch.randn(6, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 60.0], dtype=torch.float64)
    assert jacobian_norm(x, NormSpec(), gain) < 0.999 * jacobian_norm_bound(x, NormSpec(), gain)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spec", KINDS)
def test_transforms(spec):
    x, gain = torch.randn(2, 3, 5, dtype=torch.float64) + 0.5, torch.rand(5, dtype=torch.float64)
    for function in (
        lambda x: jacobian_spectrum(x, spec).block,
        lambda x: jacobian_norm(x, spec),
        lambda x: jacobian_norm(x, spec, gain),
        lambda x: jacobian_norm_bound(x, spec, gain),
    ):
        assert_close(vmap(vmap(function))(x), function(x), units=16)
        gradient = jacrev(lambda x, function=function: function(x).sum())(x)
        step = 1e-6 * torch.randn_like(x)
        # Central differences: their error is a third derivative times 1e-12.
        assert function(x + step).sum() - function(x - step).sum() == pytest.approx(
            2 * (gradient * step).sum().item(), rel=1e-5, abs=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_keep_the_dtype_of_x(dtype):
    x, gain = torch.randn(3, 5).to(dtype), torch.rand(5)
    spectrum = jacobian_spectrum(x, LAYER_NORM)
    wide = jacobian_spectrum(x.double(), LAYER_NORM)
    assert_close(spectrum.singular_values(5), wide.singular_values(5), dtype=dtype)
    assert_close(spectrum.eigenvalues, wide.eigenvalues, dtype=dtype)
    for function in (jacobian_norm, jacobian_norm_bound):
        assert_close(function(x, LAYER_NORM, gain), function(x.double(), LAYER_NORM, gain), dtype=dtype, units=16)


SCALE_FREE = {"layer": LAYER_NORM.replace(eps=0.0), "rms": RMS_NORM.replace(eps=0.0)}
SAMPLES, FEATURES = 400, 16


def gaussian() -> torch.Tensor:
    return torch.randn(SAMPLES, FEATURES, dtype=torch.float64)


@pytest.mark.slow
@given(st.integers(2, 30), st.integers(2, 8), st.integers(1, 8), st.integers(0, 99))
def test_condition_is_that_of_the_matrix_on_its_range(samples, features, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    rank = min(rank, samples, features)
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator).double()).Q for size in (samples, features)
    )
    stretch = torch.logspace(0, -2, rank, dtype=torch.float64)
    condition, found = gauss_newton_condition(left * stretch @ right.mT)
    assert found == rank
    # Of the matrix with singular values 1 ... 1/100, squared; the smallest is known to 100 machine epsilons.
    assert condition == pytest.approx(1e4 if rank > 1 else 1.0, rel=1e-11)
    matrix = (left * stretch @ right.mT).mT @ (left * stretch @ right.mT) / samples
    eigenvalues = torch.linalg.eigvalsh(matrix)[-rank:]
    assert condition == pytest.approx((eigenvalues[-1] / eigenvalues[0]).item(), rel=1e-9)


def test_condition_is_that_of_the_gauss_newton_matrix_of_a_linear_layer():
    x, weight = torch.randn(10, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    target = torch.randn(10, 2, dtype=torch.float64)

    def loss(weight):
        return 0.5 * (x @ weight.mT - target).square().sum(-1).mean()

    # For squared error the Gauss-Newton matrix is the Hessian: one block for each output.
    hessian = jacrev(jacrev(loss))(weight).reshape(6, 6)
    assert_close(gauss_newton_condition(x)[0], torch.linalg.cond(hessian), units=64)


def test_features_without_information():
    condition, rank = gauss_newton_condition(torch.zeros(3, 2))
    assert condition.isnan()
    assert rank == 0
    condition, rank = gauss_newton_condition(torch.tensor([[[1.0, torch.nan], [2.0, 3.0]], [[3.0, 4.0], [6.0, 8.0]]]))
    assert condition[1] == 1.0
    assert condition[0].isnan()
    assert rank.tolist() == [0, 1]
    assert jacrev(lambda x: gauss_newton_condition(x)[0].nan_to_num())(torch.zeros(3, 2)).isfinite().all()


@pytest.mark.parametrize("name", SCALE_FREE)
def test_a_norm_helps_rows_of_unequal_lengths_and_leaves_others(name):
    directions, spec = gaussian(), SCALE_FREE[name]
    plain = preconditioning(directions, spec)
    assert 0.8 < plain.ratio < 1.25
    assert (plain.raw_rank, plain.normalized_rank) == (FEATURES, FEATURES - (name == "layer"))
    longer = preconditioning(directions * torch.exp(3 * torch.randn(SAMPLES, 1, dtype=torch.float64)), spec)
    # The lengths are gone altogether: what is left is the condition number of the directions.
    assert_close(longer.normalized, plain.normalized, units=64)
    assert longer.ratio > 30
    # LayerNorm removes an offset along 1, RMSNorm does not; neither removes another.
    along_ones = preconditioning(directions + 10.0, spec).ratio
    assert along_ones > 300 if name == "layer" else 0.9 < along_ones < 1.1
    other = preconditioning(directions + 20.0 * centre(torch.linspace(-1, 1, FEATURES).double().roll(3)), spec)
    assert other.raw > 300
    assert 0.8 < other.ratio < 1.25


@pytest.mark.slow
@given(st.integers(1, 50))
def test_hurts_where_rare_directions_have_long_rows(k):
    rare = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64)
    x = torch.stack([*[torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)] * k, k**0.5 * rare])
    for spec in SCALE_FREE.values():
        found = preconditioning(x, spec)
        assert_close(found.raw, torch.ones(()).double(), units=64)
        assert_close(found.normalized, torch.tensor(float(k)).double(), units=64)
        assert_close(found.ratio, torch.tensor(1 / k, dtype=torch.float64), units=64, terms=torch.ones(()))


def test_bias_fills_the_direction_that_centring_emptied():
    x, gain = gaussian(), torch.linspace(0.5, 2, FEATURES, dtype=torch.float64)
    spec = NormSpec(eps=0.0)
    # The image lies in the plane of normal 1/g through b; a bias within the plane through 0 leaves it there.
    normal = (1 / gain) / (1 / gain).norm()
    within = torch.randn(FEATURES, dtype=torch.float64)
    within = within - (within @ normal) * normal
    flat = preconditioning(x, spec, gain, within)
    lifted = preconditioning(x, spec, gain, within + 1e-3 * normal)
    assert (flat.normalized_rank, lifted.normalized_rank) == (FEATURES - 1, FEATURES)
    assert lifted.normalized > 1e4 * flat.normalized
    assert preconditioning(x, spec, gain).normalized_rank == FEATURES - 1


@pytest.mark.slow
def test_trained_layer_norm_lowers_the_condition_by_dropping_a_direction(demo_directories):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_directories["layernorm"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(demo.text()[:8192], truncation=False, verbose=False)["input_ids"]
    kept = {}
    norm = model.transformer.h[4].ln_1
    norm.register_forward_pre_hook(lambda _, inputs: kept.update(x=inputs[0].double().flatten(0, -2)))
    with torch.no_grad():
        model(torch.tensor(tokens[: len(tokens) // 256 * 256]).reshape(-1, 256))
    x = kept["x"]
    assert len(x) >= 8 * x.shape[-1]
    found = preconditioning(x, SCALE_FREE["layer"])
    condition, _ = gauss_newton_condition(centre(x))
    assert found.ratio > 4
    # Nearly all of it is the direction 1, which the trained model leaves almost empty, not the equal lengths.
    assert 0.7 < condition / found.normalized < 1.6


def test_transforms_and_dtypes():
    x = torch.randn(3, 10, 4, dtype=torch.float64)
    condition, rank = vmap(gauss_newton_condition)(x)
    expected, expected_rank = gauss_newton_condition(x)
    assert_close(condition, expected)
    assert torch.equal(rank, expected_rank)
    step = 1e-6 * torch.randn(10, 4, dtype=torch.float64)
    gradient = jacrev(lambda x: gauss_newton_condition(x)[0])(x[0])
    change = gauss_newton_condition(x[0] + step)[0] - gauss_newton_condition(x[0] - step)[0]
    assert change == pytest.approx(2 * (gradient * step).sum().item(), rel=1e-6)
    for dtype in (torch.bfloat16, torch.float32):
        found = preconditioning(x.to(dtype), SCALE_FREE["rms"])
        assert found.raw.dtype == found.normalized.dtype == dtype
        # A squared ratio of two rounded numbers, each known to about 3 units of bfloat16.
        assert found.ratio.item() == pytest.approx(preconditioning(x, SCALE_FREE["rms"]).ratio.item(), rel=0.05)


def test_rows_of_any_leading_shape_are_one_set():
    x, gain = torch.randn(3, 10, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    found = preconditioning(x, NormSpec(has_bias=False), gain)
    flat = reference.forward(x.reshape(30, 4), NormSpec(has_bias=False), gain)
    assert_close(found.normalized, gauss_newton_condition(flat)[0], units=64)
    assert_close(found.raw, gauss_newton_condition(x.reshape(30, 4))[0], units=64)


def test_what_cannot_be_used_is_refused():
    x = torch.randn(2, 3, 4)
    for function in (jacobian_spectrum, jacobian_norm, jacobian_norm_bound, preconditioning):
        for axes in ((-2, -1), (1,), "all_but_batch"):
            with pytest.raises(SpecError, match="last axis"):
                function(x, NormSpec(axes=axes))
        with pytest.raises(DtypeError, match="floating"):
            function(torch.ones(3, 2, dtype=torch.int64), NormSpec())
    with pytest.raises(ShapeError, match="at least 1 feature"):
        jacobian_spectrum(x, NormSpec()).singular_values(0)
    for features, words in ((torch.randn(3), r"shape \(N, n\)"), (torch.randn(0, 3), "N >= 1")):
        with pytest.raises(ShapeError, match=words):
            gauss_newton_condition(features)
