from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from normkit import specs
from normkit.inspection.gauges import SiteGauge, spec_moments
from normkit.inspection.moments import RowAccumulator, row_moments

WIDTH, BATCH, TOKENS = 16, 3, 10
MASK = torch.arange(TOKENS) < torch.tensor([[4], [TOKENS], [7]])


def gauged(x, spec, *, y=None, gain=None, mask=None):
    """One call of a norm on x."""
    gauge = SiteGauge(spec, gain)
    gauge.enter(x, spec_moments(x, spec, mask), mask)
    gauge.leave(spec_moments(x if y is None else y, spec, mask))
    return gauge.result()


def statistics(*tensors):
    accumulator = RowAccumulator()
    for tensor in tensors:
        accumulator.add(row_moments(tensor))
    return accumulator.result()


def test_one_call():
    x, y = torch.randn(2, BATCH, TOKENS, WIDTH)
    found = gauged(x, specs.LLAMA, y=y, mask=MASK)
    assert (found.input, found.output) == (statistics(x[MASK]), statistics(y[MASK]))
    assert (found.calls, found.left_out, found.dtype) == (1, 0, "float32")


def test_rows_that_were_flattened():
    x = torch.randn(BATCH, TOKENS, WIDTH)
    assert gauged(x.flatten(0, 1), specs.LLAMA, mask=MASK).input == statistics(x[MASK])


def test_before_any_call():
    found = SiteGauge(specs.LLAMA, None).result()
    assert (found.calls, found.dtype, found.input.rows, found.output.rows) == (0, "", 0, 0)
    assert math.isnan(found.attenuation.median)
    assert math.isinf(found.headroom_bits)
    assert found.statistics_headroom_bits is None


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 2.0**128), (torch.float16, 65504.0)])
def test_headroom(dtype, largest):
    x = torch.tensor([[1.0, -4.0], [2.0, 0.0]], dtype=dtype)
    assert gauged(x, specs.LLAMA).headroom_bits == pytest.approx(math.log2(largest / 4), abs=1e-6)
    # The output counts too; and it has all the room there is where both are 0.
    assert gauged(x, specs.LLAMA, y=2 * x).headroom_bits == pytest.approx(math.log2(largest / 8), abs=1e-6)
    assert gauged(0 * x, specs.LLAMA).headroom_bits == math.inf


@pytest.mark.parametrize(
    ("dtype", "spec", "expected"),
    [
        (torch.float16, specs.IMAGEGPT, math.log2(65504) - math.log2(8 * 9)),
        (torch.bfloat16, specs.IMAGEGPT, 128 - math.log2(8 * 9)),
        (torch.float32, specs.IMAGEGPT, None),
        (torch.float16, specs.LLAMA, None),
    ],
)
def test_headroom_of_a_sum_of_squares_in_16_bits(dtype, spec, expected):
    x = torch.tensor([[3.0] * 8, [1.0] * 8], dtype=dtype)
    assert gauged(x, spec).statistics_headroom_bits == (None if expected is None else pytest.approx(expected, abs=0.01))


def test_channels_are_rows():
    x = torch.randn(BATCH, 6, TOKENS)
    assert gauged(x, specs.CONVNEXT, mask=MASK).input == statistics(x.transpose(1, 2)[MASK])


def test_rows_over_all_axes_cannot_be_masked():
    x = torch.randn(BATCH, TOKENS, WIDTH)
    assert gauged(x, specs.POOLFORMER).input == statistics(x.flatten(1))
    assert gauged(x, specs.POOLFORMER, mask=MASK).left_out == 1
    # Nor where there happen to be as many groups as tokens.
    assert gauged(x, specs.POOLFORMER.replace(groups=TOKENS), mask=MASK).left_out == 1


def test_groups_are_rows():
    x = torch.randn(BATCH, TOKENS, WIDTH)
    found = gauged(x, specs.LLAMA.replace(groups=4), mask=MASK)
    assert found.input == statistics(x.unflatten(-1, (4, 4))[MASK])


def test_a_gain_before_the_norm_counts_for_the_attenuation_alone():
    x, gain = torch.randn(BATCH, TOKENS, WIDTH), torch.full((WIDTH,), 1e-4, dtype=torch.float64)
    found = gauged(x, specs.MUSE_SPARK_INPUT_SCALED.replace(eps=1e-8), gain=gain, mask=MASK)
    assert found.input == statistics(x[MASK])
    # v is about 1e-8, which is eps.
    assert found.attenuation.median == pytest.approx(0.5**0.5, rel=0.1)
    after = gauged(x, specs.LLAMA.replace(eps=1e-8), gain=gain)
    assert after.attenuation.median == pytest.approx(1.0, abs=1e-6)


def test_machine_eps_is_that_of_the_input():
    # Rows whose mean square is 2**-52, the machine epsilon of float64.
    tiny = F.rms_norm(torch.randn(100, WIDTH, dtype=torch.float64), (WIDTH,), eps=0.0) * 2.0**-26
    assert gauged(tiny, specs.TORCH_RMS_NORM).attenuation.median == pytest.approx(0.5**0.5, rel=0.01)
    assert gauged(tiny.float(), specs.TORCH_RMS_NORM).attenuation.median < 1e-3
