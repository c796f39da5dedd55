"""The page's norms against PyTorch and normkit, in float64."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from normkit import NormSpec, geometry, reference

pytestmark = pytest.mark.browser

# A few roundings of at most eight terms.
RELATIVE = 1e-12
MODES = ["layer", "rms", "batch", "length", "plane"]
NORMAL = [0.3, -1.0, 0.5, 2.0, 1.0, -0.2, 0.7, 0.1]
GAIN = [1.5, -0.6, 1.1, 0.0, 2.0, 0.3, 1.0, -1.0]
BIAS = [0.5, -0.3, 0.4, 0.2, 0.0, -2.0, 1.0, 0.1]


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def norm(mode="layer", eps=1e-5, place="inside", gain=None, bias=None, normal=NORMAL):
    return {
        "mode": mode,
        "eps": eps,
        "place": place,
        "gain": gain or [1.0] * 8,
        "bias": bias or [0.0] * 8,
        "normal": normal,
    }


def clouds():
    """Rows of 1 to 8 features: ordinary, few, constant, zero, tiny, huge, and far from the origin."""
    torch.manual_seed(0)
    for n in (1, 2, 3, 4, 8):
        rows = torch.randn(7, n, dtype=torch.float64)
        yield rows
        yield rows[:1]
        yield torch.cat([rows[:2], torch.full((2, n), 2.0), torch.zeros(1, n), torch.full((1, n), 0.1)])
        yield from (rows * 1e-3, rows * 1e-12, rows * 1e12, rows + 1e3)


def spec(mode, eps, place):
    """The norm of a row as a NormSpec; a hyperplane's acts on projected rows."""
    is_centred = mode == "layer"
    return NormSpec(
        centre_numerator=is_centred,
        centre_statistics=is_centred,
        eps=eps,
        eps_placement=place,
        reduction="sum" if mode == "length" else "mean",
    )


def expected(x, *, mode, eps, place, gain, bias, normal):
    """The same by PyTorch where it has the norm, else by normkit."""
    n = x.shape[1]
    gain, bias, normal = (tensor(values[:n]) for values in (gain, bias, normal))
    if place == "inside":
        if mode == "layer":
            return F.layer_norm(x, (n,), gain, bias, eps)
        if mode == "rms":
            return F.rms_norm(x, (n,), gain, eps) + bias
        # F.batch_norm refuses one row, and eps = 0.
        if mode == "batch" and len(x) > 1 and eps > 0:
            return F.batch_norm(x, None, None, gain, bias, training=True, eps=eps)
    if mode == "batch":
        centred = geometry.centre_over_batch(x)
        if place == "inside":
            return geometry.scale_over_batch(centred, eps) * gain + bias
        return centred / (centred.square().mean(0).sqrt() + eps) * gain + bias
    rows = geometry.project_out(x, normal) if mode == "plane" else x
    return reference.forward(rows, spec(mode, eps, place), gain, bias)


