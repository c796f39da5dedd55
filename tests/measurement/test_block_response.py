from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.layout import find_blocks
from normkit.measurement.placement import sweep
from normkit.measurement.structure import survey

WIDTH, TOKENS = 32, 12
PRE, POST, PERI = ["pre", "pre"], ["post", "post"], ["pre", "output", "pre", "output"]


def swept(model, x):
    """(sweeps, roles in forward order) of a model."""
    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)
    sweeps, roles, _ = sweep(model, sites, find_blocks(model, called), lambda: model(x))
    return sweeps, {site.path: roles[site.path] for site in sites}


def roles_in(roles, block):
    return [role for path, role in roles.items() if path.startswith(f"{block}.")]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        query, key, value = (heads.unflatten(-1, (4, -1)).transpose(1, 2) for heads in self.projections(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    def forward(self, x):
        return self.output(self.heads(x).flatten(2))


class Block(nn.Module):
    """Two sublayers, a and m, four norms with gains, one over heads and two without a gain, wired as asked."""

    def __init__(self, wiring):
        super().__init__()
        self.wiring = wiring
        self.a, self.m = Attention(), nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.n1, self.n2, self.n3, self.n4 = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(4))
        for norm in (self.n1, self.n2, self.n3, self.n4):
            nn.init.normal_(norm.weight, 1.0, 0.3)
        self.heads = nn.RMSNorm(WIDTH // 4)
        self.p1, self.p2 = (nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False) for _ in range(2))

    def forward(self, x):
        return self.wiring(self, x)


class Stack(nn.Module):
    def __init__(self, wiring, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block(wiring) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def pre(b, x):
    x = x + b.a(b.n1(x))
    return x + b.m(b.n2(x))


def parallel(b, x):
    read = b.n1(x)
    return x + b.a(read) + b.m(read)


def post(b, x):
    x = b.n1(x + b.a(x))
    return b.n2(x + b.m(x))


def peri(b, x):
    x = x + b.n2(b.a(b.n1(x)))
    return x + b.n4(b.m(b.n3(x)))


def output_only(b, x):
    x = x + b.n1(b.a(x))
    return x + b.n2(b.m(x))


def without(b, x):
    x = x + b.a(x)
    return x + b.m(x)


def residual_after_norm(b, x):
    x = b.n1(x)
    x = b.n2(x + b.a(x))
    return x + b.m(x)


def residual_after_norm_first(b, x):
    x = b.n1(x)
    x = x + b.a(x)
    return x + b.m(b.n2(x))


def residual_after_norm_second(b, x):
    x = b.n2(x + b.a(b.n1(x)))
    return x + b.m(x)


def scaled_stream(b, x):
    return 0.5 * pre(b, x)


def small_branches(b, x):
    x = x + 1e-5 * b.a(b.n1(x))
    return x + 1e-5 * b.m(b.n2(x))


def in_place(b, x):
    x.add_(b.a(b.n1(x)))
    return x.add_(b.m(b.n2(x).relu_()))


def norm_inside_branch(b, x):
    x = x + b.a.output(b.n2(b.a(b.n1(x))))
    return x + b.m(b.n3(x))


def norm_of_heads_behind_attention(b, x):
    return x + b.a.output(b.heads(b.a.heads(b.n1(x))).flatten(2))


def norm_of_heads_without_attention(b, x):
    return x + b.a.output(b.heads(b.n1(x).unflatten(-1, (4, -1))).flatten(2))


def norm_of_a_norm(b, x):
    return x + b.a(b.p2(b.p1(x)))


def output_only_behind_a_norm_of_its_own(b, x):
    return x + b.n1(b.a(x / x.norm(dim=-1, keepdim=True)))


def pre_then_without(b, x):
    x = x + b.a(b.n1(x))
    return x + b.m(x)


def pre_then_output_only(b, x):
    x = x + b.a(b.n1(x))
    return x + b.n2(b.m(x))


def pre_then_peri(b, x):
    x = x + b.a(b.n1(x))
    return x + b.n3(b.m(b.n2(x)))


def post_then_pre(b, x):
    x = b.n1(x + b.a(x))
    return x + b.m(b.n2(x))


def post_then_without(b, x):
    x = b.n1(x + b.a(x))
    return x + b.m(x)


def pre_and_post(b, x):
    return b.n2(x + b.a(b.n1(x)))


def norm_at_entry(b, x):
    return pre(b, b.n3(x))


def silent(b, x):
    return x + 0.0 * b.a(b.n1(x))


@pytest.mark.parametrize(
    ("wiring", "placement", "roles"),
    [
        (pre, "pre", PRE),
        (parallel, "pre", ["pre"]),
        (post, "post", POST),
        (peri, "peri", PERI),
        (output_only, "output-only", ["output", "output"]),
        (without, "none", []),
        (residual_after_norm, "residual-after-norm", PRE),
        (residual_after_norm_first, "residual-after-norm", ["pre", "unknown"]),
        (residual_after_norm_second, "residual-after-norm", PRE),
        (scaled_stream, "pre", PRE),
        (small_branches, "pre", PRE),
        (in_place, "pre", PRE),
        (norm_inside_branch, "pre", ["pre", "unknown", "pre"]),
        (norm_of_heads_behind_attention, "pre", ["pre", "unknown"]),
        (norm_of_heads_without_attention, "pre", ["pre", "query-key"]),
        (norm_of_a_norm, "pre", ["pre", "unknown"]),
        (output_only_behind_a_norm_of_its_own, "unknown", ["output"]),
        (pre_then_without, "unknown", ["pre"]),
        (pre_then_output_only, "unknown", ["pre", "output"]),
        (pre_then_peri, "unknown", ["pre", "pre", "output"]),
        (post_then_pre, "unknown", ["post", "unknown"]),
        (post_then_without, "unknown", ["post"]),
        (pre_and_post, "unknown", ["pre", "post"]),
        (norm_at_entry, "unknown", ["post", "unknown", "unknown"]),
        (silent, "unknown", ["pre"]),
    ],
)
def test_wirings(wiring, placement, roles):
    sweeps, found = swept(Stack(wiring), torch.randn(1, TOKENS, WIDTH))
    assert [one.placement for one in sweeps] == [placement] * 2
    assert [roles_in(found, f"layers.{index}") for index in range(2)] == [roles] * 2


@pytest.mark.parametrize(
    ("wiring", "output_slope", "branch_slope", "rows_normalized"),
    [
        (pre, 1, 0, None),
        (peri, 1, 0, None),
        (output_only, 1, 0, None),
        (without, 1, 1, None),
        (post, 0, 1, True),
        (residual_after_norm, 0, 1, False),
        (small_branches, 1, 0, None),
        (silent, 1, math.nan, None),
    ],
)
def test_the_table_of_fingerprints(wiring, output_slope, branch_slope, rows_normalized):
    for one in swept(Stack(wiring), torch.randn(1, TOKENS, WIDTH))[0]:
        assert one.output_slope == pytest.approx(output_slope, abs=0.05)
        assert one.branch_slope == pytest.approx(branch_slope, abs=0.05, nan_ok=True)
        assert one.rows_normalized is rows_normalized


@pytest.mark.parametrize("wiring", [pre, peri, output_only])
def test_a_first_block_that_normalizes_the_embeddings_has_the_place_of_the_others(wiring):
    """As in RWKV: its wiring is that of what leaves the norm."""
    model, x = Stack(wiring, layers=3), torch.randn(1, TOKENS, WIDTH)
    expected, roles = swept(model, x)
    model.layers[0].wiring = lambda b, x: wiring(b, b.p1(x))
    sweeps, found = swept(model, x)
    assert [one.placement for one in sweeps] == [one.placement for one in expected]
    assert found == {"layers.0.p1": "embedding", **roles}
    assert sweeps[0].output_slope == pytest.approx(1, abs=0.05)
    # In a later block the stream's length is lost, and a first block that is wired as no other one stays unplaced.
    model.layers[0].wiring, model.layers[1].wiring = wiring, model.layers[0].wiring
    placement = expected[0].placement
    assert [one.placement for one in swept(model, x)[0]] == [placement, "unknown", placement]
    model.layers[0].wiring, model.layers[1].wiring = model.layers[1].wiring, post
    model.layers[2].wiring = post
    assert [one.placement for one in swept(model, x)[0]] == ["unknown", "post", "post"]


@pytest.mark.parametrize("scale", [1e-3, 1e4])
@pytest.mark.parametrize("wiring", [pre, post, peri])
def test_the_scale_of_the_stream_does_not_matter(wiring, scale):
    sweeps, _ = swept(Stack(wiring, layers=1), scale * torch.randn(1, TOKENS, WIDTH))
    assert sweeps[0].placement == wiring.__name__


class OverTokens(nn.Module):
    """A block that closes with a norm over tokens and features together."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm((5, 8))
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.norm(x + self.linear(x))


@pytest.mark.slow
def test_a_block_that_closes_with_a_norm_over_several_axes_is_read_in_its_rows():
    torch.manual_seed(0)
    model = nn.Sequential(OverTokens(), OverTokens())
    inspection = nk.inspect(model, {"input": torch.randn(2, 5, 8)})
    assert [block.rows_normalized for block in inspection.blocks] == [True, True]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Attending(nn.Module):
    def forward(self, x):
        heads = x[:, None]
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]


class Spatial(nn.Module):
    """As a spatial transformer of a UNet: a norm of channel groups, then rows of places with norms of their own."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.GroupNorm(4, 16), nn.LayerNorm(16)
        self.project, self.attention = nn.Linear(16, 16), Attending()

    def forward(self, x):
        rows = self.norm(x).flatten(2).mT
        rows = rows + self.attention(self.inner(self.project(rows)))
        return x + rows.mT.reshape(x.shape)


class Branching(nn.Module):
    """Blocks of maps, then larger maps of the same width in modules whose sizes change, as in the decoder of a UNet."""

    def __init__(self):
        super().__init__()
        self.middle = nn.ModuleList(Spatial() for _ in range(2))
        self.up = nn.ModuleList(nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 1)) for _ in range(2))
        self.end = nn.GroupNorm(4, 16)

    def forward(self, x):
        for block in self.middle:
            x = block(x)
        x = nn.functional.interpolate(x, scale_factor=2.0)
        x = torch.cat([layer(x) for layer in self.up], 1)
        return self.end(x)


