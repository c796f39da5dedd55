"""The points that a norm makes of rows: in 50 digits, by geoopt's spheres, and by the laws of a metric."""

from __future__ import annotations

import math
from functools import partial

import mpmath
import pytest
import torch
from torch import Tensor

from helpers import assert_close, exact, exact_row, taylor_slopes
from normkit import NormSpec, specs
from normkit.errors import DtypeError, ShapeError, SpecError
from normkit.geometry import Quotient, fiber, shrink_factor

LAYER, RMS = NormSpec(eps=0.0), specs.LLAMA.replace(eps=0.0)
# With eps the length of a row comes back with s**2 / eps times the roundings of its output.
EPS = 0.05
SPECS = {
    "LayerNorm": LAYER,
    "RMSNorm": RMS,
    "unbiased": LAYER.replace(correction=1),
    "sum of squares": RMS.replace(reduction="sum"),
    "LayerNorm, eps": LAYER.replace(eps=EPS),
    "RMSNorm, eps": RMS.replace(eps=EPS),
    "LayerNorm, eps outside": LAYER.replace(eps=EPS, eps_placement="outside"),
}
ROUNDINGS = 8 * (1 + 4 / EPS**2)
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def rows(count: int, *sizes: int, n: int = 4) -> Tensor:
    return torch.randn(count, *sizes, n, dtype=torch.float64) + 0.5


def moved(x: Tensor, spec: NormSpec, scale: float = 1.0) -> Tensor:
    """Other rows of the same points."""
    x = x if spec.eps else scale * x
    return x + 3 if spec.centring.numerator else x


