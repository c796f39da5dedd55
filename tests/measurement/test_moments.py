from __future__ import annotations

import math

import pytest
import torch

from normkit import reference, specs
from normkit.measurement.moments import AttenuationAccumulator, RowAccumulator, row_moments, token_rows
from normkit.spec import NormSpec

# A row's sums are taken in float32 or wider: a few roundings of 6e-8. Where the mean dwarfs the deviations they are
# taken in float64 before a hundred times as much is lost.
CLOSE = {"rel": 2e-6, "abs": 2e-6}
QUANTILES = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)


def measured(*tensors, mask=None):
    accumulator = RowAccumulator()
    for tensor in tensors:
        rows = token_rows(tensor, mask)
        assert rows is not None
        accumulator.add(row_moments(rows))
    return accumulator.result()


def two_pass(*tensors):
    """The same by its definition: every row at once, in float64, about its own mean."""
    rows = torch.cat([tensor.reshape(-1, tensor.shape[-1]).double() for tensor in tensors])
    finite = rows[rows.isfinite().all(-1)]
    rms = finite.square().mean(-1).sqrt()
    present, rms_present = finite[rms > 0], rms[rms > 0]
    mean = present.mean(-1)
    deviation = (present - mean[:, None]).square().mean(-1).sqrt()
    bins, counts = (8 * rms_present.log2()).floor().long().unique(return_counts=True)
    return {
        "rows": len(finite),
        "features": rows.shape[-1],
        "rms_min": float(rms.min()),
        "rms_max": float(rms.max()),
        "histogram": tuple(zip(bins.tolist(), counts.tolist(), strict=True)),
        "zero_rows": int((rms == 0).sum()),
        "mean_energy": float((mean / rms_present).square().mean()),
        "angle_to_ones": float(torch.rad2deg(torch.atan2(deviation, mean)).mean()),
        "absmax": float(rows[rows.isfinite()].abs().max()),
        "nonfinite": int((~rows.isfinite()).sum()),
        "quantiles": torch.quantile(rms_present, QUANTILES).tolist(),
    }


def assert_agree(statistics, expected):
    for name in ("rows", "features", "histogram", "zero_rows", "nonfinite"):
        assert getattr(statistics, name) == expected[name], name
    for name in ("rms_min", "rms_max", "mean_energy", "angle_to_ones", "absmax"):
        assert getattr(statistics, name) == pytest.approx(expected[name], **CLOSE), name
    # A bin is an eighth of an octave; the two definitions of a quantile differ by a row on either side.
    for read, exact in zip(statistics.rms_quantiles, expected["quantiles"], strict=True):
        assert abs(math.log2(read / exact)) < 0.25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uneven_mean_shifted_batches(dtype):
    # What pooled variances get wrong: parts of different sizes, means and scales.
    parts = [
        torch.randn(2, 3, 48).mul(0.01).to(dtype),
        torch.randn(5, 48).add(3).to(dtype),
        torch.randn(1, 700, 48).mul(20).sub(100).to(dtype),
    ]
    assert_agree(measured(*parts), two_pass(*parts))


@pytest.mark.parametrize("shift", [1e3, 1e5])
def test_a_mean_that_dwarfs_the_deviations(shift):
    x = (torch.randn(64, 96, dtype=torch.float64) + shift).float()
    statistics, expected = measured(x), two_pass(x)
    # Of the order of 1/shift radians: lost altogether by an arccosine, or by E[x^2] - E[x]^2 in float32.
    assert statistics.angle_to_ones == pytest.approx(expected["angle_to_ones"], rel=1e-6)
    assert statistics.mean_energy == pytest.approx(expected["mean_energy"], **CLOSE)


def test_constant_rows_lie_on_the_ones_direction():
    statistics = measured(torch.full((2, 384), 1e4), torch.full((2, 384), -0.1))
    assert statistics.mean_energy == pytest.approx(1.0, **CLOSE)
    assert statistics.angle_to_ones == pytest.approx(90.0, **CLOSE)
    assert row_moments(torch.full((2, 384), 0.1)).std.tolist() == [0.0, 0.0]


def test_rows_that_are_not_finite_do_not_poison_the_others():
    x = torch.randn(4, 10, 16)
    clean = two_pass(x.flatten(0, 1)[3:])
    x[0, 0, 2], x[0, 1, 3], x[0, 2, 4], x[0, 2, 5] = math.nan, math.inf, -math.inf, math.nan
    statistics = measured(x)
    assert statistics.rows == 37
    assert statistics.nonfinite == 4
    for name in ("rms_min", "rms_max", "mean_energy", "angle_to_ones"):
        assert getattr(statistics, name) == pytest.approx(clean[name], **CLOSE)


