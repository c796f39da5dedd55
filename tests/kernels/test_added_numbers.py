"""A norm after an addition keeps the numbers contract: the stream is rounded once, and so is the gradient of both."""

from __future__ import annotations

import pytest
import torch

import normkit
from contract import (
    DTYPES,
    GAIN_UNITS,
    UNITS,
    Case,
    added,
    assert_rounded,
    assert_within,
    draw,
    roundings,
    truth,
)
from normkit import reference, specs
from normkit.units import spacing

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
def test_the_sum_and_its_norm(name, pair):
    spec = SPECS[name]
    case, residual, _ = drawn(spec, pair, 300, 512)
    y, new = normkit.add_normalize(case.x, residual, spec, case.weight, case.bias)
    expected, stream = reference.add_forward(case.x, residual, spec, case.weight, case.bias)
    wide = torch.promote_types(torch.promote_types(case.x.dtype, residual.dtype), torch.float32)
    assert torch.equal(new, (case.x.to(wide) + residual.to(wide)).to(residual.dtype))
    assert torch.equal(new, stream)
    normed = case._replace(x=new)
    (true, size), casts = truth(spec, normed), roundings(spec, case)
    if casts:
        assert_rounded(y, expected, spec, casts, size.y)
    else:
        assert_within(y, true.y, size.y, UNITS[y.dtype], "y")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_the_sum_and_its_norm(name, pair):
    """x and residual have one gradient: the norm's, plus what reaches the new stream from elsewhere, rounded once."""
    spec = SPECS[name]
    case, residual, d_new = drawn(spec, pair, 100, 256)
    _, new, dx, d_residual, dweight, dbias = added(spec, case, residual, d_new)
    normed = Case(new, case.dy, case.weight, case.bias)
    true, size = truth(spec, normed)
    total, room = true.x + d_new.double(), (size.x.square() + d_new.double().square()).sqrt()
    coarse = max(torch.finfo(case.x.dtype).eps, torch.finfo(residual.dtype).eps)
    for gradient, dtype in ((dx, case.x.dtype), (d_residual, residual.dtype)):
        assert gradient.dtype == dtype
        # 0.501: a gradient that leaves in 16 bits may pass float32 on its way.
        bound = 0.501 * coarse * total.abs() + 4 * torch.finfo(torch.float32).eps * room + spacing(dtype)
        error = (gradient.double() - total).abs()
        assert (error <= bound).all(), f"{gradient.dtype}: {(error / bound).max():.3g} of what rounding once leaves"
    assert_within(dweight, true.weight, size.weight, GAIN_UNITS[case.weight.dtype], "dweight")
    if dbias is not None:
        assert_within(dbias, true.bias, size.bias, GAIN_UNITS[case.bias.dtype], "dbias")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", SPECS)
def test_bits_depend_on_neither_threads_nor_strides_nor_place(name, pair):
    spec = SPECS[name]
    case, residual, d_new = drawn(spec, pair, 6, 50, 33)
    expected = added(spec, case, residual, d_new)

    def moved(tensor):
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)

    def same(ours):
        return all(a is None or torch.equal(a, b) for a, b in zip(ours, expected, strict=True))

    torch.set_num_threads(3)
    assert same(added(spec, case, residual, d_new))
    assert same(added(spec, case._replace(x=moved(case.x)), residual, moved(d_new)))
    assert same(added(spec, case._replace(dy=moved(case.dy)), moved(residual), d_new))
    alone = added(spec, case._replace(x=case.x[3], dy=case.dy[3]), residual[3], d_new[3])
    assert all(torch.equal(ours, theirs[3]) for ours, theirs in zip(alone[:4], expected[:4], strict=True))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", SPECS)
def test_in_place_is_the_same(name, pair):
    spec = SPECS[name]
    case, residual, _ = drawn(spec, pair, 40, 130)
    y, new = normkit.add_normalize(case.x, residual, spec, case.weight, case.bias)
    x, stream = case.x.clone(), residual.clone()
    if y.dtype == x.dtype:
        out = normkit.add_normalize(x, stream, spec, case.weight, case.bias, out=(x, stream))
        assert out[0] is x
        assert out[1] is stream
        assert torch.equal(x, y)
        assert torch.equal(stream, new)


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
