"""Every statistic of a row counter against its definition in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normkit import NormSpec, reference, specs
from normkit.measurement.facts import RowStatistics
from normkit.measurement.instruments import add_gradient
from normkit.measurement.row_counters import (
    GRADIENT_SUMS,
    RowCounter,
    TableReader,
    Tables,
    gradient_table,
    named,
    row_mask,
    row_tables,
)

LAYER, RMS = specs.TORCH_LAYER_NORM, specs.LLAMA
QUANTILES = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)


def read(*calls: Tensor, spec: NormSpec = LAYER, mask: Tensor | None = None) -> TableReader:
    tables = Tables(row_tables(1), torch.device("cpu"))
    for x in calls:
        RowCounter(place=0, spec=spec, enters_norm=True).add(tables, x, mask)
    return TableReader(step=0, tables=tables.unpacked(tables.packed()))


def two_pass(*tensors: Tensor) -> dict[str, Any]:
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
        "absmax": float(finite.abs().max()),
        "nonfinite": len(rows) - len(finite),
        "quantiles": torch.quantile(rms_present, QUANTILES).tolist(),
    }


def assert_agree(statistics: RowStatistics, expected: dict[str, Any]) -> None:
    for name in ("rows", "features", "histogram", "zero_rows", "nonfinite"):
        assert getattr(statistics, name) == expected[name], name
    # A row's sums are taken in float32 or wider: a few roundings of 6e-8.
    for name in ("rms_min", "rms_max", "mean_energy", "angle_to_ones", "absmax"):
        assert getattr(statistics, name) == pytest.approx(expected[name], rel=2e-6, abs=2e-6), name
    # A bin is an eighth of an octave; the two definitions of a quantile differ by a row on either side.
    for found, exact in zip(statistics.rms_quantiles, expected["quantiles"], strict=True):
        assert abs(math.log2(found / exact)) < 0.25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uneven_mean_shifted_batches(dtype: torch.dtype):
    # What pooled variances get wrong: parts of different sizes, means and scales.
    parts = [
        torch.randn(2, 3, 48).mul(0.01).to(dtype),
        torch.randn(5, 48).add(3).to(dtype),
        torch.zeros(2, 48, dtype=dtype),
        torch.randn(1, 700, 48).mul(20).sub(100).to(dtype),
    ]
    assert_agree(read(*parts).rows(0, 48), two_pass(*parts))


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
def test_attenuation_is_the_length_with_eps_over_the_length_without(spec: NormSpec):
    x = torch.randn(500, 24, dtype=torch.float64) * torch.logspace(-4, 1, 500, dtype=torch.float64)[:, None] + 0.01
    found = read(*x.split([1, 99, 400]), spec=spec).attenuation(0, spec)
    bare = spec.replace(has_weight=False, has_bias=False)
    with_eps, without = (
        torch.linalg.vector_norm(reference.forward(x, one), dim=-1) for one in (bare, bare.replace(eps=0.0))
    )
    expected = with_eps / without
    assert found.smallest == pytest.approx(float(expected.min()), rel=1e-10)
    assert found.share_below_99 == float((expected < 0.99).double().mean())
    assert found.share_below_90 == float((expected < 0.9).double().mean())
    # The median is read off bins of 1/8 octave of what the norm divides by.
    assert found.median == pytest.approx(float(expected.quantile(0.5)), rel=0.05)


def test_no_rows_and_no_eps_have_no_attenuation():
    nothing = read(spec=RMS).attenuation(0, RMS)
    assert all(math.isnan(value) for value in (nothing.median, nothing.smallest, nothing.share_below_90))
    bare = RMS.replace(eps=0.0)
    found = read(torch.randn(10, 8) * 1e-6, spec=bare).attenuation(0, bare)
    assert (found.median, found.smallest, found.share_below_90) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("spec", "expected"), [(specs.LLAMA, 8 * 9.0), (specs.BERT, 0.0), (specs.L2_NORM, 8 * 9.0)], ids=str
)
def test_the_largest_sum_under_the_root(spec: NormSpec, expected: float):
    line = read(torch.tensor([[3.0] * 8, [1.0] * 8]), spec=spec).line(0)
    assert max(line["peak sum"], 0.0) == pytest.approx(expected)


def test_quantiles_are_read_to_an_eighth_of_an_octave():
    rms = torch.logspace(-6, 6, 10_001, base=2, dtype=torch.float64)
    statistics = read(rms[:, None].expand(-1, 4)).rows(0, 4)
    for found, share in zip(statistics.rms_quantiles, QUANTILES.tolist(), strict=True):
        assert abs(math.log2(found) - (12 * share - 6)) < 0.01
    equal = torch.nn.functional.rms_norm(torch.randn(100, 64, dtype=torch.float64), (64,), eps=0.0)
    assert read(equal).rows(0, 64).rms_quantiles == pytest.approx((1.0, 1.0, 1.0))


def test_nothing_but_zeros():
    statistics = read(torch.zeros(3, 8)).rows(0, 8)
    assert (statistics.rows, statistics.zero_rows, statistics.rms_max, statistics.absmax) == (3, 3, 0.0, 0.0)
    assert math.isnan(statistics.rms_median)
    assert math.isnan(statistics.mean_energy)
    assert math.isnan(statistics.kurtosis)


@pytest.mark.parametrize("shape", [(2, 5), (3, 4), (7,), (2, 4, 4), (2, 3, 3, 4)])
def test_a_mask_of_other_tokens_selects_nothing(shape: tuple[int, ...]):
    assert row_mask(shape, torch.ones(2, 4, dtype=torch.bool)) is None


def test_the_kurtosis_is_the_mean_over_the_rows_that_vary():
    x = torch.randn(6, 500) ** 3 * torch.tensor([1.0, 1e-3, 1e3, 1.0, 1.0, 1.0])[:, None] + 0.2
    x[3], x[4] = 0.0, 0.7
    rows = x[[0, 1, 2, 5]].double()
    deviation = rows - rows.mean(-1, keepdim=True)
    truth = (deviation**4).mean(-1) / (deviation**2).mean(-1) ** 2
    assert read(x).rows(0, 500).kurtosis == pytest.approx(float(truth.mean()), rel=1e-4)


def test_a_constant_row_has_no_deviation_that_eps_could_shorten():
    x = torch.full((4, 768), 0.7)
    line = read(x).line(0)
    assert (line["rows"], line["zero"], line["below_99"], line["varying"]) == (4, 0, 0, 0)
    assert read(x).rows(0, 768).angle_to_ones == 0


@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e5])
def test_a_huge_mean_leaves_the_deviation_right(ratio: float):
    x = torch.randn(5, 256) + ratio
    true = x.double()
    std = (true - true.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    angle = torch.atan2(std, true.mean(-1)).rad2deg().mean()
    assert read(x).rows(0, 256).angle_to_ones == pytest.approx(float(angle), rel=1e-6)


def test_rows_that_are_not_finite_are_counted_as_such_and_enter_nothing_else():
    x = torch.randn(6, 16)
    clean = read(x[[0, 2, 4]]).line(0)
    x[1, 3], x[3, 0], x[5] = math.nan, -math.inf, 3e38
    line = dict(read(x).line(0))
    assert line.pop("nonfinite") == 3
    assert line == pytest.approx({name: value for name, value in clean.items() if name != "nonfinite"})


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (3, 1), (1, 1), (8,)])
def test_odd_shapes_are_counted(shape: tuple[int, ...]):
    x = torch.randn(shape)
    rows = read(x, spec=RMS).rows(0, shape[-1])
    assert rows.rows == math.prod(shape[:-1])
    if rows.rows:
        assert rows.rms_max == pytest.approx(float(x.double().square().mean(-1).sqrt().max()), rel=1e-6)


def test_the_layout_in_memory_makes_no_difference():
    x = torch.randn(4, 16, 6)
    assert read(x.mT).tables["rows"].equal(read(x.mT.contiguous()).tables["rows"])
    wide = torch.randn(4, 6, 32)
    assert read(wide[..., ::2]).tables["bins"].equal(read(wide[..., ::2].contiguous()).tables["bins"])


MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("leading", [(3, 5), (15,), (3, 5, 2), (3, 2, 5)])
def test_padding_is_left_out(leading: tuple[int, ...]):
    x = torch.randn(*leading, 8)
    token = torch.arange(15).view(3, 5)
    places = {(15,): token.flatten(), (3, 5): token}.get(leading)
    if places is None:
        places = token[:, :, None].expand(leading) if leading[1] == 5 else token[:, None, :].expand(leading)
    padding = ~MASK.flatten()[places]
    x[padding] = math.nan
    rows = read(x, mask=MASK).rows(0, 8)
    assert (rows.rows, rows.nonfinite) == (int((~padding).sum()), 0)
    assert_agree(rows, two_pass(x[~padding]))


@pytest.mark.parametrize("shape", [(3, 5, 5, 8), (4, 7, 8)])
def test_a_mask_that_does_not_tell_the_tokens_leaves_out_none(shape: tuple[int, ...]):
    assert read(torch.randn(shape), mask=MASK).rows(0, 8).rows == math.prod(shape[:-1])


def test_groups_of_a_sample_are_no_tokens():
    spec = LAYER.replace(axes="all_but_batch", groups=5)
    assert read(torch.randn(3, 10, 4), spec=spec, mask=MASK).rows(0, 8).rows == 15


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (LAYER.replace(axes=(1,)), (2, 6, 3, 4)),
        (LAYER.replace(axes=(-2, -1)), (2, 3, 4, 6)),
        (LAYER.replace(axes="all_but_batch", groups=2), (3, 6, 4)),
        (RMS.replace(groups=4), (2, 5, 16)),
    ],
)
def test_a_row_is_what_shares_statistics(spec: NormSpec, shape: tuple[int, ...]):
    x = torch.randn(shape) * torch.rand(shape[0]).view(-1, *(1,) * (len(shape) - 1))
    rows = reference.to_rows(x, spec)
    rms = rows.double().square().mean(-1).sqrt()
    found = read(x, spec=spec).rows(0, rows.shape[-1])
    assert found.rows == rms.numel()
    assert (found.rms_min, found.rms_max) == pytest.approx((float(rms.min()), float(rms.max())), rel=1e-6)


def test_calls_add_up():
    x, y = torch.randn(300, 8), torch.randn(500, 8) * 9
    both, joined = read(x, y), read(torch.cat([x, y]))
    assert both.line(0)["calls"] == 2
    assert_agree(both.rows(0, 8), two_pass(x, y))
    assert both.rows(0, 8).histogram == joined.rows(0, 8).histogram


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
def test_the_effect_of_eps_is_that_of_the_reference(placement: str):
    spec = RMS.replace(eps=1e-2, eps_placement=placement)
    x = torch.randn(40, 32) * torch.logspace(-4, 1, 40)[:, None]
    scale = reference.statistics(x.double(), spec, 1e-2).scale
    attenuation = (reference.statistics(x.double(), spec.replace(eps=0.0), 0.0).scale / scale).flatten()
    line = read(x, spec=spec).line(0)
    assert -line["peak -attenuation"] == pytest.approx(float(attenuation.min()), rel=1e-5)
    assert line["below_99"] == int((attenuation < 0.99).sum())
    assert line["below_90"] == int((attenuation < 0.9).sum())


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 0, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_activations_are_counted_by_rows(shape: tuple[int, ...], dtype: torch.dtype):
    tables = Tables([gradient_table(1)], torch.device("cpu"))
    gradient = (torch.randn(shape) * 1e-4).to(dtype)
    add_gradient(tables["activation gradients"][0], gradient)
    add_gradient(tables["activation gradients"][0], gradient * 2)
    line = named(tables["activation gradients"][0], GRADIENT_SUMS)
    assert line["rows"] == 2 * math.prod(shape[:-1])
    assert line["squares"] * shape[-1] == pytest.approx(5 * float(gradient.double().square().sum()), rel=1e-5)


def test_a_gradient_that_is_not_finite_is_counted_as_such():
    tables = Tables([gradient_table(1)], torch.device("cpu"))
    gradient = torch.ones(3, 4)
    gradient[1, 2] = math.nan
    add_gradient(tables["activation gradients"][0], gradient)
    assert named(tables["activation gradients"][0], GRADIENT_SUMS) == {"rows": 2, "squares": 2, "nonfinite": 1}
