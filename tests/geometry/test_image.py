"""Hyperplanes, spheres and images obey the laws of sets; outputs of norms lie in them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import arguments, assert_close, valid_specs
from normkit import NormSpec, reference, specs
from normkit.errors import DtypeError, InputError, ShapeError, SpecError
from normkit.geometry import CentredSphere, Ellipsoid, Hyperplane, Image, Sphere, centre, image_of, shrink_factor


def test_it_obeys_the_laws_of_sets(case, law):
    shape = case.build()
    assert shape.dimension == case.dimension
    law(shape)


def test_the_all_ones_normal_centres():
    y = torch.randn(5, 7, dtype=torch.float64) + 3
    plane = Hyperplane(torch.ones(7, dtype=torch.float64))
    assert_close(plane.project(y), centre(y), length=7)
    assert_close(plane.distance(y), 7**0.5 * y.mean(-1).abs(), length=7)


def test_against_least_squares():
    normal, point, y = torch.randn(3, 5, dtype=torch.float64)
    # The nearest point is point + basis c for the c of least squares, with any basis of the normal's complement.
    basis = torch.linalg.svd(normal[None]).Vh[1:].T
    nearest = point + basis @ torch.linalg.lstsq(basis, (y - point)[:, None]).solution.squeeze(1)
    plane = Hyperplane(normal, point)
    assert (plane.project(y) - nearest).abs().max() < 1e-14
    assert float(plane.distance(y)) == pytest.approx(float((y - nearest).norm()), rel=1e-13)


@pytest.mark.parametrize("size", [1e-100, 1.0, 1e100])
def test_the_length_of_the_normal_does_not_matter(size):
    y = torch.randn(4, 3, dtype=torch.float64)
    normal = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64)
    assert_close(Hyperplane(size * normal).project(y), Hyperplane(normal).project(y))


def test_tolerance_grows_with_what_is_rounded():
    plane = Hyperplane(torch.ones(3))
    assert plane.contains(centre(1e6 + torch.randn(20, 3))).all()
    assert not plane.contains(torch.tensor([1e-5, 0.0, 0.0]))
    assert plane.contains(torch.tensor([1e-5, 0.0, 0.0]), tolerance=1e-5)


def test_samples_are_gaussian_about_the_point():
    point = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    samples = Hyperplane(torch.ones(3, dtype=torch.float64), point).sample(40_000)
    # Five standard errors of a mean and of a covariance.
    assert (samples.mean(0) - point).abs().max() < 5 / 200
    assert (samples.T.cov() - (torch.eye(3) - 1 / 3)).abs().max() < 5 * 2**0.5 / 200


def test_what_is_no_hyperplane_is_refused():
    with pytest.raises(InputError, match="got 0"):
        Hyperplane(torch.zeros(3))
    with pytest.raises(ShapeError, match=r"one shape \(n,\) are needed, got \(3,\) and \(2,\)"):
        Hyperplane(torch.ones(3), torch.ones(2))
    with pytest.raises(ShapeError, match=r"got \(1, 3\)"):
        Hyperplane(torch.ones(1, 3))
    with pytest.raises(DtypeError):
        Hyperplane(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("n", [2, 3, 768])
def test_norms_without_parameters_put_their_rows_there(n):
    x = 5 + torch.randn(20, n, dtype=torch.float64)
    assert CentredSphere(n).contains(reference.forward(x, NormSpec(eps=0.0))).all()
    assert Sphere(n).contains(reference.forward(x, specs.TORCH_RMS_NORM.replace(eps=0.0))).all()
    # The projections are the norms.
    assert_close(CentredSphere(n).project(x), reference.forward(x, NormSpec(eps=0.0)), length=n, units=16)
    assert_close(Sphere(n).project(x), reference.forward(x, specs.TORCH_RMS_NORM.replace(eps=0.0)), length=n)


@pytest.mark.parametrize("sphere", [Sphere(6), CentredSphere(6), CentredSphere(2, radius=3.0)])
def test_they_are_ellipsoids_of_equal_gains(sphere):
    gain = torch.ones(sphere.n, dtype=torch.float64)
    twin = Ellipsoid(gain, is_centred=isinstance(sphere, CentredSphere), radius=sphere.radius)
    y = 2 * torch.randn(30, sphere.n, dtype=torch.float64)
    v = torch.randn_like(y)
    assert twin.dimension == sphere.dimension
    for name in ("project", "distance", "depth"):
        assert_close(getattr(sphere, name)(y), getattr(twin, name)(y), length=sphere.n, units=32)
    assert_close(sphere.tangent(y, v), twin.tangent(y, v), length=sphere.n, units=32, terms=v.abs().max())


def test_samples_are_uniform():
    # Archimedes: a coordinate of a uniform point of the sphere in three dimensions is uniform itself.
    heights = Sphere(3, radius=1.0).sample(20_000)[:, 2].sort().values
    uniform = torch.linspace(-1, 1, len(heights), dtype=torch.float64)
    # Kolmogorov's bound at one in a million.
    assert (heights - uniform).abs().max() / 2 < 2.7 / math.sqrt(len(heights))
    samples = CentredSphere(4).sample(40_000)
    expected = 4 / 3 * (torch.eye(4) - 1 / 4)
    assert (samples.T @ samples / len(samples) - expected).abs().max() < 5 * 2 / 200


def test_where_no_point_is_nearest_one_is_chosen():
    assert Sphere(3).project(torch.zeros(3)).tolist() == pytest.approx([3**0.5, 0, 0])
    assert CentredSphere(4).project(torch.full((4,), 7.0)).tolist() == pytest.approx([2**0.5, -(2**0.5), 0, 0])
    assert float(Sphere(3).distance(torch.zeros(3))) == pytest.approx(3**0.5)


def test_a_centred_row_of_one_feature_is_nowhere():
    point = CentredSphere(1)
    assert point.dimension == -1
    assert point.project(torch.ones(2, 1)).isnan().all()
    assert point.sample(2).isnan().all()
    assert not point.contains(torch.zeros(2, 1)).any()


def test_equality_and_radius():
    assert Sphere(4) == Sphere(4, radius=2.0) != Sphere(4, radius=1.0)
    assert CentredSphere(4).radius == 2.0
    with pytest.raises(ShapeError, match="got n = 0"):
        Sphere(0)


LAYER, RMS = NormSpec(), specs.TORCH_RMS_NORM.replace(has_bias=True)


def gain_with_zeros(n: int, zeros: int) -> Tensor:
    gain = torch.linspace(0.5, 2.0, n, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(n)[:n]
    return torch.cat([torch.zeros(zeros, dtype=torch.float64), gain[zeros:]])


def local_rank(spec: NormSpec, gain: Tensor, rows: Tensor) -> int:
    """The largest rank of the norm's derivative at any of the rows."""
    derivative = torch.func.vmap(torch.func.jacrev(lambda row: reference.forward(row, spec, gain)))(rows)
    return int((torch.linalg.svdvals(derivative) > 1e-9).sum(-1).max())


