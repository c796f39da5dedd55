from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import reference, specs
from normkit.geometry import angle_between, image_of
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.layout import layout_of
from normkit.measurement.sampling import Probe, RowPicker, RowSample

N = 6
GAIN = torch.tensor([0.5, -1.5, 1.0, 0.25, 2.0, 0.75], dtype=torch.float64)
BIAS = torch.tensor([0.1, 0.0, -0.2, 0.3, 0.0, 0.5], dtype=torch.float64)
# Quantiles of angles go through arccos here: a cosine near 1 keeps half its digits.
ARCCOS = 1e-6


def sampled(spec, x, y, gain=None, mask=None, batches=1):
    sample = RowSample(spec)
    for batch in range(batches):
        picker = RowPicker(batch, mask)
        sample.enter(x, picker)
        sample.leave(y, picker)
    return sample.result(gain)


def degrees(x, y):
    """Angles by arccos, as the textbook has them."""
    return torch.rad2deg(torch.arccos(F.cosine_similarity(x, y, dim=-1, eps=0.0).clamp(-1, 1)))


def quantiles(values, within=ARCCOS):
    """5 %, 50 % and 95 %, by hand: linear between the two nearest of the sorted values."""
    ordered, found = sorted(values.flatten().tolist()), []
    for share in (0.05, 0.5, 0.95):
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (place - low) * (ordered[high] - ordered[low]))
    return pytest.approx(tuple(found), abs=within)


def test_a_layer_norm_against_the_textbook():
    x = torch.randn(4, 5, N, dtype=torch.float64) + 0.3
    y = F.layer_norm(x, (N,), GAIN, BIAS)
    found = sampled(specs.TORCH_LAYER_NORM, x, y, GAIN)
    before, after = x.norm(dim=-1).flatten(), y.norm(dim=-1).flatten()
    projection = torch.eye(N, dtype=torch.float64) - 1 / N
    sizes = torch.linalg.svdvals(GAIN.diag() @ projection).flip(0)[1:]
    assert found.rows == 20
    assert found.rotation == quantiles(degrees(x, y))
    assert found.rotation_without_affine == quantiles(degrees(x, x @ projection))
    assert found.spread_in == pytest.approx(float(before.quantile(0.95) / before.quantile(0.05)))
    assert found.spread_out == pytest.approx(float(after.quantile(0.95) / after.quantile(0.05)))
    assert found.dimension == N - 2
    assert found.semi_axes == pytest.approx((float(sizes[0]), float(sizes[2]), float(sizes[-1])))
    assert found.elongation == pytest.approx(float(sizes[-1] / sizes[0]))
    assert found.vanishing_gains == 0


def test_an_rms_norm_turns_by_its_gain_alone():
    x = torch.randn(3, 4, N, dtype=torch.float64)
    bare = sampled(specs.LLAMA, x, F.rms_norm(x, (N,), eps=1e-6))
    # What is left of two parallel unit vectors' difference: a few roundings.
    assert bare.rotation == pytest.approx((0.0, 0.0, 0.0), abs=1e-13)
    assert bare.rotation_without_affine == (0.0, 0.0, 0.0)
    assert bare.spread_out == pytest.approx(1.0, abs=1e-5)
    assert (bare.dimension, bare.semi_axes) == (N - 1, pytest.approx((1.0, 1.0, 1.0)))
    found = sampled(specs.LLAMA, x, F.rms_norm(x, (N,), GAIN, 1e-6), GAIN)
    assert found.rotation == quantiles(degrees(x, x * GAIN))
    assert found.rotation_without_affine == (0.0, 0.0, 0.0)
    # |g| sorted: 0.25 0.5 0.75 1 1.5 2.
    assert found.semi_axes == pytest.approx((0.25, 0.875, 2.0))