def test_absmax_counts_the_finite_elements_of_broken_rows():
    assert measured(torch.tensor([[1.0, 1.0], [50.0, math.inf]])).absmax == 50.0


def test_zero_rows_are_rows_without_a_direction():
    x = torch.cat([torch.zeros(3, 8), torch.randn(5, 8)])
    statistics = measured(x)
    assert_agree(statistics, two_pass(x))
    assert (statistics.zero_rows, statistics.rms_min) == (3, 0.0)
    assert sum(count for _, count in statistics.histogram) == 5


def test_nothing_but_zeros():
    statistics = measured(torch.zeros(3, 8))
    assert (statistics.rows, statistics.zero_rows, statistics.rms_max, statistics.absmax) == (3, 3, 0.0, 0.0)
    assert math.isnan(statistics.rms_median)
    assert math.isnan(statistics.mean_energy)


@pytest.mark.parametrize(
    "tensors", [(), (torch.empty(0, 8),), (torch.empty(2, 0, 8),), (torch.full((2, 8), math.nan),)]
)
def test_no_rows(tensors):
    statistics = measured(*tensors)
    assert statistics.rows == 0
    assert statistics.histogram == ()
    assert math.isnan(statistics.rms_min)
    assert math.isnan(statistics.angle_to_ones)
    assert statistics.absmax == 0.0


def test_an_empty_batch_changes_nothing():
    x = torch.randn(7, 8)
    assert measured(x, torch.empty(0, 8)) == measured(x)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-40, 1e200])
def test_squares_that_leave_the_range_of_float64(scale):
    x = torch.randn(50, 16, dtype=torch.float64)
    statistics, plain = measured(x * scale), measured(x)
    assert statistics.rms_min == pytest.approx(plain.rms_min * scale, rel=1e-12)
    assert statistics.rms_max == pytest.approx(plain.rms_max * scale, rel=1e-12)
    assert statistics.angle_to_ones == pytest.approx(plain.angle_to_ones, rel=1e-12)
    assert statistics.zero_rows == 0


def test_rows_beyond_float32_fall_into_the_end_bins():
    rows = torch.ones(3, 4, dtype=torch.float64) * torch.tensor([1e-100, 1.0, 1e100], dtype=torch.float64)[:, None]
    assert measured(rows).histogram == ((-8 * 160, 1), (0, 1), (8 * 130 - 1, 1))


def test_many_rows():
    parts = [torch.randn(rows, 8) for rows in (20_000, 10, 17_000, 1)]
    assert_agree(measured(*parts), two_pass(*parts))


def test_a_result_can_be_read_on_the_way():
    accumulator, parts = RowAccumulator(), torch.randn(3, 100, 8)
    for count, part in enumerate(parts, start=1):
        accumulator.add(row_moments(part))
        assert_agree(accumulator.result(), two_pass(parts[:count]))


def test_quantiles_of_equal_rows_are_exact():
    x = torch.nn.functional.rms_norm(torch.randn(100, 64, dtype=torch.float64), (64,), eps=0.0)
    assert measured(x).rms_quantiles == pytest.approx((1.0, 1.0, 1.0), **CLOSE)


def test_quantiles_are_read_to_an_eighth_of_an_octave():
    rms = torch.logspace(-6, 6, 10_001, base=2, dtype=torch.float64)
    statistics = measured(rms[:, None].expand(-1, 4))
    for read, share in zip(statistics.rms_quantiles, QUANTILES.tolist(), strict=True):
        assert abs(math.log2(read) - (12 * share - 6)) < 0.01


MASK = torch.tensor([[True, True, False, False], [True, True, True, False]])


@pytest.mark.parametrize("layout", ["B T n", "B T H n", "B H T n", "BT n"])
def test_a_token_mask_selects_rows(layout):
    x = torch.randn(2, 4, 3, 5)
    # Poison in the padding: it must not be looked at.
    x[~MASK] = math.nan
    kept = x[MASK]
    shaped = {
        "B T n": (x[:, :, 0], kept[:, 0]),
        "B T H n": (x, kept),
        "B H T n": (x.transpose(1, 2), kept),
        "BT n": (x[:, :, 0].flatten(0, 1), kept[:, 0]),
    }
    masked, expected = shaped[layout]
    statistics = measured(masked, mask=MASK)
    assert statistics.nonfinite == 0
    assert_agree(statistics, two_pass(expected))


@pytest.mark.parametrize("shape", [(2, 5), (3, 4, 5), (7, 5), (2, 4, 4, 5), (2, 3, 3, 4, 5)])
def test_a_mask_that_does_not_fit_selects_nothing(shape):
    assert token_rows(torch.randn(shape), MASK) is None


