"""The same bits whatever the thread count, the row's place in the batch and the strides; offsets beyond 32 bits."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

import normkit
from contract import DTYPES, Case, assert_within, draw, outcome
from helpers import diagonal
from normkit import specs
from normkit.kernels import cpu

FULL = {
    "layer_norm": specs.TORCH_LAYER_NORM,
    "rms_norm": specs.OLMO2,
    "llama": specs.LLAMA,
    "l2_norm": specs.SCALE_NORM.replace(has_weight=False),
}
# Many short rows, few long ones, one row, more rows than blocks, rows that do not divide: work is split differently.
SIZES = [(4096, 33), (700, 1000), (65, 4096), (4, 262_144), (3, 100_000), (1, 1_000_003), (5, 33_333)]
BILLION = 2**31


def same(ours, theirs):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("name", "dtype", "sizes"), diagonal([*FULL], ["fp32", "bf16"], SIZES))
def test_bits_do_not_depend_on_the_number_of_threads(name, dtype, sizes):
    case = draw(FULL[name], *sizes, dtype=DTYPES[dtype])
    one = outcome(FULL[name], case)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert same(outcome(FULL[name], case), one), f"{threads} threads"


PROGRAM = """
import hashlib, torch
from contract import draw, outcome
from normkit import specs
from normkit.ops import calls
print(torch.get_num_threads())
for kernels_missing in (calls._kernels_missing, "not wanted"):
    calls._kernels_missing = kernels_missing
    torch.manual_seed(0)
    digest = hashlib.sha256()
    for spec in (specs.TORCH_LAYER_NORM, specs.OLMO2, specs.GEMMA):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for sizes in ((2000, 65), (2, 70_001)):
                for tensor in outcome(spec, draw(spec, *sizes, dtype=dtype)):
                    if tensor is not None:
                        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest())
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bits_do_not_depend_on_the_process():
    """With kernels and without."""
    printed = []
    for threads in ("1", "2"):
        folders = os.pathsep.join(folder for folder in sys.path if folder)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": folders}
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        printed.append(result.stdout.split())
    assert [line[0] for line in printed] == ["1", "2"]
    assert printed[0][1:] == printed[1][1:]
    assert {len(digest) for digest in printed[0][1:]} == {len(hashlib.sha256().hexdigest())}
    # That one of them was made without the kernels shows: their last bits are others.
    assert len(set(printed[0][1:])) == (1 if cpu.load() else 2)


@pytest.mark.parametrize("n", [5, 64, 129, 1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
def test_bits_do_not_depend_on_the_place_in_the_batch(name, dtype, n):
    case = draw(FULL[name], 37, n, dtype=DTYPES[dtype], mean=1.0)
    expected = outcome(FULL[name], case)
    # Alone, among others, in another order; the last ones where a block of rows is cut short.
    for rows in ([0], [36], [5, 6], list(range(17)), list(range(36, -1, -1)), [8] * 40):
        ours = outcome(FULL[name], case._replace(x=case.x[rows], dy=case.dy[rows]))
        assert torch.equal(ours.y, expected.y[rows])
        assert torch.equal(ours.x, expected.x[rows])


def _padded(tensor):
    """Rows that lie apart."""
    return torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), 7.0, dtype=tensor.dtype)[..., : tensor.shape[-1]]


def _filled(layout, tensor):
    return layout.copy_(tensor)


# What the same numbers can look like in memory; all but the last two have a contiguous last axis.
LAYOUTS = {
    "apart": lambda t: _filled(_padded(t), t),
    "every other row": lambda t: _filled(torch.zeros(2 * t.shape[0], *t.shape[1:], dtype=t.dtype)[::2], t),
    "transposed leading": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed and apart": lambda t: _filled(_padded(t.transpose(0, 1)), t.transpose(0, 1)).transpose(0, 1),
    "not aligned": lambda t: _filled(torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape), t),
    "negated": lambda t: torch._neg_view(t.neg()),
    "strided last": lambda t: _filled(torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2], t),
    "transposed last": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("sizes", [(6, 5, 72), (3, 1, 33), (1, 4, 7)])
def test_bits_do_not_depend_on_strides(name, dtype, sizes):
    case = draw(FULL[name], *sizes, dtype=DTYPES[dtype])
    expected = outcome(FULL[name], case)
    for layout, change in LAYOUTS.items():
        for x, dy in ((change(case.x), case.dy), (case.x, change(case.dy)), (change(case.x), change(case.dy))):
            assert torch.equal(x, case.x), layout
            assert same(outcome(FULL[name], case._replace(x=x, dy=dy)), expected), layout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
def test_repeated_rows_need_not_be_stored(name, dtype):
    case = draw(FULL[name], 4, 6, 40, dtype=DTYPES[dtype])
    one, upstream = case.x[:1, :1], case.dy[:1, :1]
    for x, dy in (
        (one.expand(4, 6, 40), case.dy),
        (case.x[:, :1].expand(4, 6, 40), case.dy),
        (case.x, upstream.expand(4, 6, 40)),
        (case.x, case.dy[:, :, :1].expand(4, 6, 40)),
        (case.x, case.dy[:1, :1, :1].expand(4, 6, 40)),
        (one[..., :1].expand(4, 6, 40), case.dy),
    ):
        expected = outcome(FULL[name], case._replace(x=x.contiguous(), dy=dy.contiguous()))
        assert same(outcome(FULL[name], case._replace(x=x, dy=dy)), expected)


