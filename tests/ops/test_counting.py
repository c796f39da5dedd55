"""Rows counted by the kernels, against the same in float64, and against what a watch does in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fake_kernels
from fake_kernels import python_kernels
from normkit import NormSpec, specs
from normkit.kernels import cpu
from normkit.measurement.row_counters import RowCounter, Tables, row_tables
from normkit.ops import calls, counting

LAYER, RMS = specs.TORCH_LAYER_NORM, specs.LLAMA
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAMES = ("rows", "bins", "row peaks")
SETS = ("portable", "avx2", "avx512")


@pytest.fixture(params=SETS if cpu.load() is None else ["python"])
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each instruction set that this CPU has; where nothing is compiled, what the tests have in its place."""
    if request.param == "python":
        with python_kernels():
            yield
        return
    before = cpu.instructions()
    try:
        cpu.select(request.param)
    except cpu.InputError:
        cpu.select(before)
    yield
    cpu.select(before)


def empty(places: int = 2) -> Tables:
    return Tables(row_tables(places), torch.device("cpu"))


def given(tables: Tables) -> tuple[Tensor, ...]:
    return tuple(tables[name] for name in NAMES)


def assert_equal(ours: Tables, truth: Tables, rel: float = 1e-12) -> None:
    for name in ("rows", "row peaks"):
        torch.testing.assert_close(ours[name], truth[name], rtol=rel, atol=rel)
    # A row or two may lie on the edge of a bin, to the last digit.
    assert float((ours["bins"] - truth["bins"]).cumsum(-1).abs().sum()) <= 4
    assert torch.equal(ours["bins"].sum(-1), truth["bins"].sum(-1))


def what(spec: NormSpec, x: Tensor, enters_norm: bool = True) -> counting.Counted:
    return RowCounter(place=1, spec=spec, enters_norm=enters_norm).counted(x)


def rows(dtype: torch.dtype, features: int) -> Tensor:
    """Of all lengths, one of zeros, one constant, some that are not finite."""
    x = torch.randn(3, 41, features, dtype=torch.float64) * torch.logspace(-6, 4, 41)[:, None] + 0.2
    x[0, 0], x[0, 1], x[1, 2, 0], x[1, 3, -1], x[2, 7, features // 2] = 0.0, 0.75, math.nan, math.inf, -math.inf
    return x.to(dtype)


PLACEMENTS = ("inside", "outside", "clamp")


@pytest.mark.parametrize("features", [1, 5, 16, 64, 100, 1030])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("_kernels")
def test_every_tally_is_that_of_float64(dtype: torch.dtype, features: int):
    x = rows(dtype, features)
    counted = torch.rand(x.shape[:-1]).flatten() > 0.3
    plain, masked = (LAYER.replace(eps=1e-2, eps_placement=placement) for placement in PLACEMENTS[:2])
    kinds = [
        (what(plain, x), None),
        (what(masked, x), counted),
        (what(RMS.replace(eps=1e-3, eps_placement="clamp"), x), None),
        (what(LAYER.replace(correction=1), x), counted),
        (what(LAYER, x, enters_norm=False), counted),
    ]
    for each, mask in kinds:
        ours, truth = empty(), empty()
        for _ in range(2):
            counting.count_rows(x, mask, each, 1, *given(ours))
            fake_kernels.count_rows(x, mask, *each, 1, *given(truth))
        # Angles of rows along the ones hold half of the digits.
        assert_equal(ours, truth, 1e-7 if not each.enters_norm or features == 1 else 1e-11)
        assert not ours["rows"][0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("_kernels")
def test_the_layout_in_memory_makes_no_difference(dtype: torch.dtype):
    wide = torch.randn(6, 40, 7, 24).to(dtype)
    for x in (wide.transpose(0, 1), wide[..., ::2], wide.mT, wide[:, 3:9, 2:5], wide.expand(2, *wide.shape)):
        ours, same = empty(), empty()
        counting.count_rows(x, None, what(LAYER, x), 1, *given(ours))
        counting.count_rows(x.contiguous(), None, what(LAYER, x), 1, *given(same))
        assert all(torch.equal(ours[name], same[name]) for name in NAMES)


@pytest.mark.usefixtures("_kernels")
def test_threads_change_no_bit():
    x, found = torch.randn(9000, 33), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            tables = empty()
            counting.count_rows(x, None, what(LAYER, x), 1, *given(tables))
            found.append(tables)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in NAMES)


@pytest.mark.parametrize("enters_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("_kernels")
def test_plain_torch_counts_alike(dtype: torch.dtype, enters_norm: bool):
    x = (torch.randn(3, 7, 64, dtype=torch.float64) * torch.logspace(-3, 3, 7)[:, None] + 0.3).to(dtype)
    x[1, 2], x[0, 3, 5] = 0, math.nan
    counter = RowCounter(place=1, spec=LAYER, enters_norm=enters_norm)
    ours, plain = empty(), empty()
    assert counting.can_count(x, ours["rows"])
    counter.add(ours, x, None)
    counter._count_plainly(plain, x, None)
    # Plain torch counts in float32 what is not float64.
    assert_equal(ours, plain, 1e-5 if dtype != torch.float64 else 1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("_kernels")
def test_one_element_that_is_not_finite_is_seen_wherever_it_is(dtype: torch.dtype, bad: float):
    for features in (1, 16, 37, 200):
        x = torch.full((5, features), float(torch.finfo(dtype).max), dtype=dtype)
        sentinel = torch.zeros(2, 2)
        counting.mark_seen(x, 1, sentinel)
        counting.mark_seen(x, 1, sentinel)
        assert sentinel.tolist() == [[0, 0], [0, 2]]
        for place in (0, features // 2, features - 1):
            worse, seen = x.clone(), torch.zeros(2, 2)
            worse[3, place] = bad
            counting.mark_seen(worse, 0, seen)
            assert seen.isnan().tolist() == [[True, True], [False, False]]


def test_rows_that_the_kernels_cannot_count_are_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    table = empty()["rows"]
    monkeypatch.setattr(calls, "_kernels_missing", None)
    assert counting.can_count(torch.ones(2, 3), table)
    for x in (torch.ones(0, 3), torch.ones(2, 0), torch.ones(()), torch.ones(2, 3, dtype=torch.int64)):
        assert not counting.can_count(x, table)
    assert not counting.can_count(torch.ones(2, 3, device="meta"), table)
    assert not counting.can_count(torch.ones(2, 3).as_subclass(type("Other", (Tensor,), {})), table)
    monkeypatch.setattr(calls, "_kernels_missing", "not built")
    assert not counting.can_count(torch.ones(2, 3), table)


if cpu.load() is None:

    def test_tables_that_do_not_fit_are_refused():
        x, tables = torch.randn(4, 8), empty()
        with pytest.raises(RuntimeError, match="expected a table"):
            counting.count_rows(x, None, what(LAYER, x), 2, *given(tables))
        with pytest.raises(RuntimeError, match="expected a table"):
            counting.count_rows(x, None, what(LAYER, x), 0, tables["bins"], *given(tables)[1:])
        with pytest.raises(RuntimeError, match="one bool a row"):
            counting.count_rows(x, torch.ones(3, dtype=torch.bool), what(LAYER, x), 0, *given(tables))
        with pytest.raises(RuntimeError, match="two floats"):
            counting.mark_seen(x, 0, torch.zeros(2, 2, dtype=torch.float64))
