"""What the page computes from a state, against PyTorch on the full vectors; and what it does not compute again."""

import base64
import math

import pytest
import torch
from torch.nn import functional as F

from normkit.explorer.conventions import Convention
from normkit.explorer.projection import principal_basis, site_record

pytestmark = pytest.mark.browser

COMPUTE = """async ([patches, data]) => {
  const { compute } = await load("computation.js");
  const { DEFAULTS } = await load("state.js");
  return patches.map((patch) => compute({ ...DEFAULTS, ...patch }, data));
}"""
CLOUDS = {
    "three": {"label": "Three", "n": 3, "points": [[1, 2, 6], [2, 2, 2], [0.5, -1, 0.25]], "groups": [0, 1, 1]},
    "four": {"label": "Four", "n": 4, "points": [[1, 2, 6, 0], [1, 0, 0, 0]], "groups": [0, 0]},
}


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def data(**more):
    return {"schema": 1, "title": "", "notes": [], "start": {}, "clouds": CLOUDS, "models": []} | more


def computed(modules, given=None, **patch):
    return modules.run(COMPUTE, [[patch], given or data()])[0]


def assert_close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(tensor(found), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_a_cloud_of_points(modules):
    gain, bias = [2.0, -1.0, 0.5, 9.0], [0.1, 0.2, 0.3, 9.0]
    found = computed(modules, scene="three", cloud="three", eps=0, gain=gain, bias=bias, stage=3.5)
    x = tensor(CLOUDS["three"]["points"])
    assert (found["scene"], found["n"], found["groups"], found["labels"]) == ("three", 3, [0, 1, 1], ["1", "2", "3"])
    assert found["norm"]["gain"] == gain[:3]
    assert found["norm"]["mode"] == "layer"
    assert_close(found["stages"][4], F.layer_norm(x, (3,), tensor(gain[:3]), tensor(bias[:3]), 0.0))
    assert_close(found["shown"], (tensor(found["stages"][3]) + tensor(found["stages"][4])) / 2)
    assert found["undefinedRows"] == [1]
    assert [row["undefined"] for row in found["rows"]] == [False, True, False]
    assert found["rows"][0]["mean"] == 3
    assert found["rows"][0]["shrink"] == pytest.approx(1.0, rel=1e-12)


def test_points_moved_by_hand_count(modules):
    found = computed(
        modules, scene="three", cloud="three", edits={"1": [0.0, 1.0, 5.0], "2": [1.0], "9": [1.0, 1.0, 1.0]}
    )
    assert found["raw"] == [[1, 2, 6], [0, 1, 5], [0.5, -1, 0.25]]
    assert_close(found["stages"][1][1], tensor([-2.0, -1.0, 3.0]))


def test_a_scene_takes_a_cloud_of_its_dimensions(modules):
    assert computed(modules, scene="four", cloud="three")["raw"] == CLOUDS["four"]["points"]
    assert computed(modules, scene="four", cloud="none")["n"] == 4
    assert computed(modules, scene="three", cloud="four")["raw"] == CLOUDS["three"]["points"]
    given = {"n": 4, "points": [[1, 1, 1, 0]], "groups": [3], "labels": ["<b>"]}
    found = computed(modules, data(given=given), scene="four", cloud="given")
    assert (found["raw"], found["groups"], found["labels"]) == ([[1, 1, 1, 0]], [3], ["<b>"])
    empty = computed(modules, data(clouds={}), scene="three")
    assert empty["raw"] == []
    assert empty["shown"] == []
    assert empty["stages"] == [[]] * 5


def test_the_three_norms_of_the_clusters(modules):
    found = computed(modules, scene="clusters", cloud="three", mode="plane", stage=2, eps=1e-3)
    x = tensor(CLOUDS["three"]["points"])
    shown = {name: arm["shown"] for name, arm in found["arms"].items()}
    assert_close(shown["batch"], F.batch_norm(x, None, None, training=True, eps=1e-3))
    assert_close(shown["layer"], F.layer_norm(x, (3,), eps=1e-3))
    assert_close(shown["rms"], F.rms_norm(x, (3,), eps=1e-3))
    assert [arm["norm"]["mode"] for arm in found["arms"].values()] == ["batch", "layer", "rms"]
    assert found["shown"] == shown["layer"]


def test_the_gradient_of_the_selected_point(modules):
    patch = {"scene": "gradient", "cloud": "three", "mode": "rms", "eps": 0.01, "upstream": [1, -2, 0.5, 7]}
    patch |= {"gain": [2, 1, 0.5, 1], "bias": [0.5, -0.3, 0.4, 0]}
    found = computed(modules, selected=2, **patch)["gradient"]
    x = tensor(CLOUDS["three"]["points"][2]).requires_grad_()
    output = F.rms_norm(x, (3,), tensor([2, 1, 0.5]), 0.01)
    output.backward(tensor([1, -2, 0.5]))
    assert_close(found["input"], x.grad)
    assert found["at"] == x.tolist()
    assert found["upstream"] == [1, -2, 0.5]
    assert_close(found["output"], output.detach() + tensor([0.5, -0.3, 0.4]))
    assert "gradient" not in computed(modules, selected=-1, **patch)
    assert "gradient" not in computed(modules, selected=3, **patch)


def test_the_stacks(modules):
    found = computed(modules, scene="depth", depth=3, seed=5, spread=2, residual=False)
    assert found["stack"] == modules("depth.js", "stack", {"depth": 3, "seed": 5, "spread": 2, "residual": False})
    assert found["raw"] == []
    assert found["rows"] == []


def site(rows, gain, bias, basis, **more):
    """A site as the page gets it: projections, rounded to float32."""
    centred = rows - rows.mean(1, keepdim=True)
    inside = centred @ basis[1:].T
    rest = (centred - inside @ basis[1:]).norm(dim=1, keepdim=True)
    floats = torch.cat([rows @ basis[:1].T, inside, rest, (centred * gain) @ basis.T], 1)
    return {
        "path": "blocks.0.norm",
        "n": rows.shape[1],
        "layer": 0,
        "count": len(rows),
        "floats": base64.b64encode(floats.to(torch.float32).numpy().astype("<f4").tobytes()).decode(),
        "token": [index % 3 for index in range(len(rows))],
        "gain": (basis @ gain).tolist(),
        "bias": (basis @ bias).tolist(),
    } | more


def activations(n=24, count=50):
    torch.manual_seed(4)
    rows = torch.randn(count, n, dtype=torch.float64) * torch.rand(count, 1, dtype=torch.float64) + 0.7
    ones = torch.ones(1, n, dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([ones, torch.randn(2, n, dtype=torch.float64)]).T)[0].T
    basis = basis * basis[0, 0].sign()
    return rows, torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64), basis


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("mode", ["layer", "rms", "length"])
def test_the_shadow_of_a_model_is_that_of_the_full_vectors(modules, mode, place):
    rows, gain, bias, basis = activations()
    given = data(models=[{"name": "", "tokens": ["a", "b", "<i>"], "sites": [site(rows, gain, bias, basis)]}])
    found = computed(modules, given, scene="model", mode=mode, eps=0.1, place=place, stage=2)
    centred = rows - rows.mean(1, keepdim=True) if mode == "layer" else rows
    square = centred.square().sum(1, keepdim=True) / (1 if mode == "length" else rows.shape[1])
    scaled = centred / ((square + 0.1).sqrt() if place == "inside" else square.sqrt() + 0.1)
    if (mode, place) == ("layer", "inside"):
        torch.testing.assert_close(scaled, F.layer_norm(rows, (24,), eps=0.1))
    if (mode, place) == ("rms", "inside"):
        torch.testing.assert_close(scaled, F.rms_norm(rows, (24,), eps=0.1))
    # The page has float32 projections of the rows.
    for stage, expected in enumerate((rows, centred, scaled, scaled * gain, scaled * gain + bias)):
        assert_close(found["stages"][stage], expected @ basis.T, 3e-6)
    assert found["shown"] == found["stages"][2]
    assert found["n"] == 24
    assert found["labels"][:4] == ["a", "b", "<i>", "a"]
    for fact, x, z in zip(found["rows"], rows, scaled, strict=True):
        assert fact["mean"] == pytest.approx(float(x.mean()), rel=1e-5)
        assert fact["rms"] == pytest.approx(float(x.square().mean().sqrt()), rel=1e-6)
        assert fact["deviation"] == pytest.approx(float(x.std(correction=0)), rel=1e-6)
        radius = 1 if mode == "length" else math.sqrt(24)
        assert fact["shrink"] == pytest.approx(float(z.norm()) / radius, rel=1e-6)


