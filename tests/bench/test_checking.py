"""Right answers pass, wrong ones are seen wherever they are."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.bench import checking
from normkit.bench.cases import DTYPES, OPS, Case, arguments
from normkit.bench.peers import PEERS

BY_NAME = {peer.name: peer for peer in PEERS}


def answer(case, name="torch"):
    given = arguments(case)
    with torch.set_grad_enabled(case.is_differentiated):
        outputs = BY_NAME[name].prepare(case, given)()
        gradients = torch.autograd.grad(outputs, given.leaves, given.gradients) if case.is_differentiated else ()
    return given, tuple(tensor.detach().clone() for tensor in (*outputs, *gradients))


@pytest.mark.parametrize("name", ["torch", "normkit"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_right_answers(op, dtype, name, monkeypatch):
    # Three parts, the last of them smaller.
    monkeypatch.setitem(checking._ELEMENTS, "cpu", 3 * 32)
    case = Case(op, (8, 32), dtype, "forward+backward")
    given, found = answer(case, name)
    errors = checking.errors(case, given, {"it": found})["it"]
    assert len(errors) == len(case.answers)
    assert 0 < max(error.relative for error in errors) < torch.finfo(DTYPES[dtype]).eps
    assert 0 < max(error.excess for error in errors) < 1


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm"])
def test_an_error_in_any_output_is_seen(op):
    case = Case(op, (8, 32), "float32", "backward")
    given, found = answer(case)
    for position in range(len(found)):
        wrong = tuple(t * 1.01 if p == position else t for p, t in enumerate(found))
        errors = checking.errors(case, given, {"it": wrong})["it"]
        assert [error.excess > 1 for error in errors] == [p == position for p in range(len(found))]
        assert errors[position].relative == pytest.approx(0.01, rel=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_of_many_is_seen(dtype):
    case = Case("rms_norm", (4096, 512), dtype, "forward")
    given, (y,) = answer(case)
    y[1234, 5] += 0.1
    [error] = checking.errors(case, given, {"it": (y,)})["it"]
    assert error.excess > 1
    assert error.relative < 5e-3


@pytest.mark.parametrize("rows", [512, 4096])
def test_a_bias_gradient_summed_in_16_bits_is_wrong(rows):
    # What torch's own LayerNorm does on the CPU, in each of its threads.
    case = Case("layer_norm", (rows, 16), "bfloat16", "backward")
    given, found = answer(case, "normkit")
    total = torch.zeros(16, dtype=torch.bfloat16)
    for row in given.gradients[0]:
        total += row
    errors = checking.errors(case, given, {"right": found, "wrong": (*found[:-1], total)})
    assert max(error.excess for error in errors["right"]) < 1 < errors["wrong"][-1].excess
    assert errors["wrong"][-1].relative > 0.01


def test_nan_is_the_largest_error():
    case = Case("rms_norm", (4, 8), "float32", "forward")
    given, (y,) = answer(case)
    y[2, 3] = math.nan
    assert checking.errors(case, given, {"it": (y,)}) == {"it": ((math.inf, math.inf),)}


def test_of_a_large_case_some_rows_are_checked_and_all_are_summed(monkeypatch):
    case = Case("add_layer_norm", (50, 32), "float32", "backward")
    given, found = answer(case)
    monkeypatch.setattr(checking, "_CHECKED", 10 * 32)
    monkeypatch.setitem(checking._ELEMENTS, "cpu", 3 * 32)
    rows = checking.checked_rows(case)
    assert 10 <= len(rows) <= 12
    assert {0, 49} <= set(rows.tolist())
    assert torch.equal(rows, checking.checked_rows(case))
    sampled = (*(sheet[rows] for sheet in found[: case.sheets]), *found[case.sheets :])
    assert max(error.excess for error in checking.errors(case, given, {"it": sampled})["it"]) < 1
    # A sum over the rows that are checked would be wrong, and a row that is wrong is seen where it is checked.
    wrong = [sheet.clone() for sheet in sampled]
    wrong[2][-1] += 1
    found_errors = checking.errors(case, given, {"it": tuple(wrong)})["it"]
    assert [error.excess > 1 for error in found_errors] == [False, False, True, *[False] * (len(found) - 3)]


def test_up_to_some_size_all_rows_are_checked():
    assert torch.equal(checking.checked_rows(Case("rms_norm", (8192, 8192), "float32", "forward")), torch.arange(8192))
    large = checking.checked_rows(Case("rms_norm", (32768, 65536), "float32", "forward"))
    assert len(large) * 65536 == pytest.approx(1 << 26, rel=0.01)