@pytest.mark.parametrize("name", FULL)
def test_rows_may_overlap(name):
    """Windows one number apart, as `Tensor.unfold` makes them."""
    base = torch.randn(200)
    case = draw(FULL[name], 137, 64)
    expected = outcome(FULL[name], case._replace(x=base.unfold(0, 64, 1).contiguous()))
    assert same(outcome(FULL[name], case._replace(x=base.unfold(0, 64, 1))), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_any_strides(dtype):
    spec = specs.TORCH_LAYER_NORM
    case = draw(spec, 9, 50, dtype=DTYPES[dtype])
    expected = outcome(spec, case)
    strided = [torch.zeros(100, dtype=case.x.dtype)[::2].copy_(tensor) for tensor in (case.weight, case.bias)]
    assert same(outcome(spec, Case(case.x, case.dy, *strided)), expected)
    constant = [torch.full((1,), 1.5, dtype=case.x.dtype).expand(50) for _ in range(2)]
    contiguous = [tensor.contiguous() for tensor in constant]
    assert same(outcome(spec, Case(case.x, case.dy, *constant)), outcome(spec, Case(case.x, case.dy, *contiguous)))


@pytest.mark.parametrize("name", FULL)
def test_an_upstream_gradient_that_is_a_symbol_of_zero(name):
    case = draw(FULL[name], 3, 20)
    ours = outcome(FULL[name], case._replace(dy=torch._efficientzerotensor((3, 20))))
    assert torch.equal(ours.x, torch.zeros_like(case.x))


@pytest.mark.parametrize("sizes", [(2, 3, 4, 10), (1, 1, 1, 64), (0, 2, 3, 5), (7,), (2, 1, 2, 1, 2, 1, 9)])
def test_any_number_of_leading_axes(sizes):
    for spec in FULL.values():
        case = draw(spec, *sizes)
        ours = outcome(spec, case)
        flat = outcome(spec, case._replace(x=case.x.reshape(-1, sizes[-1]), dy=case.dy.reshape(-1, sizes[-1])))
        assert torch.equal(ours.y, flat.y.reshape(sizes))
        assert torch.equal(ours.x, flat.x.reshape(sizes))


@pytest.mark.parametrize("axes", [(-1,), (-2, -1), (-3, -2, -1)])
@pytest.mark.parametrize("name", FULL)
def test_several_axes_are_one_row(name, axes):
    spec, x = FULL[name], torch.randn(6, 2, 3, 4)
    parameter = x.shape[-len(axes) :]
    case = draw(spec, x.numel() // parameter.numel(), parameter.numel())
    expected = outcome(spec, case)
    folded = [None if tensor is None else tensor.reshape(parameter) for tensor in (case.weight, case.bias)]
    ours = outcome(spec.replace(axes=axes), Case(case.x.reshape(x.shape), case.dy.reshape(x.shape), *folded))
    assert all(a is None or torch.equal(a.flatten(), b.flatten()) for a, b in zip(ours, expected, strict=True))
    # Rows of several axes that lie apart, and in another order.
    for change in (LAYOUTS["apart"], LAYOUTS["transposed leading"], LAYOUTS["transposed last"]):
        moved = Case(change(case.x.reshape(x.shape)), change(case.dy.reshape(x.shape)), *folded)
        assert same(outcome(spec.replace(axes=axes), moved), ours)


@pytest.mark.parametrize("name", FULL)
def test_rows_more_than_two_billion_numbers_apart(name):
    """The last of five rows has an offset that does not fit 32 bits. Memory that is never touched is never taken."""
    apart = torch.empty(BILLION + 4096, dtype=torch.bfloat16).as_strided((5, 70), (BILLION // 4, 1))
    case = draw(FULL[name], 5, 70, dtype=torch.bfloat16)
    expected = outcome(FULL[name], case)
    assert torch.equal(normkit.normalize(apart.copy_(case.x), FULL[name], case.weight, case.bias), expected.y)
    ours = outcome(FULL[name], case._replace(dy=apart.copy_(case.dy)))
    assert same(ours, expected)
    out = normkit.normalize(case.x, FULL[name], case.weight, case.bias, out=apart)
    assert out is apart
    assert torch.equal(out, expected.y)


if cpu.load() is None:
    # The reference would need 70 GB for this.
    @pytest.mark.slow
    @pytest.mark.exhaustive
    def test_more_than_two_billion_elements():
        """Overlapping windows are the input and what is upstream: only the results take memory, 4.3 GB each.

        To take it is what takes time. So what came forward is also the input that is written over in place.
        """
        spec, n, rows = specs.TORCH_LAYER_NORM, 4096, 524_289
        base, upstream = (torch.randn(rows + n).bfloat16() for _ in range(2))
        x, dy = base.as_strided((rows, n), (1, 1)), upstream.as_strided((rows, n), (1, 1))
        assert x.numel() > BILLION
        weight, bias = torch.randn(n), torch.randn(n)
        ours = outcome(spec, Case(x, dy, weight, bias))
        places = [0, 1, rows // 2, BILLION // n - 1, BILLION // n, rows - 1]
        expected = outcome(spec, Case(x[places].contiguous(), dy[places].contiguous(), weight, bias))
        assert torch.equal(ours.y[places], expected.y)
        assert torch.equal(ours.x[places], expected.x)
        # Sums over windows are differences of running sums.
        running = torch.cat([torch.zeros(1, dtype=torch.float64), upstream.double().cumsum(0)])
        assert_within(ours.bias, running[rows:-1] - running[:n], torch.full((n,), rows**0.5), 1, "dbias")
        assert normkit.normalize(ours.y, spec, weight, bias, out=ours.y) is ours.y
        assert torch.equal(ours.y[places], normkit.normalize(expected.y, spec, weight, bias))