def test_undefined_rows_of_a_model(modules):
    rows, gain, bias, basis = activations(count=3)
    rows[1] = 0
    given = data(models=[{"name": "", "tokens": ["a", "b", "c"], "sites": [site(rows, gain, bias, basis)]}])
    assert computed(modules, given, scene="model", eps=0)["undefinedRows"] == [1]
    assert computed(modules, given, scene="model", eps=1e-9)["undefinedRows"] == []
    missing = computed(modules, given, scene="model", site=1)
    assert missing["raw"] == []
    assert "site" not in missing


def test_the_colours_of_a_model(modules):
    rows, gain, bias, basis = activations(count=30)
    tokens = [0] * 5 + [index % 9 + 1 for index in range(25)]
    layers = [index // 10 for index in range(30)]
    given = data(models=[{"name": "", "tokens": list("abcdefghij"), "sites": [
        site(rows, gain, bias, basis, token=tokens),
        site(rows, gain, bias, basis, token=tokens, layers=layers),
        site(rows, gain, bias, basis, token=tokens, groups=[7 - index % 8 for index in range(30)]),
    ]}])  # fmt: skip
    groups = [
        computed(modules, given, scene="model", site=index, colour=colour)["groups"]
        for index in range(3)
        for colour in ("token", "position", "layer")
    ]
    # The most frequent token first; eighths of the positions; one layer, or three.
    assert groups[0][:5] == [0] * 5
    assert max(groups[0]) == 7
    assert groups[0][5:14] == [1, 2, 3, 4, 5, 6, 7, 7, 7]
    assert groups[1] == [int(index * 8 / 30) for index in range(30)]
    assert groups[2] == [0] * 30
    assert groups[4] == [int(index % 10 * 8 / 10) for index in range(30)]
    assert groups[5] == layers
    assert groups[6] == groups[7] == groups[8] == [7 - index % 8 for index in range(30)]


def test_what_stays_the_same_is_not_computed_again(modules):
    same = modules.run(
        """async (data) => {
      const { compute } = await load("computation.js");
      const { DEFAULTS } = await load("state.js");
      const state = { ...DEFAULTS, cloud: "three", stage: 1.5 };
      const found = {};
      for (const scene of ["three", "clusters", "gradient", "depth"]) {
        const at = (patch) => compute({ ...state, scene, selected: 0, ...patch }, data);
        const first = at({});
        const turned = at({ yaw: 1, pitch: 0, zoom: 2, walk: 1, layer: 3 });
        const moved = at({ stage: 2.5 });
        const other = at({ eps: 0.5, seed: 9 });
        const parts = (one, two) => Object.keys(one).filter((key) => one[key] !== two[key]);
        const stages = first.stages === other.stages;
        found[scene] = [first === turned, parts(first, moved), stages, first.stack === moved.stack];
      }
      return found;
    }""",
        data(),
    )
    assert same == {
        "three": [True, ["shown"], False, True],
        "clusters": [True, ["arms", "shown"], False, True],
        "gradient": [True, ["shown"], False, True],
        "depth": [True, ["shown"], False, True],
    }


def test_the_shares_of_the_two_directions_are_those_of_the_whole_rows(modules):
    rows = torch.cat([torch.randn(30, 12).double() * torch.linspace(0.2, 2, 12), torch.full((1, 12), 3.7).double()])
    basis = principal_basis(rows)
    convention = Convention(mode="layer", eps=1e-5, place="inside")
    site = site_record(path="a", formula="y", convention=convention, layer=0, rows=rows, tokens=range(31), basis=basis)
    script = """async (site) => {
      const [{ compute }, { DEFAULTS }] = await Promise.all(["computation.js", "state.js"].map(load));
      const data = { models: [{ tokens: site.token.map(String), sites: [site] }] };
      return [0, 1.9, 2, 4].map((stage) => compute({ ...DEFAULTS, scene: "model", stage, eps: 0 }, data).explained);
    }"""
    # Coordinates are embedded in float32.
    raw, centred, scaled, last = modules.run(script, site)
    assert raw == centred == pytest.approx(basis.explained, rel=1e-6)
    # Scaled, all rows are of one length: only then are the shares of the whole the means of the rows' own.
    unit = torch.nn.functional.normalize((rows - rows.mean(1, keepdim=True))[:-1], dim=1)
    means = (unit @ basis.rows[1:].T).square().mean(0).tolist()
    assert scaled == last == pytest.approx(means, rel=1e-6)
    assert abs(means[0] - raw[0]) > 0.01


def test_a_row_far_longer_than_the_others_is_found(modules):
    rows = torch.randn(40, 12).double()
    rows[7, 3] = 500.0
    convention = Convention(mode="rms", eps=1e-5, place="inside")
    script = """async (site) => {
      const [{ compute }, { DEFAULTS }] = await Promise.all(["computation.js", "state.js"].map(load));
      const data = { models: [{ tokens: site.token.map(String), sites: [site] }] };
      return compute({ ...DEFAULTS, scene: "model" }, data).giant;
    }"""
    given = {"path": "a", "formula": "y", "convention": convention, "layer": 0, "tokens": range(40)}
    found = modules.run(script, site_record(rows=rows, basis=principal_basis(rows), **given))
    lengths = rows.norm(dim=1)
    assert (found["index"], found["feature"]) == (7, 3)
    assert found["share"] == pytest.approx(float((rows[7, 3] / rows[7].norm()) ** 2))
    assert found["times"] == pytest.approx(float(lengths[7] / lengths.sort().values[20]), rel=1e-6)
    rows[7] /= 50
    assert modules.run(script, site_record(rows=rows, basis=principal_basis(rows), **given)) is None
