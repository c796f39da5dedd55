"""Rows of any length: nothing behind their last number is read, and groups of them round as one row does."""

from __future__ import annotations

import ctypes
import math
import mmap

import pytest
import torch

from contract import DTYPES, added, draw, outcome
from normkit import specs

SPECS = {"layer_norm": specs.TORCH_LAYER_NORM, "rms_norm": specs.OLMO2, "deberta": specs.DEBERTA}


def at_the_end_of_memory(tensor):
    """The same numbers, right before memory that nobody may read."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    library = ctypes.CDLL(None, use_errno=True)
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert library.mprotect(address + whole, page, 0) == 0
    moved = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=whole - size)
    return moved.view(tensor.shape).copy_(tensor)


def bits(tensor):
    """As whole numbers, every NaN as one."""
    whole = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return whole.masked_fill(tensor.isnan(), 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 15, 17, 31, 33, 63, 65])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_behind_the_last_row_is_read(dtype, n):
    for count in (1, 5):
        case = draw(specs.TORCH_LAYER_NORM, count, n, dtype=DTYPES[dtype])
        moved = case._replace(**{name: at_the_end_of_memory(tensor) for name, tensor in case._asdict().items()})
        expected = outcome(specs.TORCH_LAYER_NORM, case)
        ours = outcome(specs.TORCH_LAYER_NORM, moved)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_rows_under_parameters_that_are_not_finite_are_as_if_alone(name, dtype, odd):
    """Among the numbers that a CPU may take by 32, and behind them."""
    for parameter in ("weight", "bias"):
        case = draw(SPECS[name], 9, 72, dtype=DTYPES[dtype])
        if getattr(case, parameter) is None:
            continue
        getattr(case, parameter)[[5, 34, 70]] = odd
        ours = outcome(SPECS[name], case)
        for row in range(9):
            single = outcome(SPECS[name], case._replace(x=case.x[row : row + 1], dy=case.dy[row : row + 1]))
            assert torch.equal(bits(ours.y[row]), bits(single.y[0])), f"y of row {row}, {parameter}"
            assert torch.equal(bits(ours.x[row]), bits(single.x[0])), f"dx of row {row}, {parameter}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_nan_whose_bits_are_all_ones_stays_one(name, dtype):
    """Rounded as a number it would overflow to zero."""
    case = draw(SPECS[name], 9, 72, dtype=DTYPES[dtype], parameter_dtype=torch.float32)
    case.weight.view(torch.int32)[[5, 34, 70]] = 0x7FFFFFFF
    y = outcome(SPECS[name], case).y
    assert y[:, [5, 34, 70]].isnan().all()
    assert y.isnan().sum() == 27


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_a_gradient_of_the_stream_that_is_not_finite_stays_in_its_place(name, dtype):
    case = draw(SPECS[name], 9, 72, dtype=DTYPES[dtype])
    residual, d_new = torch.randn_like(case.x), torch.randn_like(case.x)
    plain = added(SPECS[name], case, residual, d_new)[2]
    d_new[3, 40], d_new[6, 5] = math.nan, math.inf
    odd = added(SPECS[name], case, residual, d_new)[2]
    assert odd[3, 40].isnan()
    assert odd[6, 5] == math.inf
    odd[3, 40], odd[6, 5] = plain[3, 40], plain[6, 5]
    assert torch.equal(bits(odd), bits(plain))
