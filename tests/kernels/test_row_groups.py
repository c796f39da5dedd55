"""A row's bits are its own: alone, in any group of rows, beside rows that are NaN, extreme, constant or zero."""

from __future__ import annotations

import math

import pytest
import torch

from contract import DTYPES, UNITS, assert_gradients, assert_parameter_gradients, assert_within, draw, outcome, truth
from helpers import diagonal
from kernel_laws import of_every_size
from normkit import specs

FULL = {
    "layer_norm": specs.TORCH_LAYER_NORM,
    "rms_norm": specs.OLMO2,
    "deberta": specs.DEBERTA,
    "l2_norm": specs.SCALE_NORM.replace(has_weight=False),
}
# Lengths around multiples of 16, 32 and 64 beyond those that are all tried.
LONGER = [95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257]


def odd_rows(dtype, n):
    """Rows that leave the ordinary path of a kernel, each by its name."""
    information = torch.finfo(dtype)
    row = torch.randn(n, dtype=torch.float64)
    spiked = row.clone()
    spiked[n // 2] = math.inf
    rows = {
        "NaN": torch.full((n,), math.nan, dtype=torch.float64),
        "infinity": spiked,
        "huge": row.clamp(-3, 3) * (information.max / 4),
        "tiny": row * information.smallest_normal,
        "subnormal": row * information.smallest_normal * information.eps * 4,
        "zero": torch.zeros(n, dtype=torch.float64),
        "constant": torch.full((n,), 3.0, dtype=torch.float64),
        "far mean": row + (1e3 if dtype == torch.float16 else 1e5),
    }
    return {name: value.to(dtype) for name, value in rows.items()}


def bits(tensor):
    """As whole numbers, so that a sign of zero counts; every NaN is one number."""
    whole = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return whole.masked_fill(tensor.isnan(), 1)


def alone(spec, case):
    """y and dx of each row in a call of its own."""
    single = [outcome(spec, case._replace(x=x, dy=dy)) for x, dy in zip(case.x, case.dy, strict=True)]
    return torch.stack([part.y for part in single]), torch.stack([part.x for part in single])


def assert_same_bits(ours, theirs, what):
    differing = (bits(ours) != bits(theirs)).flatten(1).any(-1).nonzero().flatten().tolist()
    assert not differing, f"rows {differing} have other bits, {what}"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), diagonal([*FULL], [*DTYPES]))
def test_a_row_beside_an_odd_one_is_as_if_alone(name, dtype):
    """Every place of an odd row among 1 to 9 rows, so that it takes each place of any group of 2, 4 or 8."""
    spec, dtype = FULL[name], DTYPES[dtype]
    for n in (5, 33):
        case = draw(spec, 9, n, dtype=dtype, mean=0.5)
        y, dx = alone(spec, case)
        for odd, row in odd_rows(dtype, n).items():
            odd_y, odd_dx = alone(spec, case._replace(x=row.expand(9, n), dy=case.dy))
            for count in range(1, 10):
                for place in range(count):
                    x, expected_y, expected_dx = case.x[:count].clone(), y[:count].clone(), dx[:count].clone()
                    x[place], expected_y[place], expected_dx[place] = row, odd_y[place], odd_dx[place]
                    ours = outcome(spec, case._replace(x=x, dy=case.dy[:count]))
                    what = f"{odd} row at {place} of {count}, n = {n}"
                    assert_same_bits(ours.y, expected_y, f"y, {what}")
                    assert_same_bits(ours.x, expected_dx, f"dx, {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
def test_odd_rows_beside_each_other_are_as_if_alone(name, dtype):
    spec, dtype = FULL[name], DTYPES[dtype]
    case = draw(spec, 64, 40, dtype=dtype)
    rows = [None, None, *odd_rows(dtype, 40).values()]
    for index, pick in enumerate(torch.randint(len(rows), (64,)).tolist()):
        if rows[pick] is not None:
            case.x[index] = rows[pick]
    y, dx = alone(spec, case)
    ours = outcome(spec, case)
    assert_same_bits(ours.y, y, "y")
    assert_same_bits(ours.x, dx, "dx")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), diagonal([*FULL], [*DTYPES]))
def test_an_odd_upstream_gradient_leaves_its_neighbours_alone(name, dtype):
    spec, dtype = FULL[name], DTYPES[dtype]
    case = draw(spec, 9, 33, dtype=dtype)
    _, dx = alone(spec, case)
    for odd, row in odd_rows(dtype, 33).items():
        _, odd_dx = alone(spec, case._replace(dy=row.expand(9, 33).clone()))
        for count in range(1, 10):
            for place in range(count):
                dy, expected = case.dy[:count].clone(), dx[:count].clone()
                dy[place], expected[place] = row, odd_dx[place]
                ours = outcome(spec, case._replace(x=case.x[:count], dy=dy))
                assert_same_bits(ours.x, expected, f"dx, {odd} gradient at {place} of {count}")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), diagonal(["layer_norm", "rms_norm", "deberta"], [*DTYPES]))
def test_one_to_nine_rows_of_every_length(name, dtype):
    """The same bits as alone, and those within the contract."""
    spec = FULL[name]
    for n in (*range(1, 71), *LONGER):
        case = draw(spec, 9, n, dtype=DTYPES[dtype], mean=1.0)
        y, dx = alone(spec, case)
        for count in range(1, 10):
            ours = outcome(spec, case._replace(x=case.x[:count], dy=case.dy[:count]))
            assert_same_bits(ours.y, y[:count], f"y, {count} of 9 rows, n = {n}")
            assert_same_bits(ours.x, dx[:count], f"dx, {count} of 9 rows, n = {n}")
        if spec.cast == "late":
            true, size = truth(spec, case)
            assert_within(ours.y, true.y, size.y, UNITS.get(ours.y.dtype, 1), f"y of {n}")
            assert_within(ours.x, true.x, size.x, UNITS.get(ours.x.dtype, 1), f"dx of {n}")
            assert_parameter_gradients(case, ours, true, size)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FULL)
def test_a_batch_may_be_split_anywhere(name, dtype):
    spec = FULL[name]
    case = draw(spec, 1029, 48, dtype=DTYPES[dtype])
    whole = outcome(spec, case)
    for threads, cut in ((1, 1), (2, 3), (1, 333), (4, 511), (1, 513), (2, 1023), (3, 1028)):
        torch.set_num_threads(threads)
        parts = [outcome(spec, case._replace(x=case.x[s], dy=case.dy[s])) for s in (slice(cut), slice(cut, None))]
        assert_same_bits(torch.cat([part.y for part in parts]), whole.y, f"y, cut at {cut}")
        assert_same_bits(torch.cat([part.x for part in parts]), whole.x, f"dx, cut at {cut}")


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradients_of_rows_of_every_size_beside_each_other(name):
    spec = FULL[name].replace(eps=0.0)
    assert_gradients(spec, of_every_size(spec, 57, 48))