@pytest.mark.parametrize(("n", "zeros"), [(n, k) for n in (1, 2, 3, 8) for k in range(4) if k <= n])
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("eps", [0.0, 0.05])
@pytest.mark.parametrize("spec", [LAYER, RMS], ids=["layer", "rms"])
def test_the_dimension_is_the_rank_of_the_derivative(spec, eps, placement, n, zeros):
    spec, gain = spec.replace(eps=eps, eps_placement=placement), gain_with_zeros(n, zeros)
    image = image_of(spec, n, gain)
    if spec.centre_numerator and n == 1 and not eps:
        assert image.dimension == -1
        assert reference.forward(torch.randn(9, 1).double(), spec, gain).isnan().all()
        return
    # Short rows too: a clamp works on those below eps alone.
    rows = torch.randn(8, n, dtype=torch.float64) * torch.tensor([[1.0], [0.01]] * 4)
    assert image.dimension == local_rank(spec, gain, rows)


def test_dimensions_in_words():
    def dimensions(spec: NormSpec, n: int, zeros: int) -> tuple[int, int]:
        gain = gain_with_zeros(n, zeros)
        return image_of(spec.replace(eps=0.0), n, gain).dimension, image_of(spec, n, gain).dimension

    assert [dimensions(LAYER, 8, k) for k in range(4)] == [(6, 7), (6, 7), (6, 6), (5, 5)]
    assert [dimensions(RMS, 8, k) for k in range(4)] == [(7, 8), (7, 7), (6, 6), (5, 5)]
    assert [dimensions(LAYER, n, 0) for n in (1, 2, 3)] == [(-1, 0), (0, 1), (1, 2)]
    assert [dimensions(RMS, n, 0) for n in (1, 2, 3)] == [(0, 1), (1, 2), (2, 3)]