@pytest.mark.parametrize(
    "spec",
    [
        specs.TORCH_LAYER_NORM,
        specs.LLAMA,
        specs.ANNOTATED_TRANSFORMER,
        specs.ANNOTATED_TRANSFORMER.replace(eps=0.3),
        specs.SCALE_NORM.replace(eps=0.5),
        specs.L2_NORM,
        specs.POCKET_TTS,
        NormSpec(eps=0.05, centre_statistics=False),
        NormSpec(eps=0.1, eps_placement="clamp"),
    ],
    ids=str,
)
def test_attenuation_is_the_length_with_eps_over_the_length_without(spec):
    x = torch.randn(500, 24, dtype=torch.float64) * torch.logspace(-4, 1, 500, dtype=torch.float64)[:, None] + 0.01
    accumulator = AttenuationAccumulator(spec, spec.eps)
    for part in x.split([1, 99, 400]):
        accumulator.add(row_moments(part))
    found = accumulator.result()
    bare = spec.replace(has_weight=False, has_bias=False)
    with_eps, without = (
        torch.linalg.vector_norm(reference.forward(x, one), dim=-1) for one in (bare, bare.replace(eps=0.0))
    )
    expected = with_eps / without
    assert found.smallest == pytest.approx(float(expected.min()), rel=1e-10)
    assert found.share_below_99 == float((expected < 0.99).double().mean())
    assert found.share_below_90 == float((expected < 0.9).double().mean())
    # The median is read off bins of 1/64 octave of v.
    assert found.median == pytest.approx(float(expected.quantile(0.5)), rel=0.02)


def test_rows_without_variance_do_not_count_as_attenuated():
    accumulator = AttenuationAccumulator(specs.TORCH_LAYER_NORM, 1e-5)
    accumulator.add(row_moments(torch.cat([torch.zeros(5, 8), torch.ones(5, 8), torch.randn(10, 8)])))
    assert accumulator.result().share_below_90 == 0.0
    assert accumulator.result().smallest > 0.99


def test_no_eps_does_not_attenuate():
    accumulator = AttenuationAccumulator(specs.LLAMA.replace(eps=0.0), 0.0)
    accumulator.add(row_moments(torch.randn(10, 8) * 1e-6))
    assert (accumulator.result().median, accumulator.result().smallest) == (1.0, 1.0)


def test_attenuation_of_nothing_is_unknown():
    found = AttenuationAccumulator(specs.LLAMA, 1e-6).result()
    assert all(math.isnan(value) for value in (found.median, found.smallest, found.share_below_90))


@pytest.mark.parametrize(
    ("spec", "expected"), [(specs.LLAMA, 8 * 9.0), (specs.BERT, 0.0), (specs.L2_NORM, 8 * 9.0)], ids=str
)
def test_the_largest_sum_under_the_root(spec, expected):
    accumulator = AttenuationAccumulator(spec, 1e-6)
    accumulator.add(row_moments(torch.tensor([[3.0] * 8, [1.0] * 8])))
    assert accumulator.largest_sum() == pytest.approx(expected, **CLOSE)


def test_kurtosis_is_the_mean_over_rows():
    gaussian = torch.randn(4000, 512, generator=torch.Generator().manual_seed(0))
    found = measured(*gaussian.split(100))
    # Of 40 calls 32 rows each count; one row's kurtosis has a standard deviation of sqrt(24 / 512).
    assert found.kurtosis == pytest.approx(3.0, abs=4 * math.sqrt(24 / 512 / 1280) + 6 / 512)
    rows = torch.tensor([[1.0, -1.0, 1.0, -1.0], [3.0, -1.0, -1.0, -1.0]])
    # Two values give 1, one out of four (n - 1 + 1 / (n - 1) - 1).
    assert measured(rows).kurtosis == pytest.approx((1.0 + 7 / 3) / 2)
    assert measured(1e8 + 1e4 * rows).kurtosis == pytest.approx((1.0 + 7 / 3) / 2, rel=1e-2)


def test_constant_rows_have_no_kurtosis():
    assert math.isnan(measured(torch.full((3, 8), 0.1)).kurtosis)
    assert math.isnan(measured(torch.zeros(3, 8)).kurtosis)
    assert math.isnan(measured(torch.empty(0, 8)).kurtosis)
    one = torch.cat([torch.full((3, 4), 0.1), torch.tensor([[3.0, -1.0, -1.0, -1.0]])])
    assert measured(one).kurtosis == pytest.approx(7 / 3)


def test_one_spike_shows_in_the_kurtosis():
    rows = torch.randn(20, 1024, generator=torch.Generator().manual_seed(0))
    rows[:, 7] = 200.0
    assert measured(rows).kurtosis > 900