def test_a_norm_of_larger_maps_is_no_final_norm_and_one_of_places_no_norm_of_queries():
    torch.manual_seed(0)
    model, x = Branching().eval(), torch.randn(2, 16, 4, 4)
    found = survey(model, lambda: model(x))
    sweeps, roles, final_norm = found.sweeps, found.roles, found.final_norm
    assert [each.placement for each in sweeps] == ["pre", "pre"]
    assert [roles[f"middle.{index}.norm"] for index in range(2)] == ["pre", "pre"]
    assert [roles[f"middle.{index}.inner"] for index in range(2)] == ["unknown", "unknown"]
    assert (roles["up.0.0"], roles["up.1.0"], roles["end"], final_norm) == (*["unknown"] * 3, None)


def test_norms_in_blocks_that_are_not_found_are_no_norms_of_the_embedding():
    """As of a tower whose rows lie in maps of several frames."""

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.ModuleList(Plain() for _ in range(2))
            self.start, self.layers = nn.LayerNorm(WIDTH), nn.Sequential(Plain(), Plain())

        def forward(self, x):
            rows = x[:, :, None, None]
            for block in self.patches:
                rows = block(rows)
            return self.layers(self.start(rows.reshape(x.shape)))

    _, roles = swept(Tower(), torch.randn(2, TOKENS, WIDTH))
    assert [roles[f"patches.{index}.norm"] for index in range(2)] == ["unknown", "unknown"]
    assert roles["start"] == "embedding"