def assert_close(found, wanted, relative=RELATIVE):
    """Equal but for rounding; NaN and Infinity where it is."""
    found = torch.as_tensor(found, dtype=torch.float64).reshape(wanted.shape)
    torch.testing.assert_close(found, wanted, rtol=relative, atol=relative, equal_nan=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
def test_every_norm_is_pytorchs(modules, mode):
    cases = []
    for x, eps, place in itertools.product(clouds(), (0.0, 1e-5, 1.0), ("inside", "outside")):
        cases += [(x, norm(mode, eps, place)), (x, norm(mode, eps, place, GAIN, BIAS))]
    stages = modules.each("norms.js", "normalize", [(x.tolist(), given) for x, given in cases])
    assert len(stages) == 35 * 6 * 2
    for (x, given), (raw, _, _, _, biased) in zip(cases, stages, strict=True):
        assert raw == x.tolist()
        # A mean of 1000 is rounded by 1000 machine epsilons of the deviations; PyTorch takes it once.
        far = 1e3 if x.abs().min() > 900 else 1.0
        wanted = expected(x, **given)
        assert_close(biased, wanted, RELATIVE * far)


def test_rows_far_from_the_origin_are_centred_better_than_once(modules):
    torch.manual_seed(1)
    x = torch.randn(50, 4, dtype=torch.float64) + 1e9
    found = modules("norms.js", "normalize", x.tolist(), norm())[2]
    # The reference takes the mean twice, too.
    assert_close(found, reference.forward(x, spec("layer", 1e-5, "inside")))
    assert float(tensor(found).mean(1).abs().max()) < 1e-15
    # Likewise along any normal.
    normal = tensor(NORMAL[:4])
    centred = modules("norms.js", "normalize", (x * normal).tolist(), norm("plane"))[1]
    assert float((tensor(centred) @ normal).abs().max()) < 1e-15 * 1e3


def test_huge_and_tiny_rows_keep_their_direction(modules):
    for factor in (1e-200, 1e200):
        x = tensor([[3.0, -1.0, 0.5], [0.0, 0.0, 4.0]]) * factor
        _, _, scaled, _, _ = modules("norms.js", "normalize", x.tolist(), norm("rms", eps=0.0))
        assert_close(scaled, geometry.to_sphere(x))
        _, _, scaled, _, _ = modules("norms.js", "normalize", x.tolist(), norm("layer", eps=0.0))
        assert_close(scaled, geometry.to_sphere(geometry.centre(x)))


def test_the_stages_are_centred_scaled_stretched_and_moved(modules):
    x = tensor([[1.0, 2.0, 6.0], [-1.0, 0.5, 0.25]])
    gain, bias = tensor(GAIN[:3]), tensor(BIAS[:3])
    for mode in MODES:
        _, centred, scaled, gained, biased = map(
            tensor, modules("norms.js", "normalize", x.tolist(), norm(mode, gain=GAIN, bias=BIAS))
        )
        assert_close(
            centred,
            {
                "layer": x - x.mean(1, keepdim=True),
                "batch": geometry.centre_over_batch(x),
                "plane": geometry.Hyperplane(tensor(NORMAL[:3])).project(x),
            }.get(mode, x),
        )
        # A row is shortened by eps, and its direction stays.
        if mode != "batch":
            assert_close(F.normalize(scaled, dim=1), F.normalize(centred, dim=1))
        assert_close(gained, gain * scaled)
        assert_close(biased, gained + bias)


def test_undefined_rows_are_nan_and_no_others(modules):
    points = [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, 0.0, 2.0], [0.1, 0.1, 0.1]]
    for mode, undefined in {"layer": [0, 1, 3], "rms": [1], "length": [1], "plane": [1]}.items():
        scaled = tensor(modules("norms.js", "normalize", points, norm(mode, eps=0.0, normal=[1.0, 2.0, 3.0]))[2])
        assert scaled.isnan().all(1).nonzero().flatten().tolist() == undefined
        assert scaled.isnan().any(1).nonzero().flatten().tolist() == undefined
    columns = tensor(modules("norms.js", "normalize", [[1.0, 5.0], [2.0, 5.0]], norm("batch", eps=0.0))[2])
    assert columns.isnan().tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("normal", [[0.3, 1.0, 0.5], [1.0, 1.0, 1.0], [-2.5, -2.5, -2.5], [0.0, 0.0, 1.0]])