single_rows = valid_specs(eps=st.sampled_from([0.0, 1e-5, 0.3, None]), max_groups=1).map(
    lambda spec: spec.replace(axes=(-1,), centre_statistics=spec.centre_numerator)
)


@pytest.mark.slow
@given(single_rows)
def test_every_output_of_every_norm_of_rows_is_in_its_image(spec):
    x, weight, bias = arguments(spec, rows=12)
    rows = x.reshape(-1, x.shape[-1]) * torch.logspace(-2, 3, x.numel() // x.shape[-1], dtype=x.dtype)[:, None]
    image = image_of(spec, x.shape[-1], weight, bias)
    outputs = reference.forward(rows, spec, weight, bias)
    assert image.contains(outputs).all()
    assert not image.contains(outputs + 1.0 + torch.randn_like(outputs)).all()
    depth = image.depth(outputs)
    assert depth.min() > -1e-12
    if spec.eps == 0:
        assert depth.max() < 1e-12
    elif image.is_open and spec.eps == 0.3:
        assert depth.min() > 0


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("spec", [LAYER, RMS], ids=["layer", "rms"])
def test_the_depth_is_what_eps_takes(spec, placement):
    spec = spec.replace(eps=0.01, eps_placement=placement)
    x = torch.randn(50, 6, dtype=torch.float64) * torch.logspace(-5, 2, 50, dtype=torch.float64)[:, None]
    gain, bias = torch.randn(2, 6, dtype=torch.float64)
    image = image_of(spec, 6, gain, bias)
    depth = image.depth(reference.forward(x, spec, gain, bias))
    kept = shrink_factor(centre(x) if spec.centre_numerator else x, eps=0.01, eps_placement=placement)
    # What y loses next to the bias counts by the smallest gain.
    rounding = 1e-14 * float((1 + bias.abs().max()) / gain.abs().min())
    assert (depth - (1 - kept)).abs().max() < rounding
    assert image.is_open == (placement != "clamp")
    assert (depth > rounding).all() == (placement != "clamp")


def test_depth_of_long_rows_is_eps_over_twice_the_variance():
    x = centre(torch.randn(6, dtype=torch.float64))
    depth = image_of(LAYER, 6).depth(reference.forward(x, LAYER))
    assert float(depth) == pytest.approx(1e-5 / (2 * float(x.square().mean())), rel=1e-4)


@pytest.mark.parametrize("eps", [1e-5, 0.05])
def test_with_eps_every_inside_vector_is_an_output(eps):
    spec, gain = LAYER.replace(eps=eps), gain_with_zeros(5, 0)
    image = image_of(spec, 5, gain)
    inside = torch.rand(30, 1, dtype=torch.float64) * image.surface.sample(30)
    # The row that gives it, from s = sqrt(eps / (1 - q)) with q its share of the radius, squared.
    share = 1 - image.depth(inside)
    x = inside / gain * (eps / (1 - share.square())).sqrt()[:, None]
    assert_close(reference.forward(x, spec, gain), inside, length=5, units=1e4)
    assert image.contains(inside).all()
    assert not image_of(spec.replace(eps=0.0), 5, gain).contains(inside).any()


@pytest.mark.parametrize("spec", [LAYER, RMS], ids=["layer", "rms"])
def test_zero_gains_fill_the_image_at_eps_zero(spec):
    spec, gain = spec.replace(eps=0.0), gain_with_zeros(6, 3)
    image = image_of(spec, 6, gain)
    inside = 0.6 * image.surface.sample(20)
    assert image.contains(inside).all()
    assert not image.is_open
    # A row that gives it: what is missing to the radius goes where the gain does not look, summing to 0.
    z = torch.where(gain == 0, 0.0, inside / torch.where(gain == 0, 1.0, gain))
    if spec.centre_numerator:
        z = torch.where(gain == 0, -z.sum(-1, keepdim=True) / 3, z)
    spare = torch.tensor([1.0, -1.0, 0, 0, 0, 0], dtype=torch.float64) / math.sqrt(2)
    x = z + (6 - z.square().sum(-1, keepdim=True)).sqrt() * spare
    assert_close(reference.forward(x, spec, gain), inside, length=6, units=64)


def test_one_feature_and_two():
    bias = torch.tensor([3.0], dtype=torch.float64)
    point = image_of(LAYER, 1, None, bias)
    assert point.dimension == 0
    assert point.contains(torch.tensor([[3.0], [3.1]], dtype=torch.float64)).tolist() == [True, False]
    assert float(reference.forward(torch.tensor([7.0], dtype=torch.float64), LAYER, None, bias)) == 3.0
    assert not image_of(LAYER.replace(eps=0.0), 1, None, bias).contains(bias)
    pair = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [0.5, -0.5]], dtype=torch.float64)
    assert image_of(LAYER.replace(eps=0.0), 2).contains(pair).tolist() == [True, True, False]
    assert image_of(LAYER, 2).contains(pair).tolist() == [True, True, True]


