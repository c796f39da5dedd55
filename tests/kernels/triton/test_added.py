"""A norm after an addition: the stream is rounded once, and so is the gradient of both; in place too."""

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
from normkit.kernels.triton.configuration import Tiling
from normkit.units import spacing
from triton_kernels import DEVICE, cut_into, moved, on_gpu_only

pytestmark = pytest.mark.usefixtures("kernels")

SPECS = {"layer_norm": specs.TORCH_LAYER_NORM, "rms_norm": specs.OLMO2, "llama": specs.LLAMA, "gemma": specs.GEMMA}
# (what a block adds, the stream).
PAIRS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16")]
PAIRS += [("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "bf16")]
CASES = [(name, pair) for index, pair in enumerate(PAIRS) for name in list(SPECS)[index % 2 :: 2]]
IN_PIECES = Tiling(rows=1, columns=16, tiles=1, warps=1, stages=1, is_whole=False)


def drawn(spec, pair, *sizes):
    inner, outer = (DTYPES[name] for name in pair)
    residual, d_new = (3.0 * torch.randn(*sizes)).to(outer), torch.randn(*sizes).to(outer)
    return moved(draw(spec, *sizes, dtype=inner)), residual.to(DEVICE), d_new.to(DEVICE)


@pytest.mark.parametrize("sizes", [(40, 48), on_gpu_only((300, 512)), on_gpu_only((7, 20_000))])
@pytest.mark.parametrize(("name", "pair"), CASES)
def test_the_sum_its_norm_and_their_gradients(name, pair, sizes):
    """x and residual have one gradient: the norm's, plus what reaches the new stream from elsewhere, rounded once."""
    spec = SPECS[name]
    case, residual, d_new = drawn(spec, pair, *sizes)
    y, new, dx, d_residual, dweight, dbias = added(spec, case, residual, d_new)
    assert torch.equal(new, (case.x.float() + residual.float()).to(residual.dtype))
    expected, _ = reference.add_forward(case.x, residual, spec, case.weight, case.bias)
    normed = Case(new, case.dy, case.weight, case.bias)
    (true, size), casts = truth(spec, normed), roundings(spec, case)
    if casts:
        assert_rounded(y, expected, spec, casts, size.y)
    else:
        assert_within(y, true.y, size.y, UNITS[y.dtype], "y")
    total, room = true.x + d_new.double(), (size.x.square() + d_new.double().square()).sqrt()
    coarse = max(torch.finfo(case.x.dtype).eps, torch.finfo(residual.dtype).eps)
    for gradient, dtype in ((dx, case.x.dtype), (d_residual, residual.dtype)):
        assert gradient.dtype == dtype
        # 0.501: a gradient that leaves in 16 bits may pass float32 on its way. From one 16 bits to the other it is
        # rounded twice.
        times = 1.0 if {"bf16", "fp16"} == set(pair) else 0.501
        bound = times * coarse * total.abs() + 4 * torch.finfo(torch.float32).eps * room + spacing(dtype)
        error = (gradient.double() - total).abs()
        assert (error <= bound).all(), f"{gradient.dtype}: {(error / bound).max():.3g} of what rounding once leaves"
    assert_within(dweight, true.weight, size.weight, GAIN_UNITS[case.weight.dtype], "dweight")
    if dbias is not None:
        assert_within(dbias, true.bias, size.bias, GAIN_UNITS[case.bias.dtype], "dbias")


@pytest.mark.parametrize(
    ("name", "pair", "is_long"), [*((*case, False) for case in CASES[::2]), *((*case, True) for case in CASES[1::3])]
)
def test_in_place_is_the_same(monkeypatch, name, pair, is_long):
    spec = SPECS[name]
    case, residual, _ = drawn(spec, pair, 3, 40)
    if is_long:
        cut_into(monkeypatch, IN_PIECES)
    given = spec, case.weight, case.bias
    y, new = normkit.add_normalize(case.x, residual, *given)
    x, stream = case.x.clone(), residual.clone()
    if y.dtype == x.dtype:
        assert normkit.add_normalize(x, stream, *given, out=(x, stream))[0] is x
        assert torch.equal(x, y)
        assert torch.equal(stream, new)
    x, stream = case.x.clone(), residual.clone()
    if y.dtype == stream.dtype == x.dtype:
        normkit.add_normalize(x, stream, *given, out=(stream, x))
        assert torch.equal(stream, y)
        assert torch.equal(x, new)


@pytest.mark.parametrize("part", [0, 1])
def test_the_gradient_of_one_output(part):
    case, residual, d_new = drawn(specs.TORCH_LAYER_NORM, ("bf16", "fp32"), 4, 24)
    x, residual = case.x.requires_grad_(), residual.requires_grad_()
    outputs = normkit.add_normalize(x, residual, specs.TORCH_LAYER_NORM, case.weight, case.bias)
    dx, d_residual = torch.autograd.grad(outputs[part], [x, residual], [case.dy, d_new][part])
    if part == 0:
        wanted = reference.backward(
            case.dy.double(), outputs[1].detach().double(), specs.TORCH_LAYER_NORM, case.weight.double()
        )
        assert (d_residual - wanted.x).abs().max() < 1e-5
    else:
        assert torch.equal(d_residual, d_new)
    assert torch.equal(dx, d_residual.to(dx.dtype))


@pytest.mark.slow
def test_an_addend_may_lie_anywhere():
    case, residual, d_new = drawn(specs.TORCH_LAYER_NORM, ("bf16", "bf16"), 3, 2, 24)
    expected = added(specs.TORCH_LAYER_NORM, case, residual, d_new)
    for moved_on in (
        d_new.transpose(0, 1).contiguous().transpose(0, 1),
        d_new.new_zeros(3, 2, 48)[..., ::2].copy_(d_new),
        d_new.new_zeros(145)[1:].view(3, 2, 24).copy_(d_new),
    ):
        ours = added(specs.TORCH_LAYER_NORM, case, residual, moved_on)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
