"""Condition numbers of the problem behind a norm: by definition, and where a norm helps, does nothing and hurts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import jacrev, vmap

from helpers import assert_close
from normkit import NormSpec, demo, reference, specs
from normkit.errors import DtypeError, ShapeError, SpecError
from normkit.geometry import centre, gauss_newton_condition, preconditioning

LAYER_NORM = NormSpec(has_weight=False, has_bias=False, eps=0.0)
RMS_NORM = specs.NANOCHAT.replace(eps=0.0)
NORMS = {"layer": LAYER_NORM, "rms": RMS_NORM}
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


@pytest.mark.slow
def test_gradient_descent_takes_steps_in_proportion():
    def steps(condition):
        curvature = torch.tensor([1.0, 1.0 / condition], dtype=torch.float64)
        error, count = torch.ones(2, dtype=torch.float64), 0
        while error.norm() > 1e-6:
            error, count = error - 2 / (1 + 1 / condition) * curvature * error, count + 1
        return count

    assert steps(1000) / steps(100) == pytest.approx(10, rel=0.05)


def test_features_without_information():
    condition, rank = gauss_newton_condition(torch.zeros(3, 2))
    assert condition.isnan()
    assert rank == 0
    condition, rank = gauss_newton_condition(torch.tensor([[[1.0, torch.nan], [2.0, 3.0]], [[3.0, 4.0], [6.0, 8.0]]]))
    assert condition[1] == 1.0
    assert condition[0].isnan()
    assert rank.tolist() == [0, 1]
    assert jacrev(lambda x: gauss_newton_condition(x)[0].nan_to_num())(torch.zeros(3, 2)).isfinite().all()


@pytest.mark.parametrize("name", NORMS)
def test_helps_rows_of_unequal_lengths(name):
    directions = gaussian()
    found = preconditioning(directions * torch.exp(3 * torch.randn(SAMPLES, 1, dtype=torch.float64)), NORMS[name])
    # The lengths are gone altogether: what is left is the condition number of the directions.
    assert_close(found.normalized, preconditioning(directions, NORMS[name]).normalized, units=64)
    assert found.ratio > 30


@pytest.mark.parametrize("name", NORMS)
def test_leaves_isotropic_rows(name):
    found = preconditioning(gaussian(), NORMS[name])
    assert 0.8 < found.ratio < 1.25
    assert found.raw_rank == FEATURES
    assert found.normalized_rank == FEATURES - (name == "layer")


def test_offset_along_ones_is_removed_by_layer_norm_only():
    x = gaussian() + 10.0
    assert preconditioning(x, LAYER_NORM).ratio > 300
    assert 0.9 < preconditioning(x, RMS_NORM).ratio < 1.1


@pytest.mark.parametrize("name", NORMS)
def test_other_offset_stays(name):
    offset = centre(torch.linspace(-1, 1, FEATURES, dtype=torch.float64).roll(3))
    found = preconditioning(gaussian() + 20.0 * offset, NORMS[name])
    assert found.raw > 300
    assert 0.8 < found.ratio < 1.25


@pytest.mark.slow
@given(st.integers(1, 50))
def test_hurts_where_rare_directions_have_long_rows(k):
    rare = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64)
    x = torch.stack([*[torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)] * k, k**0.5 * rare])
    for spec in NORMS.values():
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
    found = preconditioning(x, LAYER_NORM)
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
        found = preconditioning(x.to(dtype), RMS_NORM)
        assert found.raw.dtype == found.normalized.dtype == dtype
        # A squared ratio of two rounded numbers, each known to about 3 units of bfloat16.
        assert found.ratio.item() == pytest.approx(preconditioning(x, RMS_NORM).ratio.item(), rel=0.05)


def test_rows_of_any_leading_shape_are_one_set():
    x, gain = torch.randn(3, 10, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    found = preconditioning(x, NormSpec(has_bias=False), gain)
    flat = reference.forward(x.reshape(30, 4), NormSpec(has_bias=False), gain)
    assert_close(found.normalized, gauss_newton_condition(flat)[0], units=64)
    assert_close(found.raw, gauss_newton_condition(x.reshape(30, 4))[0], units=64)


def test_what_cannot_be_used_is_refused():
    with pytest.raises(ShapeError, match=r"shape \(N, n\)"):
        gauss_newton_condition(torch.randn(3))
    with pytest.raises(ShapeError, match="N >= 1"):
        gauss_newton_condition(torch.randn(0, 3))
    with pytest.raises(DtypeError, match="floating"):
        preconditioning(torch.ones(3, 2, dtype=torch.int64), RMS_NORM)
    with pytest.raises(SpecError, match="last axis"):
        preconditioning(torch.randn(3, 2), NormSpec(axes=(1,)))