def test_radius_and_gain_follow_the_spec():
    n, weight = 8, torch.linspace(-0.5, 0.5, 8, dtype=torch.float64)
    assert image_of(LAYER.replace(correction=1), n).surface.radius == pytest.approx(math.sqrt(7))
    assert image_of(specs.L2_NORM, n).surface.radius == 1.0
    assert image_of(specs.X_TRANSFORMERS_RMS, n).surface.radius == pytest.approx(math.sqrt(8))
    assert torch.equal(image_of(specs.GEMMA, n, weight).surface.gain, 1 + weight)
    assert image_of(specs.GEMMA, n, weight.bfloat16()).surface.gain.dtype == torch.float32
    assert torch.equal(image_of(specs.SCALE_NORM, n, torch.tensor([2.0])).surface.gain, torch.full((8,), 2.0))
    assert image_of(specs.TORCH_RMS_NORM, n).eps == 2.0**-52
    assert image_of(specs.TORCH_RMS_NORM, n, torch.ones(n)).eps == 2.0**-23
    before = LAYER.replace(weight_placement="before")
    assert torch.equal(image_of(before, n, weight).surface.gain, torch.ones(n, dtype=torch.float64))


def test_it_is_clean_under_vmap_and_differentiates():
    image = image_of(LAYER, 5, gain_with_zeros(5, 0))
    y = torch.rand(4, 1, dtype=torch.float64) * image.surface.sample(4)
    assert torch.func.vmap(image.contains)(y).all()
    gradient = torch.func.vmap(torch.func.grad(image.depth))(y)
    step = 1e-6 * torch.randn_like(y)
    change = image.depth(y + step) - image.depth(y - step)
    assert (change - 2 * (gradient * step).sum(-1)).abs().max() < 1e-14
    assert torch.func.grad(image.depth)(torch.zeros(5, dtype=torch.float64)).isfinite().all()


def test_float32_outputs_are_contained():
    x = 3 + torch.randn(100, 64)
    gain, bias = torch.randn(2, 64)
    for spec in (LAYER, RMS, LAYER.replace(eps=0.0)):
        image = image_of(spec, 64, gain, bias)
        assert image.contains(reference.forward(x, spec, gain, bias)).all()
    assert image.depth(x).dtype == torch.float32


def test_an_image_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        image_of(LAYER, 3).eps = 1.0
    assert isinstance(image_of(LAYER, 3), Image)
    assert image_of(LAYER, 3).ambient == 3


@pytest.mark.parametrize(
    ("spec", "weight", "error", "words"),
    [
        (LAYER.replace(axes=(1,)), None, SpecError, "one row along the last axis"),
        (LAYER.replace(groups=2), None, SpecError, "2 groups"),
        (specs.POCKET_TTS, None, SpecError, "lie on no sphere"),
        (LAYER.replace(eps=-1e-5), None, SpecError, "eps >= 0 is needed"),
        (LAYER, torch.ones(3), ShapeError, r"a parameter for 4 features is needed, got shape \(3,\)"),
        (LAYER.replace(weight_placement="before"), torch.zeros(4), InputError, "without zeros"),
    ],
)
def test_what_has_no_image_is_refused(spec, weight, error, words):
    with pytest.raises(error, match=words):
        image_of(spec, 4, weight)


def test_rows_whose_correction_leaves_nothing_have_no_image():
    with pytest.raises(SpecError, match="at least 2 features are needed for a correction of 1, got 1"):
        image_of(LAYER.replace(correction=1), 1)