def test_what_lies_along_any_normal_is_0_over_0(modules, normal):
    points = [[factor * value for value in normal] for factor in (1.0, 0.1, -0.7, 1e-9, 1e9)]
    scaled = tensor(modules("norms.js", "normalize", points, norm("plane", eps=0.0, normal=normal))[2])
    assert scaled.isnan().all()
    beside = [[1.0 + 1e-9, 1.0, 1.0 - 1e-9], [2.0, 0.0, 0.0]]
    scaled = tensor(modules("norms.js", "normalize", beside, norm("plane", eps=0.0, normal=normal))[2])
    assert_close(scaled.square().mean(1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_along_all_ones_the_plane_is_layernorm_s(modules, eps):
    points = [[0.1, 0.1, 0.1], [1e8, 1e8, 1e8], [1.0, 2.0, 4.0], [1e8 + 1, 1e8, 1e8]]
    plane = modules("norms.js", "normalize", points, norm("plane", eps=eps, normal=[0.7] * 4))
    layer = modules("norms.js", "normalize", points, norm("layer", eps=eps))
    assert_close(plane, tensor(layer), relative=0.0)


def test_no_points_stay_no_points(modules):
    assert modules.each("norms.js", "normalize", [([], norm(mode)) for mode in MODES]) == [[[]] * 5] * 5


def test_points_travel_straight_between_stages(modules):
    stages = modules("norms.js", "normalize", [[1.0, 2.0, 6.0], [2.0, 2.0, 2.0]], norm(eps=0.0, bias=BIAS))
    shown = modules.each("norms.js", "at", [(stages, t) for t in (0, 0.25, 1, 2, 3.5, 4)])
    start, quarter, centred, scaled, half, end = map(tensor, shown)
    for found, stage in ((start, 0), (centred, 1), (scaled, 2), (end, 4)):
        torch.testing.assert_close(found, tensor(stages[stage]), rtol=0, atol=0, equal_nan=True)
    assert_close(quarter, 0.75 * start + 0.25 * centred)
    assert_close(half, (tensor(stages[3]) + end) / 2)
    assert not quarter.isnan().any()
    assert half[1].isnan().all()


@pytest.mark.parametrize("mode", ["layer", "rms", "length", "plane"])
def test_gradients_are_autograds(modules, mode):
    torch.manual_seed(2)
    cases = []
    for n, eps, place in itertools.product((1, 2, 3, 4, 8), (0.0, 1e-5, 0.5), ("inside", "outside")):
        if n == 1 and mode in ("layer", "plane"):
            # Nothing is left of such a row; the test of undefined rows has it.
            continue
        for scale in (1.0, 1e-3, 30.0):
            x, upstream = torch.randn(2, n, dtype=torch.float64)
            cases.append((scale * x, norm(mode, eps, place, GAIN, BIAS), upstream))
    for _, given, _ in cases:
        given["normal"] = [1.0, 0.5, -0.3, 0.2, 1.0, -0.2, 0.7, 0.1]
    found = modules.each("norms.js", "vjp", [(x.tolist(), given, upstream.tolist()) for x, given, upstream in cases])
    for (x, given, upstream), parts in zip(cases, found, strict=True):
        if mode == "layer" and len(x) == 2 and given["eps"] == 0:
            # All that is left is the rounding of a difference.
            assert max(map(abs, parts["input"])) < 1e-12 / float(x.abs().max())
            continue
        row = x.clone()[None].requires_grad_()
        (wanted,) = torch.autograd.grad(expected(row, **given), row, upstream[None])
        size = float(parts_size(parts, x, given))
        torch.testing.assert_close(tensor(parts["input"]), wanted[0], rtol=RELATIVE, atol=RELATIVE * size)


def parts_size(parts, x, given):
    """How large the gradient would be without the projection: what is left of it is rounded in proportion to this."""
    rows = x - x.mean() if given["mode"] == "layer" else x
    if given["mode"] == "plane":
        rows = geometry.project_out(x, tensor(given["normal"][: len(x)]))
    scale = rows.square().mean().sqrt() if given["mode"] != "length" else rows.norm()
    return tensor(parts["scaledGradient"]).norm() / (scale + given["eps"])


def test_the_parts_of_a_gradient_are_orthogonal_and_add_up(modules):
    x, upstream = tensor([1.0, 2.0, 6.0]), tensor([0.3, -1.0, 2.0])
    for mode, (eps, place) in itertools.product(
        ("layer", "rms", "length"), ((0.0, "inside"), (2.0, "inside"), (0.7, "outside"))
    ):
        given = norm(mode, eps, place, GAIN)
        parts = {
            name: tensor(value)
            for name, value in modules("norms.js", "vjp", x.tolist(), given, upstream.tolist()).items()
        }
        h = tensor(GAIN[:3]) * upstream
        assert_close(parts["scaledGradient"], h)
        assert_close(parts["alongOnes"] + parts["alongRow"] + parts["tangent"], h)
        assert_close(parts["tangent"], geometry.tangent_projection(h, x, is_centred=mode == "layer"))
        assert_close(parts["alongOnes"], h.mean().expand(3) if mode == "layer" else torch.zeros(3, dtype=torch.float64))
        s = float(reference.statistics(x[None], spec(mode, eps, place), eps).scale)
        assert float(parts["kept"]) == pytest.approx(eps / s / (1.0 if place == "outside" else s), rel=RELATIVE)
        assert_close(parts["input"], (parts["tangent"] + parts["kept"] * parts["alongRow"]) / s)


def test_gradients_at_constant_rows(modules):
    x, upstream = [2.0, 2.0, 2.0], [1.0, 0.0, -2.0]
    for eps, place in ((1e-3, "inside"), (1e-3, "outside"), (0.0, "inside")):
        wanted = geometry.vjp(tensor(x), tensor(upstream), spec("layer", eps, place))
        assert_close(modules("norms.js", "vjp", x, norm("layer", eps, place), upstream)["input"], wanted)
    assert wanted.isnan().all()


def facts(modules, rows, given):
    """Of each row by itself."""
    script = """async ([rows, norm]) => {
      const { facts, normalize } = await load("norms.js");
      return rows.map((x) => facts(x, norm, normalize([x], norm)[2][0]));
    }"""
    return modules.run(script, [[x.tolist() for x in rows], given])


def test_facts_of_rows(modules):
    torch.manual_seed(3)
    rows = [
        *torch.randn(20, 4, dtype=torch.float64),
        tensor([2.0] * 4),
        tensor([-3.0] * 4),
        tensor([1e9, 1e9 + 1, 1e9, 1e9]),
    ]
    rows += [tensor([5.0]), tensor([1.0, -1.0]), *torch.randn(3, 8, dtype=torch.float64) * 1e-3]
    for mode, eps, place in itertools.product(("layer", "rms", "length"), (1e-5, 0.3), ("inside", "outside")):
        given = norm(mode, eps, place)
        for x, found in zip(rows, facts(modules, rows, given), strict=True):
            centred = geometry.centre(x)
            assert found["mean"] == pytest.approx(float(x.mean()), rel=RELATIVE)
            assert found["rms"] == pytest.approx(float(x.square().mean().sqrt()), rel=RELATIVE)
            assert found["deviation"] == pytest.approx(float(centred.square().mean().sqrt()), rel=RELATIVE)
            assert found["length"] == pytest.approx(float(x.norm()), rel=RELATIVE)
            assert found["angleToOnes"] == pytest.approx(math.degrees(geometry.angle_to_ones(x)), rel=RELATIVE)
            unit = math.sqrt(len(x)) if mode == "length" else 1.0
            row = (centred if mode == "layer" else x) * unit
            shrink = geometry.shrink_factor(row, eps=eps, eps_placement=place)
            assert found["shrink"] == pytest.approx(float(shrink), rel=RELATIVE)
            assert found["undefined"] is False


def test_facts_of_undefined_rows(modules):
    constant = tensor([2.0] * 3)
    zero, flat = facts(modules, [0 * constant, constant], norm(eps=0.0))
    assert zero["undefined"]
    assert flat["undefined"]
    assert math.isnan(zero["angleToOnes"])
    assert flat["angleToOnes"] == 0
    assert math.isnan(zero["shrink"])
    assert zero["length"] == 0
    assert not facts(modules, [constant], norm("rms", eps=0.0))[0]["undefined"]
    assert facts(modules, [constant], norm())[0]["shrink"] == 0
