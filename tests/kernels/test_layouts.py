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
    takes_repeated_rows_that_are_not_stored(FULL[name], draw(FULL[name], 4, 6, 40, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("name", FULL)
def test_rows_may_overlap(name):
    takes_rows_that_overlap(FULL[name], draw(FULL[name], 137, 64))


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
        takes_any_number_of_leading_axes(spec, draw(spec, *sizes))


@pytest.mark.parametrize("axes", [(-1,), (-2, -1), (-3, -2, -1)])
@pytest.mark.parametrize("name", FULL)
def test_several_axes_are_one_row(name, axes):
    takes_several_axes_as_one_row(FULL[name], axes)


@pytest.mark.parametrize("name", FULL)
def test_rows_more_than_two_billion_numbers_apart(name):
    takes_rows_more_than_two_billion_numbers_apart(FULL[name], draw(FULL[name], 5, 70, dtype=torch.bfloat16))


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
