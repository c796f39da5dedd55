"""Claims C28 to C39: the sphere, its dimension, the ellipsoid, and what eps does to them."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import below
from normkit import NormSpec, geometry, reference, specs

N = 8
PLAIN = NormSpec(eps=0.0, has_weight=False, has_bias=False)
RMS = specs.TORCH_RMS_NORM.replace(eps=0.0, has_weight=False)


@pytest.fixture
def x():
    return torch.randn(64, N, dtype=torch.float64) + 0.5


def local_rank(spec: NormSpec, gain: torch.Tensor | None = None) -> int:
    """Dimension of the image near one point: rank of the Jacobian there."""
    row = torch.randn(N, dtype=torch.float64)
    spec = spec if gain is None else spec.replace(has_weight=True)
    return int(torch.linalg.matrix_rank(torch.func.jacrev(lambda v: reference.forward(v, spec, gain))(row)))


def test_c28_a_normalized_row_has_length_sqrt_n(x, measured):
    exact = below(reference.forward(x, PLAIN).norm(dim=-1) - math.sqrt(N), 1e-14)
    centred = geometry.centre(x)
    shrink = geometry.shrink_factor(centred, eps=1e-5)
    below(reference.forward(x, PLAIN.replace(eps=1e-5)).norm(dim=-1) / math.sqrt(N) - shrink, 1e-14)
    kept = (1 / (1 + 1e-5)) ** 0.5
    measured(f"eps = 0: {exact} off; eps = 1e-5 keeps {kept:.6f} of it at variance 1, {0.5**0.5:.4f} at variance 1e-5")


def test_c29_the_image_is_a_sphere_of_dimension_n_minus_2(measured):
    ranks = local_rank(PLAIN), local_rank(PLAIN.replace(eps=1e-5)), local_rank(RMS), local_rank(RMS.replace(eps=1e-5))
    assert ranks == (N - 2, N - 1, N - 1, N)
    image = geometry.image_of(PLAIN, N)
    assert (image.dimension, geometry.image_of(PLAIN.replace(eps=1e-5), N).dimension) == (N - 2, N - 1)
    measured("n = 8: rank 6 at eps = 0, 7 with eps = 1e-5; RMSNorm 7 and 8")


def test_c30_the_slice_of_the_sphere_is_a_smaller_sphere(x, measured):
    y = reference.forward(x, PLAIN)
    below(y.sum(-1), 1e-13)
    below(y.norm(dim=-1) - math.sqrt(N), 1e-14)
    measured("the slice spans n - 1 dimensions and is a surface of dimension n - 2 in them")


def test_c31_eps_is_small_against_the_centred_row_not_the_row(measured):
    row = 1.0 + 1e-6 * torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    eps = 1e-6
    assert row.norm() > 1e6 * eps
    y = reference.forward(row, PLAIN.replace(eps=eps, eps_placement="outside"))
    kept = y.norm().item() / math.sqrt(N)
    assert kept == pytest.approx(0.5, abs=1e-6)
    measured(f"|x| is 2.8 million times eps, and the row leaves with {kept:.2f} of its length")


def test_c32_three_maps_one_after_the_other_are_the_norm(x, measured):
    gain, bias = torch.randn(2, N, dtype=torch.float64)
    eps = 1e-3
    centred = x @ geometry.centring_matrix(N)
    scaled = math.sqrt(N) * centred / (centred.norm(dim=-1, keepdim=True) + eps * math.sqrt(N))
    theirs = scaled @ torch.diag(gain) + bias
    ours = reference.forward(x, NormSpec(eps=eps, eps_placement="outside"), gain, bias)
    measured("error " + below(ours - theirs, 1e-13))


def test_c33_the_gain_tilts_the_plane_and_the_bias_is_the_centre(x, measured):
    gain, bias = torch.randn(2, N, dtype=torch.float64)
    y = reference.forward(x, NormSpec(eps=0.0), gain, bias)
    plane = below((y - bias) @ (1 / gain), 1e-11)
    assert ((y - bias).sum(-1).abs() > 0.1).any()
    surface = geometry.image_of(NormSpec(eps=0.0), N, gain, bias).surface
    assert torch.equal(surface.centre, bias)
    measured(f"orthogonal to 1/gain, {plane}; centre is the bias")


def test_c34_the_image_is_an_ellipsoid_of_dimension_n_minus_2(x, measured):
    gain = torch.linspace(0.5, 2, N, dtype=torch.float64)
    surface = geometry.image_of(NormSpec(eps=0.0, has_bias=False), N, gain).surface
    below(surface.depth(reference.forward(x, NormSpec(eps=0.0, has_bias=False), gain)), 1e-13)
    ranks = []
    for zeros in range(4):
        gain = torch.cat([torch.zeros(zeros, dtype=torch.float64), torch.linspace(0.5, 2, N - zeros).double()])
        ranks.append(local_rank(PLAIN, gain))
        assert geometry.image_of(PLAIN.replace(has_weight=True), N, gain).dimension == ranks[-1]
    measured(f"n = 8, with 0, 1, 2, 3 zero gains: dimension {', '.join(map(str, ranks))}")


def test_c35_rms_norms_ellipsoid_has_the_axes_of_the_features(measured):
    gain = torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=torch.float64)
    lengths = geometry.image_of(RMS.replace(has_weight=True), 4, gain).surface.semi_axes()
    measured(f"semi-axes sqrt(n) |gain|, {below(lengths - 2 * gain.abs().sort().values, 1e-15)}")


def test_c36_layer_norms_axes_lie_between_the_gains(measured):
    gain = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    lengths = geometry.image_of(NormSpec(eps=0.0, has_bias=False), 4, gain).surface.semi_axes() / 2
    assert (lengths > gain[:-1]).all()
    assert (lengths < gain[1:]).all()
    dense = torch.linalg.svdvals(torch.diag(gain) @ geometry.centring_matrix(4))[:-1].flip(0)
    below(lengths - dense, 1e-14)
    measured("gains 0.5, 1, 2, 3 give axes of sqrt(n) times " + ", ".join(f"{value:.3f}" for value in lengths.tolist()))


@pytest.mark.slow
def test_c37_mean_0_and_length_sqrt_n_end_with_the_gain(inspections, measured):
    output = inspections["layernorm"].sites[0].output
    assert abs(output.rms_median - 1) > 0.1
    measured(f"first norm of the shipped GPT-2: rows leave with rms {output.rms_median:.2f}, not 1")


@pytest.mark.slow
def test_c38_the_residual_stream_is_on_no_sphere(inspections, measured):
    words = []
    for name, inspection in inspections.items():
        first, last = inspection.blocks[0].stream_in, inspection.blocks[-1].stream_out
        assert last.rms_quantiles[2] > 1.2 * last.rms_quantiles[0]
        words.append(
            f"{name} median rms {first.rms_median:.2f} before block 0, {last.rms_median:.2f} after the last, "
            f"where 5 % of rows are below {last.rms_quantiles[0]:.2f} and 5 % above {last.rms_quantiles[2]:.2f}"
        )
    measured("; ".join(words))


@pytest.mark.slow
def test_c39_every_row_of_one_norm_lies_in_one_ellipsoid(inspections, measured):
    walk = inspections["layernorm"].walk
    assert 0 <= walk.ellipsoid_depth < 1e-3
    assert walk.plane_defect < 1e-6
    measured(f"a real token lies {below(walk.ellipsoid_depth, 1e-3)} of the radius inside it, in its plane")
