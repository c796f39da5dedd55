"""A norm after an addition keeps the numbers contract: the stream is rounded once, and so is the gradient of both."""

from __future__ import annotations

import pytest
import torch

from contract import DTYPES, added, draw
from kernel_laws import adds_and_normalizes, adds_in_place, same
from normkit import specs

SPECS = {
    "layer_norm": specs.TORCH_LAYER_NORM,
    "rms_norm": specs.OLMO2,
    "llama": specs.LLAMA,
    "gemma": specs.GEMMA,
}
# (what a block adds, the stream): one dtype, a float32 stream of a 16-bit model, and the reverse.
PAIRS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16")]
PAIRS += [("fp64", "fp64"), ("fp64", "fp32"), ("fp32", "fp64"), ("fp64", "bf16"), ("bf16", "fp64")]


def drawn(spec, pair, *sizes):
    inner, outer = (DTYPES[name] for name in pair)
    residual = (3.0 * torch.randn(*sizes)).to(outer)
    narrower = min(inner, outer, key=lambda dtype: dtype.itemsize)
    parameters = narrower if torch.float64 in (inner, outer) else inner
    return draw(spec, *sizes, dtype=inner, parameter_dtype=parameters), residual, torch.randn(*sizes).to(outer)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", SPECS)
def test_the_sum_its_norm_and_their_gradients(name, pair):
    adds_and_normalizes(SPECS[name], *drawn(SPECS[name], pair, 150, 512))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", SPECS)
def test_bits_depend_on_neither_threads_nor_strides_nor_place(name, pair):
    spec = SPECS[name]
    case, residual, d_new = drawn(spec, pair, 6, 50, 33)
    expected = added(spec, case, residual, d_new)

    def moved(tensor):
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)

    torch.set_num_threads(3)
    for ours in (
        added(spec, case, residual, d_new),
        added(spec, case._replace(x=moved(case.x)), residual, moved(d_new)),
        added(spec, case._replace(dy=moved(case.dy)), moved(residual), d_new),
    ):
        assert same(ours, expected)
    alone = added(spec, case._replace(x=case.x[3], dy=case.dy[3]), residual[3], d_new[3])
    assert all(torch.equal(ours, theirs[3]) for ours, theirs in zip(alone[:4], expected[:4], strict=True))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", SPECS)
def test_in_place_is_the_same(name, pair):
    case, residual, _ = drawn(SPECS[name], pair, 40, 130)
    adds_in_place(SPECS[name], case, residual)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SPECS)
def test_nan_stays_in_its_row(name, odd):
    spec = SPECS[name]
    case, residual, d_new = drawn(spec, ("bf16", "fp32"), 5, 40)
    clean = added(spec, case, residual, d_new)
    residual[2, 7] = odd
    ours = added(spec, case, residual, d_new)
    others = [0, 1, 3, 4]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(ours[:4], clean[:4], strict=True))
    assert all(ours[place][2].isnan().any() for place in (0, 2, 3))


@pytest.mark.parametrize("sizes", [(0, 8), (3, 0), (2, 0, 8), (1, 1)])
def test_no_rows_no_features_and_one(sizes):
    for spec in SPECS.values():
        case, residual, d_new = drawn(spec, ("bf16", "fp32"), *sizes)
        y, new, dx, d_residual, *_ = added(spec, case, residual, d_new)
        assert y.shape == new.shape == dx.shape == d_residual.shape == sizes
