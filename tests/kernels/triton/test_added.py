"""A norm after an addition: the stream is rounded once, and so is the gradient of both; in place too."""

from __future__ import annotations

import pytest
import torch

import normkit
from contract import DTYPES, added, draw
from kernel_laws import adds_and_normalizes, adds_in_place, same
from normkit import reference, specs
from normkit.kernels.triton.configuration import Tiling
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
    adds_and_normalizes(SPECS[name], *drawn(SPECS[name], pair, *sizes))


@pytest.mark.parametrize(
    ("name", "pair", "is_long"), [*((*case, False) for case in CASES[::2]), *((*case, True) for case in CASES[1::3])]
)
def test_in_place_is_the_same(monkeypatch, name, pair, is_long):
    case, residual, _ = drawn(SPECS[name], pair, 3, 40)
    if is_long:
        cut_into(monkeypatch, IN_PIECES)
    adds_in_place(SPECS[name], case, residual)


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
        assert same(added(specs.TORCH_LAYER_NORM, case, residual, moved_on), expected)