def doubles(values: list[mpmath.mpf]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def dot(x: list[mpmath.mpf], y: list[mpmath.mpf]) -> mpmath.mpf:
    return mpmath.fsum(a * b for a, b in zip(x, y, strict=True))


def exact_outputs(spec: NormSpec, *given: Tensor) -> list[list[mpmath.mpf]]:
    return [exact_row([mpmath.mpf(value) for value in row.tolist()], spec, spec.eps) for row in given]


def exact_slope(x: Tensor, v: Tensor, spec: NormSpec) -> list[mpmath.mpf]:
    """J v by a central difference whose error is of the order of 10**-34 in 60 digits."""
    h = mpmath.mpf(10) ** -17
    row, way = ([mpmath.mpf(value) for value in each.tolist()] for each in (x, v))
    ends = [exact_row([a + s * h * b for a, b in zip(row, way, strict=True)], spec, spec.eps) for s in (1, -1)]
    return [(a - b) / (2 * h) for a, b in zip(*ends, strict=True)]


@each_spec
def test_against_the_definition_in_50_digits(spec):
    """Points, metric, distance, path, velocity and transport, each from outputs that mpmath computes."""
    manifold, (x, y, u, v) = Quotient(spec), rows(4)
    way, carried = manifold.logarithm(x, y), manifold.transport(x, y, u)
    with mpmath.workdps(60):
        p, q = exact_outputs(spec, x, y)
        ju, jv, jw, jc = (exact_slope(at, z, spec) for at, z in ((x, u), (x, v), (x, way), (y, carried)))
        if spec.eps:
            distance = mpmath.sqrt(mpmath.fsum((a - b) ** 2 for a, b in zip(p, q, strict=True)))
            start, turned = [b - a for a, b in zip(p, q, strict=True)], ju
            third = [a + (b - a) / 3 for a, b in zip(p, q, strict=True)]
        else:
            square = dot(p, p)
            angle = mpmath.acos(dot(p, q) / square)
            distance = mpmath.sqrt(square) * angle
            start = [angle / mpmath.sin(angle) * (b - mpmath.cos(angle) * a) for a, b in zip(p, q, strict=True)]
            # The rotation in the plane of p and q that takes p to q.
            share = dot(q, ju) / (square + dot(p, q))
            turned = [w - share * (a + b) for w, a, b in zip(ju, p, q, strict=True)]
            weights = [mpmath.sin(part * angle) / mpmath.sin(angle) for part in (mpmath.mpf(2) / 3, mpmath.mpf(1) / 3)]
            third = [weights[0] * a + weights[1] * b for a, b in zip(p, q, strict=True)]
        expected = {
            "point": (manifold.point(x), p),
            "inner": (manifold.inner(x, u, v)[None], [dot(ju, jv)]),
            "distance": (manifold.distance(x, y)[None], [distance]),
            "logarithm": (doubles(jw), start),
            "transport": (doubles(jc), turned),
            "interpolate": (manifold.point(manifold.interpolate(x, y, 1 / 3)), third),
        }
        for name, (found, truth) in expected.items():
            wanted = doubles(truth)
            bound = ROUNDINGS * torch.finfo(torch.float64).eps * max(1.0, float(wanted.abs().max()))
            assert (found - wanted).abs().max() < bound, name


@each_spec
def test_what_the_norm_ignores_stays_in_the_row(spec):
    manifold, (x, y, v) = Quotient(spec), rows(3, 5)
    for end in (manifold.exponential(x, 0.1 * v), manifold.interpolate(x, y, torch.linspace(0, 1, 5).double())):
        if spec.centring.numerator:
            assert_close(end.mean(-1), x.mean(-1), units=ROUNDINGS)
            assert_close(manifold.exponential(x, 0.1 * v + 7), manifold.exponential(x, 0.1 * v), units=ROUNDINGS)
        if not spec.eps:
            about = x.mean(-1, keepdim=True) if spec.centring.numerator else 0.0
            assert_close((end - about).norm(dim=-1), (x - about).norm(dim=-1), length=4)


@each_spec
def test_any_row_of_a_point_will_do(spec):
    manifold, (x, y, u, v) = Quotient(spec), rows(4, 6)
    near = partial(assert_close, length=4, units=ROUNDINGS)
    near(manifold.point(moved(x, spec, 3.0)), manifold.point(x))
    near(manifold.distance(moved(x, spec, 3.0), moved(y, spec, 0.2)), manifold.distance(x, y))
    # A velocity of a row 3 times as long is 3 times as long.
    scale = 1.0 if spec.eps else 3.0
    near(manifold.inner(moved(x, spec, 3.0), scale * u, scale * v), manifold.inner(x, u, v))
    near(manifold.logarithm(moved(x, spec, 3.0), y) / scale, manifold.logarithm(x, y))
    near(manifold.transport(moved(x, spec, 3.0), y, scale * v), manifold.transport(x, y, v))
    assert_close(
        moved(manifold.gradient(x, v), RMS, scale), manifold.gradient(moved(x, spec, 3.0), v / scale), units=1e6
    )


@each_spec
def test_the_laws_of_a_manifold(spec):
    manifold, (x, y, z, u, v) = Quotient(spec), rows(5, 8)
    near = partial(assert_close, length=4, units=ROUNDINGS)
    way = manifold.logarithm(x, y)
    near(manifold.horizontal(x, way), way)
    near(manifold.inner(x, way, way).sqrt(), manifold.distance(x, y))
    near(manifold.point(manifold.exponential(x, way)), manifold.point(y))
    near(manifold.inner(x, manifold.horizontal(x, u), v), manifold.inner(x, u, v))
    near(manifold.inner(x, u - manifold.horizontal(x, u), v), torch.zeros(8).double(), terms=torch.ones(8))
    assert (manifold.distance(x, y) + manifold.distance(y, z) >= manifold.distance(x, z) - 1e-12).all()
    carried = [manifold.transport(x, y, each) for each in (u, v)]
    near(manifold.inner(y, *carried), manifold.inner(x, u, v))
    near(manifold.transport(x, y, way), -manifold.logarithm(y, x))
    # By definition of the gradient, for a slope that a norm can return.
    slope = manifold.horizontal(x, u)
    near(manifold.inner(x, manifold.gradient(x, slope), v), (slope * v).sum(-1))
    # The metric is the square of the distance to near rows.
    step = 1e-5 * v
    assert torch.allclose(manifold.distance(x, x + step) / 1e-5, manifold.inner(x, v, v).sqrt(), rtol=1e-3)


@pytest.mark.parametrize("spec", [LAYER, RMS, SPECS["LayerNorm, eps"]], ids=["LayerNorm", "RMSNorm", "eps"])
def test_the_path_is_as_long_as_the_distance_and_the_straight_line_of_rows_is_so_at_eps_0_only(spec):
    """Lengths are sums over 1,000 steps, each good to the square of its length."""
    manifold, (x, y) = Quotient(spec), rows(2)
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    least = float(manifold.distance(x, y))
    shortest, straight = (
        float(manifold.distance(path[:-1], path[1:]).sum())
        for path in (manifold.interpolate(x, y, t), x + t[:, None] * (y - x))
    )
    assert shortest == pytest.approx(least, rel=1e-9)
    assert straight > 1.001 * least if spec.eps else straight == pytest.approx(least, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [LAYER, RMS], ids=["LayerNorm", "RMSNorm"])
def test_against_geoopt(spec):
    """Their unit spheres, LayerNorm's in the subspace across all-ones; ours are sqrt(n) times as large."""
    import geoopt

    n, (x, y, u) = 6, rows(3, 5, n=6)
    across = torch.ones(n, 1, dtype=torch.float64) if spec.centring.numerator else None
    theirs = geoopt.SphereExact(complement=across) if across is not None else geoopt.SphereExact()
    manifold, root = Quotient(spec), math.sqrt(n)
    p, q = (manifold.point(row) / root for row in (x, y))
    assert theirs.check_point_on_manifold(p)
    # Their distance is an arc cosine, which is good to some 1e-12 in the middle of its range.
    assert torch.allclose(manifold.distance(x, y), root * theirs.dist(p, q), rtol=1e-10)
    tangent = manifold.horizontal(p, u)
    assert torch.allclose(tangent, theirs.proju(p, u), atol=1e-14)
    assert torch.allclose(manifold.exponential(p, tangent), theirs.expmap(p, tangent), atol=1e-14)
    assert torch.allclose(manifold.logarithm(p, q), theirs.logmap(p, q), atol=1e-6)
    # Their transport projects, and is parallel across the path only.
    beside = tangent - project_out_way(manifold.logarithm(p, q), tangent)
    assert torch.allclose(manifold.transport(p, q, beside), theirs.transp(p, q, beside), atol=1e-6)
    assert torch.allclose(manifold.gradient(p, u), theirs.egrad2rgrad(p, u) / n, atol=1e-14)


def project_out_way(way: Tensor, v: Tensor) -> Tensor:
    return way * (way * v).sum(-1, keepdim=True) / way.square().sum(-1, keepdim=True)


@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("preset", [LAYER, RMS], ids=["LayerNorm", "RMSNorm"])
def test_eps_makes_the_constant_row_a_point_and_puts_the_sphere_out_of_reach(preset, placement):
    spec = preset.replace(eps=EPS, eps_placement=placement)
    manifold, sphere, (x, y) = Quotient(spec), Quotient(preset), rows(2, 5)
    centre = torch.full((4,), 3.0 if preset.centring.numerator else 0.0, dtype=torch.float64)
    about = x - x.mean(-1, keepdim=True) if preset.centring.numerator else x
    kept = shrink_factor(about, eps=EPS, eps_placement=placement)
    assert_close(manifold.point(centre), torch.zeros(4).double())
    assert_close(manifold.distance(centre, x), 2 * kept, length=4)
    assert_close(
        manifold.point(manifold.exponential(centre, manifold.logarithm(centre, x))), manifold.point(x), units=ROUNDINGS
    )
    assert_close(
        manifold.inner(centre, x, x), about.square().sum(-1) / (EPS if placement == "inside" else EPS**2), length=4
    )
    assert sphere.point(centre).isnan().all()
    # A velocity of the length that is left to the sphere: just below it is a row, just above it none.
    outwards = about * ((1 - kept) * 2 / manifold.inner(x, about, about).sqrt())[:, None]
    assert manifold.exponential(x, 0.999 * outwards).isfinite().all()
    assert manifold.exponential(x, 1.001 * outwards).isnan().all()
    # Long rows come to the sphere, but their shortest path stays a chord.
    far = Quotient(spec.replace(eps=1e-13)).distance(x, y)
    assert torch.allclose(far, 4 * (sphere.distance(x, y) / 4).sin(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [LAYER, RMS, SPECS["LayerNorm, eps"]], ids=["LayerNorm", "RMSNorm", "eps"])
def test_derivatives_batches_vmap_and_float32(spec):
    manifold, (x, y, v) = Quotient(spec), rows(3, 6)
    near = partial(assert_close, units=ROUNDINGS, length=4)
    paths = (manifold.distance, manifold.exponential, manifold.logarithm)
    for function in (*paths, manifold.horizontal, manifold.gradient):
        # Velocities short enough for the ball.
        others = 0.1 * y if function == manifold.exponential else y
        expected = torch.stack([function(a, b) for a, b in zip(x, others, strict=True)])
        near(function(x, others), expected)
        near(torch.func.vmap(function)(x, others), expected)
        near(function(x[:, None], others)[2, 4], function(x[2], others[4]))
        assert function(x.float(), others.float()).dtype == torch.float32
        if function in paths:
            assert (taylor_slopes(partial(function, x[0]), others[0], 0.1 * v[0]) - 2).abs().max() < 0.3
    for function, at in zip(paths, (x[0], 0 * x[0], x[0]), strict=True):
        assert torch.func.jacrev(function, argnums=1)(x[0], at).isfinite().all(), "where the path has no length"
    near(torch.func.vmap(manifold.transport)(x, y, v), manifold.transport(x, y, v))
    near(torch.func.vmap(manifold.inner)(x, y, v), manifold.inner(x, y, v))


def test_length_comes_back_as_fiber_says():
    x, v = rows(2)
    spec = SPECS["LayerNorm, eps"]
    manifold = Quotient(spec)
    end = manifold.point(x) + 1e-3 * (manifold.point(x + v) - manifold.point(x))
    assert_close(
        manifold.exponential(x, 1e-3 * manifold.logarithm(x, x + v)),
        fiber(end, spec).centred + x.mean(),
        units=ROUNDINGS,
    )
    assert_close(manifold.point(x), exact(x, spec))


def test_errors():
    for spec, words in (
        (NormSpec(eps=0.1, eps_placement="clamp"), "below a clamp the length of a row counts"),
        (NormSpec(eps=-0.1), "eps of at least 0, got -0.1"),
        (NormSpec(eps=0.0, centre_statistics=False), "lie on no sphere"),
        (NormSpec(axes=(1,)), "one row along the last axis"),
    ):
        with pytest.raises(SpecError, match=words):
            Quotient(spec)
    Quotient(NormSpec(eps=0.0, eps_placement="clamp"))
    manifold, x = Quotient(LAYER), torch.ones(3)
    for function in (manifold.distance, manifold.exponential, manifold.logarithm):
        with pytest.raises(DtypeError, match="floating dtype"):
            function(x, x.int())
    with pytest.raises(ShapeError, match="rows of shape"):
        manifold.point(torch.tensor(1.0))
