"""The same bits whatever the row's place in the batch, the number of rows and the strides; `out` of any strides."""

from __future__ import annotations

import pytest
import torch

import normkit
from contract import DTYPES, Case, draw, outcome
from kernel_laws import (
    LAYOUTS,
    same,
    takes_any_number_of_leading_axes,
    takes_repeated_rows_that_are_not_stored,
    takes_rows_more_than_two_billion_numbers_apart,
    takes_rows_that_overlap,
    takes_several_axes_as_one_row,
)
from normkit import specs
from triton_kernels import DEVICE, moved, on_gpu_only

pytestmark = pytest.mark.usefixtures("kernels")

FULL = {"layer_norm": specs.TORCH_LAYER_NORM, "rms_norm": specs.OLMO2, "llama": specs.LLAMA}
NARROW = ["fp32", "bf16", "fp16"]
# Each norm, each dtype.
THREE = [("layer_norm", "fp32"), ("rms_norm", "bf16"), ("llama", "fp16")]
# 33 has no divisor in common with 16, 24 has 8.
SIZES = [(3, 2, 33), (2, 3, 24), on_gpu_only((6, 5, 1000)), on_gpu_only((6, 5, 4096)), on_gpu_only((3, 2, 20_000))]


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 130, on_gpu_only(1000), on_gpu_only(4096), on_gpu_only(16_384)])
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_bits_depend_on_neither_the_place_in_the_batch_nor_the_number_of_rows(name, dtype, n):
    case = moved(draw(FULL[name], 37, n, dtype=DTYPES[dtype], mean=1.0))
    expected = outcome(FULL[name], case)
    # Alone, in another order, and where a block of rows is cut short.
    for rows in ([36], [5, 6], list(range(36, -1, -1))):
        ours = outcome(FULL[name], case._replace(x=case.x[rows], dy=case.dy[rows]))
        assert torch.equal(ours.y, expected.y[rows])
        assert torch.equal(ours.x, expected.x[rows])
    assert same(outcome(FULL[name], case), expected), "a second run"


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16_384, 8192])
def test_bits_depend_on_no_number_of_rows_where_a_program_takes_several(n):
    case = moved(draw(specs.TORCH_LAYER_NORM, 2500, n, dtype=torch.bfloat16))
    expected = outcome(specs.TORCH_LAYER_NORM, case)
    ours = outcome(specs.TORCH_LAYER_NORM, case._replace(x=case.x[2400:], dy=case.dy[2400:]))
    assert torch.equal(ours.y, expected.y[2400:])
    assert torch.equal(ours.x, expected.x[2400:])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_bits_do_not_depend_on_strides(name, dtype, sizes):
    case = moved(draw(FULL[name], *sizes, dtype=DTYPES[dtype]))
    expected = outcome(FULL[name], case)
    for layout, change in LAYOUTS.items():
        x, dy = change(case.x), change(case.dy)
        assert torch.equal(x, case.x), layout
        assert same(outcome(FULL[name], case._replace(x=x, dy=dy)), expected), layout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_repeated_rows_need_not_be_stored(name, dtype):
    takes_repeated_rows_that_are_not_stored(FULL[name], moved(draw(FULL[name], 2, 3, 24, dtype=DTYPES[dtype])))


def test_rows_may_overlap():
    takes_rows_that_overlap(specs.TORCH_LAYER_NORM, moved(draw(specs.TORCH_LAYER_NORM, 25, 16)))


@pytest.mark.parametrize("dtype", NARROW)
def test_parameters_of_any_strides(dtype):
    spec = specs.TORCH_LAYER_NORM
    case = moved(draw(spec, 5, 48, dtype=DTYPES[dtype]))
    expected = outcome(spec, case)
    strided = [tensor.new_zeros(96)[::2].copy_(tensor) for tensor in (case.weight, case.bias)]
    shifted = [tensor.new_zeros(49)[1:].copy_(tensor) for tensor in (case.weight, case.bias)]
    assert same(outcome(spec, Case(case.x, case.dy, *strided)), expected)
    assert same(outcome(spec, Case(case.x, case.dy, *shifted)), expected)


@pytest.mark.parametrize("sizes", [(2, 3, 2, 10), (1, 1, 1, 20), (7,), (2, 1, 2, 1, 2, 1, 9)])
def test_any_number_of_leading_axes(sizes):
    takes_any_number_of_leading_axes(specs.TORCH_LAYER_NORM, moved(draw(specs.TORCH_LAYER_NORM, *sizes)))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(-2, -1), (-3, -2, -1)])
def test_several_axes_are_one_row(axes):
    takes_several_axes_as_one_row(specs.TORCH_LAYER_NORM, axes, DEVICE)


# An `out` of these is written where it is, or computed elsewhere and copied.
OUTS = {
    "contiguous": lambda t: torch.empty_like(t),
    "apart": lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 5)[..., 2:-3],
    "every other row": lambda t: t.new_empty(*t.shape[:-2], 2 * t.shape[-2], t.shape[-1])[..., ::2, :],
    "not aligned": lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape),
    "transposed": lambda t: t.new_empty(*reversed(t.shape)).permute(*reversed(range(t.dim()))),
    "turned": lambda t: t.new_empty(t.shape[2], t.shape[1], t.shape[0], t.shape[3]).permute(2, 1, 0, 3),
}


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("name", FULL)
def test_out_may_have_any_strides(name, out):
    case = moved(draw(FULL[name], 2, 3, 2, 24, dtype=torch.bfloat16))
    given = FULL[name], case.weight, case.bias
    expected = normkit.normalize(case.x, *given)
    target = OUTS[out](case.x)
    assert normkit.normalize(case.x, *given, out=target) is target
    assert torch.equal(target, expected)
    y, new = normkit.add_normalize(case.x, case.dy, *given)
    targets = OUTS[out](case.x), OUTS[out](case.dy)
    assert normkit.add_normalize(case.x, case.dy, *given, out=targets)[0] is targets[0]
    assert same(targets, (y, new))


def test_nothing_is_written_beside_an_out():
    x, around = torch.randn(6, 16, device=DEVICE), torch.full((8, 20), 7.0, device=DEVICE)
    normkit.normalize(x, specs.OLMO, out=around[1:7, 2:18])
    around[1:7, 2:18] = 7.0
    assert torch.equal(around, torch.full_like(around, 7.0))


@pytest.mark.slow
def test_rows_more_than_two_billion_numbers_apart():
    spec = specs.TORCH_LAYER_NORM
    takes_rows_more_than_two_billion_numbers_apart(spec, moved(draw(spec, 5, 70, dtype=torch.bfloat16)))


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """4.3 GB of bfloat16, written over their own input; the gradients of a part are those of the whole."""
    spec, rows = specs.TORCH_LAYER_NORM, 524_289
    case = moved(draw(spec, 7, 4096, dtype=torch.bfloat16))
    expected = outcome(spec, case)
    x, dy = (tensor.repeat(rows // 7 + 1, 1)[:rows] for tensor in (case.x, case.dy))
    ours = outcome(spec, case._replace(x=x, dy=dy))
    assert normkit.normalize(x, spec, case.weight, case.bias, out=x) is x
    for place in (0, 1, rows // 2, 2**31 // 4096 - 1, 2**31 // 4096, rows - 1):
        assert torch.equal(x[place], expected.y[place % 7]), f"row {place} of {rows}"
        assert torch.equal(ours.x[place], expected.x[place % 7]), f"gradient of row {place} of {rows}"