@pytest.mark.parametrize("n", [2, 3, 8, 65, 400])
@pytest.mark.parametrize("kind", ["distinct", "ties", "one zero", "zeros", "tiny", "equal"])
@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.LLAMA], ids=["centred", "not centred"])
def test_three_axes_of_all(n, kind, spec):
    gain = 1 + 0.3 * torch.randn(n, dtype=torch.float64)
    if kind == "ties":
        gain = (4 * gain).round() / 4
    elif kind == "one zero":
        gain[0] = 0.0
    elif kind == "zeros":
        gain[: n // 2 + 1] = 0.0
    elif kind == "tiny":
        gain[:2] = torch.tensor([5e-33, 1e-9])
    elif kind == "equal":
        gain[:] = -0.7
    x = torch.randn(9, n, dtype=torch.float64)
    found = sampled(spec, x, x * 2, gain)
    # A gain that is as good as 0 makes no axis.
    standing = torch.where(gain.abs() < 1e-8 * gain.abs().max(), 0.0, gain)
    surface = image_of(spec, n, standing - spec.weight_offset).surface
    axes = surface.semi_axes() / math.sqrt(n)
    if not len(axes):
        assert (found.dimension, found.semi_axes) == (None, None)
        return
    assert found.dimension == surface.dimension
    expected = (float(axes[0]), float(axes.quantile(0.5)), float(axes[-1]))
    assert found.semi_axes == pytest.approx(expected, rel=1e-12, abs=0)


def test_gains_that_vanish():
    gain = torch.tensor([0.0, 1e-33, -(2.0**-24), 1e-7, -1.0, 0.5], dtype=torch.float64)
    x = torch.randn(5, N, dtype=torch.float64)
    assert sampled(specs.LLAMA, x, x * gain, gain).vanishing_gains == 3
    nothing = sampled(specs.TORCH_LAYER_NORM, x, x, torch.zeros(N, dtype=torch.float64))
    assert (nothing.vanishing_gains, nothing.dimension, nothing.semi_axes) == (N, None, None)
    assert math.isnan(nothing.elongation)


def test_at_most_64_rows_spread_evenly_from_first_to_last():
    x = torch.arange(1000.0)[:, None].expand(-1, 2).unflatten(0, (20, 50))
    picked = RowPicker(0, None).rows(x, specs.LLAMA)
    places = picked[:, 0]
    assert (picked.shape, picked.dtype) == ((64, 2), torch.float32)
    assert (places[0], places[-1]) == (0, 999)
    assert set(places.diff().tolist()) == {15.0, 16.0}
    assert len(RowPicker(0, None).rows(x[:1], specs.LLAMA)) == 50


@pytest.mark.parametrize("layout", ["tokens", "heads after tokens", "heads before tokens", "flat"])
def test_padding_is_never_picked(layout):
    mask = torch.arange(9) < torch.tensor([[2], [9], [5]])
    x = torch.where(mask, 1.0, math.inf)[..., None, None].expand(3, 9, 4, 2)
    x = {
        "tokens": x[:, :, 0],
        "heads after tokens": x,
        "heads before tokens": x.transpose(1, 2),
        "flat": x[:, :, 0].flatten(0, 1),
    }[layout]
    picked = RowPicker(0, mask).rows(x, specs.LLAMA)
    assert len(picked) == 16 * (4 if "heads" in layout else 1)
    assert picked.isfinite().all()


def test_all_rows_are_sampled_whose_tokens_the_mask_does_not_tell():
    mask = torch.arange(9) < torch.tensor([[2], [9], [5]])
    pooled = torch.randn(3, N)
    assert sampled(specs.LLAMA, pooled, pooled, mask=mask).rows == 3
    whole = specs.TORCH_LAYER_NORM.replace(axes="all_but_batch")
    x = torch.randn(3, 9, 4)
    assert sampled(whole, x, x, mask=mask) == sampled(whole, x, x)
    # As many groups as tokens, and still no tokens.
    assert sampled(whole.replace(groups=9), x, x, mask=mask).rows == 3 * 9


def test_what_enters_may_be_overwritten():
    x = torch.randn(8, N, dtype=torch.float64)
    expected = sampled(specs.LLAMA, x, x * GAIN)
    sample, picker = RowSample(specs.LLAMA), RowPicker(0, None)
    sample.enter(x, picker)
    sample.leave(x.mul_(GAIN), picker)
    assert sample.result(None) == expected
    assert expected.rotation[1] > 1


def test_rows_without_a_direction_are_left_out():
    x = torch.randn(6, N, dtype=torch.float64)
    odd = x.clone()
    odd[0, 2], odd[1, 0], odd[2] = math.nan, math.inf, 0.0
    y = F.layer_norm(odd, (N,), GAIN, BIAS)
    found = sampled(specs.TORCH_LAYER_NORM, odd, y, GAIN)
    assert found == sampled(specs.TORCH_LAYER_NORM, odd[3:], y[3:], GAIN)
    assert found.rows == 3
    assert sampled(specs.LLAMA, odd, torch.zeros_like(odd)) is None
    assert sampled(specs.LLAMA, odd[:1], odd[:1]) is None
    assert sampled(specs.LLAMA, x[:0], x[:0]) is None
    assert RowSample(specs.LLAMA).result(None) is None


def test_a_row_of_equal_entries_is_turned_by_a_right_angle():
    x = torch.full((1, N), -3.0, dtype=torch.float64)
    found = sampled(specs.TORCH_LAYER_NORM, x, F.layer_norm(x, (N,), GAIN, BIAS), GAIN)
    assert found.rotation_without_affine == pytest.approx((90.0, 90.0, 90.0))
    assert found.rotation == quantiles(degrees(x, BIAS))
    # Without a bias nothing leaves.
    assert sampled(specs.TORCH_LAYER_NORM, x, F.layer_norm(x, (N,))) is None


def test_one_row():
    x = torch.randn(1, 1, N, dtype=torch.float64)
    y = F.layer_norm(x, (N,), GAIN, BIAS)
    found = sampled(specs.TORCH_LAYER_NORM, x, y, GAIN)
    assert (found.rows, found.spread_in, found.spread_out) == (1, 1.0, 1.0)
    assert len(set(found.rotation)) == 1
    assert found.rotation == quantiles(degrees(x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_numbers_are_compared_in_float32(dtype):
    # Squares of these leave float16.
    x = (300 * torch.randn(7, N)).to(dtype)
    y = reference.forward(x, specs.TORCH_LAYER_NORM, GAIN.to(dtype), BIAS.to(dtype))
    found = sampled(specs.TORCH_LAYER_NORM, x, y, GAIN)
    exact = sampled(specs.TORCH_LAYER_NORM, x.double(), y.double(), GAIN)
    assert found.rows == 7
    # A few roundings of float32, in degrees.
    for of_narrow, of_wide in (
        (found.rotation, exact.rotation),
        (found.rotation_without_affine, exact.rotation_without_affine),
        ((found.spread_in, found.spread_out), (exact.spread_in, exact.spread_out)),
    ):
        assert of_narrow == pytest.approx(of_wide, abs=1e-4, rel=1e-6)
    angle = angle_between(x.double(), y.double()).rad2deg()
    assert exact.rotation[1] == pytest.approx(float(angle.median()), rel=1e-12)


def test_a_huge_mean_is_no_obstacle():
    x = torch.randn(5, N, dtype=torch.float64) + 1e8
    found = sampled(specs.TORCH_LAYER_NORM, x, F.layer_norm(x, (N,)))
    assert found.rows == 5
    assert found.rotation[1] == pytest.approx(90.0, abs=1e-5)


def test_every_call_of_a_batch_counts():
    x = torch.randn(2, 3, N, dtype=torch.float64)
    sample, picker = RowSample(specs.LLAMA), RowPicker(0, None)
    for gain in (1.0, GAIN, GAIN**2):
        sample.enter(x, picker)
        sample.leave(x * gain, picker)
    found = sample.result(None)
    assert found.rows == 18
    assert found.rotation == quantiles(torch.cat([degrees(x, x * gain) for gain in (torch.ones(N), GAIN, GAIN**2)]))


def test_of_many_batches_some_are_kept_spread_evenly():
    sample = RowSample(specs.LLAMA)
    for batch in range(100):
        picker = RowPicker(batch, None)
        # The length of its one row tells the batch.
        x = torch.full((1, N), 1.0 + batch, dtype=torch.float64)
        sample.enter(x, picker)
        sample.leave(x, picker)
        assert len(sample._kept) <= 16
    lengths = [float(numbers[2] / math.sqrt(N)) - 1 for kept in sample._kept.values() for numbers in kept]
    assert lengths == pytest.approx([8.0 * place for place in range(13)])
    assert sample.result(None).rows == 13


def test_a_call_that_raised_leaves_nothing_behind():
    x = torch.randn(4, N, dtype=torch.float64)
    sample, picker = RowSample(specs.LLAMA), RowPicker(0, None)
    sample.enter(x, picker)
    sample.enter(3 * x, picker)
    sample.leave(x, picker)
    # Nothing entered before this one, and this one is of another shape.
    sample.leave(x, picker)
    sample.enter(x, picker)
    sample.leave(x[:, :3], picker)
    assert sample.result(None).rows == 4


def test_groups_are_rows_without_one_image():
    spec = specs.TORCH_LAYER_NORM.replace(axes="all_but_batch", groups=2)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    y = F.group_norm(x, 2)
    found = sampled(spec, x, y, torch.ones(4, dtype=torch.float64))
    assert found.rows == 10
    assert found.rotation == quantiles(degrees(x.reshape(10, 6), y.reshape(10, 6)))
    assert (found.dimension, found.semi_axes) == (None, None)


def test_rows_over_two_axes_and_along_channels():
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    found = sampled(specs.TORCH_LAYER_NORM.replace(axes=(-2, -1)), x, x * GAIN.view(2, 3), GAIN)
    assert found.rotation == quantiles(degrees(x.flatten(1), x.flatten(1) * GAIN))
    assert found.dimension == 4
    channels = sampled(specs.TORCH_LAYER_NORM.replace(axes=(1,)), x, x * GAIN[:2, None], GAIN[:2])
    rows = x.transpose(1, 2)
    assert channels.rows == 15
    assert channels.rotation == quantiles(degrees(rows, rows * GAIN[:2]))
    assert channels.dimension == 0


def test_heads_with_gains_of_their_own_have_no_one_image():
    x = torch.randn(2, 3, 4, N, dtype=torch.float64)
    found = sampled(specs.LLAMA, x, x, torch.rand(4, N, dtype=torch.float64))
    assert (found.rows, found.dimension, found.semi_axes) == (24, None, None)


@pytest.mark.parametrize(
    ("spec", "gain"),
    [
        (specs.LLAMA.replace(centre_numerator=True), GAIN),
        (specs.LLAMA, GAIN * math.nan),
        (specs.LLAMA.replace(weight_placement="before"), GAIN * 0),
    ],
    ids=["mean above the bar only", "gain not finite", "gain of 0 before the norm"],
)
def test_what_has_no_image_is_still_sampled(spec, gain):
    x = torch.randn(5, N, dtype=torch.float64)
    found = sampled(spec, x, x, gain)
    assert (found.rows, found.dimension, found.semi_axes) == (5, None, None)


def test_a_gain_before_the_norm_leaves_a_sphere_and_an_offset_is_in_the_gain():
    x = torch.randn(5, N, dtype=torch.float64)
    before = sampled(specs.LLAMA.replace(weight_placement="before"), x, x * GAIN, GAIN)
    assert before.semi_axes == pytest.approx((1.0, 1.0, 1.0))
    assert sampled(specs.GEMMA, x, x * GAIN, GAIN).semi_axes == pytest.approx((0.25, 0.875, 2.0))


class Norms(nn.Module):
    """A module norm, one over heads, one called as a function; and what goes in and out of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.of_heads = nn.LayerNorm(8, eps=1e-3), nn.RMSNorm(4)
        nn.init.normal_(self.norm.weight)
        self.seen = {}

    def forward(self, x):
        y = self.norm(x)
        heads = y.unflatten(-1, (2, 4)).transpose(1, 2)
        of_heads, called = self.of_heads(heads), F.rms_norm(y, (8,), torch.arange(1.0, 9.0))
        self.seen = {"norm": (x, y), "of_heads": (heads, of_heads), ":rms_norm": (y, called)}
        return called


@pytest.mark.slow
@torch.no_grad()
def test_a_probe_samples_every_norm_but_no_padding():
    model, mask = Norms(), torch.arange(9) < torch.tensor([[2], [9], [5]])
    x = torch.where(mask[..., None], torch.randn(3, 9, 8), 1e6)
    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)
    probe = Probe(model, layout_of(sites, (), called))
    with probe:
        probe.batch(mask)
        model(x)
        padded = dict(model.seen)
        probe.batch(None)
        model(x[1:2])
    assert [site.path for site in sites] == ["norm", "of_heads", ":rms_norm"]
    gains = {site.path: site.gain for site in sites}
    geometries = {path: sample.result(gains[path]) for path, sample in probe.measured().samples.items()}
    for site in sites:
        parts = zip(padded[site.path], model.seen[site.path], strict=True)
        if site.path == "of_heads":
            entered, left = (torch.cat([p.transpose(1, 2)[mask].flatten(0, 1), q[0].flatten(0, 1)]) for p, q in parts)
        else:
            entered, left = (torch.cat([p[mask], q[0]]) for p, q in parts)
        entered, left = entered.double(), left.double()
        found = geometries[site.path]
        assert found.rows == len(entered) == 25 * (2 if site.path == "of_heads" else 1)
        # The sample is compared in float32, the model's own dtype.
        assert found.rotation == quantiles(degrees(entered, left), within=1e-4)
        ends = entered.norm(dim=-1).quantile(torch.tensor([0.05, 0.95], dtype=torch.float64))
        assert found.spread_in == pytest.approx(float(ends[1] / ends[0]))
    assert [geometries[site.path].dimension for site in sites] == [6, 3, 7]
    assert geometries[":rms_norm"].semi_axes == pytest.approx((1.0, 4.5, 8.0))
