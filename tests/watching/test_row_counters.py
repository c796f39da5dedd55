"""Every statistic of a row counter against float64, and against the accumulators of an inspection."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normkit import NormSpec, reference, specs
from normkit.measurement.quantities import RowStatistics
from normkit.measurement.site_accumulator import SiteGauge, spec_moments
from normkit.watching.row_counters import GRADIENT_SUMS, RowCounter, add_gradient, gradient_table, named, row_tables
from normkit.watching.table_reader import TableReader
from normkit.watching.tables import Tables

LAYER, RMS = specs.TORCH_LAYER_NORM, specs.LLAMA


def read(*calls: Tensor, spec: NormSpec = LAYER, mask: Tensor | None = None) -> TableReader:
    tables = Tables(row_tables(1), torch.device("cpu"))
    for x in calls:
        RowCounter(place=0, spec=spec, enters_norm=True).add(tables, x, mask)
    return TableReader(step=0, tables=tables.unpacked(tables.packed()))


def inspected(x: Tensor, spec: NormSpec = LAYER, mask: Tensor | None = None) -> RowStatistics:
    """What an inspection makes of the same rows."""
    gauge = SiteGauge(spec, None)
    gauge.enter(x, spec_moments(x, spec, mask), mask)
    return gauge.result().input


def assert_alike(ours: RowStatistics, theirs: RowStatistics, rel: float = 1e-5) -> None:
    for name in ("rows", "zero_rows"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("rms_min", "rms_quantiles", "rms_max", "absmax", "angle_to_ones", "mean_energy"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=rel, abs=1e-7, nan_ok=True), name
    assert sum(count for _, count in ours.histogram) == sum(count for _, count in theirs.histogram)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("spec", [LAYER, RMS, specs.GEMMA], ids=["layer", "rms", "gemma"])
def test_rows_of_any_dtype_are_counted_as_an_inspection_counts_them(dtype: torch.dtype, spec: NormSpec):
    x = (torch.randn(3, 7, 64, dtype=torch.float64) * torch.logspace(-3, 3, 7)[:, None] + 0.3).to(dtype)
    x[1, 2] = 0
    reader = read(x, spec=spec)
    assert_alike(reader.rows(0, 64), inspected(x, spec))
    gauge = SiteGauge(spec, None)
    gauge.enter(x, spec_moments(x, spec, None), None)
    site = gauge.result()
    ours = [reader.line(0)[name] for name in ("peak -attenuation", "peak sum")]
    assert -ours[0] == pytest.approx(site.attenuation.smallest, rel=1e-5)
    assert ours[1] == pytest.approx(gauge._attenuation.largest_sum(), rel=1e-5)
    line = reader.line(0)
    present = line["rows"] - line["zero"]
    assert line["below_99"] / present == pytest.approx(site.attenuation.share_below_99)
    assert line["below_90"] / present == pytest.approx(site.attenuation.share_below_90)


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


@pytest.mark.parametrize("ratio", [1e2, 1e4])
def test_a_huge_mean_leaves_the_deviation_right(ratio: float):
    x = torch.randn(5, 256) + ratio
    true = x.double()
    std = (true - true.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    angle = torch.atan2(std, true.mean(-1)).rad2deg().mean()
    assert read(x).rows(0, 256).angle_to_ones == pytest.approx(float(angle), rel=1e-3)


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
    assert_alike(rows, inspected(x, mask=MASK))


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
    x, y = torch.randn(3, 8), torch.randn(5, 8) * 9
    both, joined = read(x, y), read(torch.cat([x, y]))
    assert both.line(0)["calls"] == 2
    assert_alike(both.rows(0, 8), joined.rows(0, 8), rel=1e-12)


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
