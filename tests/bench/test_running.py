"""Cases go in, checked times come out; what is wrong in an answer is seen."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from normkit.bench import running
from normkit.bench.cases import DTYPES, OPS, PASSES, Case, arguments
from normkit.bench.devices import CPU
from normkit.bench.peers import NORMKIT, PEERS, AbsentError, Peer
from normkit.bench.running import measure
from normkit.bench.timing import Time
from normkit.errors import InputError

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
    monkeypatch.setitem(running._ELEMENTS, "cpu", 3 * 32)
    case = Case(op, (8, 32), dtype, "forward+backward")
    given, found = answer(case, name)
    errors = running.errors(case, given, {"it": found})["it"]
    assert len(errors) == len(case.answers)
    assert 0 < max(error.relative for error in errors) < torch.finfo(DTYPES[dtype]).eps
    assert 0 < max(error.excess for error in errors) < 1


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm"])
def test_an_error_in_any_output_is_seen(op):
    case = Case(op, (8, 32), "float32", "backward")
    given, found = answer(case)
    for position in range(len(found)):
        wrong = tuple(t * 1.01 if p == position else t for p, t in enumerate(found))
        errors = running.errors(case, given, {"it": wrong})["it"]
        assert [error.excess > 1 for error in errors] == [p == position for p in range(len(found))]
        assert errors[position].relative == pytest.approx(0.01, rel=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_of_many_is_seen(dtype):
    case = Case("rms_norm", (4096, 512), dtype, "forward")
    given, (y,) = answer(case)
    y[1234, 5] += 0.1
    [error] = running.errors(case, given, {"it": (y,)})["it"]
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
    errors = running.errors(case, given, {"right": found, "wrong": (*found[:-1], total)})
    assert max(error.excess for error in errors["right"]) < 1 < errors["wrong"][-1].excess
    assert errors["wrong"][-1].relative > 0.01


def test_nan_is_the_largest_error():
    case = Case("rms_norm", (4, 8), "float32", "forward")
    given, (y,) = answer(case)
    y[2, 3] = math.nan
    assert running.errors(case, given, {"it": (y,)}) == {"it": ((math.inf, math.inf),)}


def test_of_a_large_case_some_rows_are_checked_and_all_are_summed(monkeypatch):
    case = Case("add_layer_norm", (50, 32), "float32", "backward")
    given, found = answer(case)
    monkeypatch.setattr(running, "_CHECKED", 10 * 32)
    monkeypatch.setitem(running._ELEMENTS, "cpu", 3 * 32)
    rows = running.checked_rows(case)
    assert 10 <= len(rows) <= 12
    assert {0, 49} <= set(rows.tolist())
    assert torch.equal(rows, running.checked_rows(case))
    sampled = (*(sheet[rows] for sheet in found[: case.sheets]), *found[case.sheets :])
    assert max(error.excess for error in running.errors(case, given, {"it": sampled})["it"]) < 1
    # A sum over the rows that are checked would be wrong, and a row that is wrong is seen where it is checked.
    wrong = [sheet.clone() for sheet in sampled]
    wrong[2][-1] += 1
    found_errors = running.errors(case, given, {"it": tuple(wrong)})["it"]
    assert [error.excess > 1 for error in found_errors] == [False, False, True, *[False] * (len(found) - 3)]


def test_up_to_some_size_all_rows_are_checked():
    assert torch.equal(running.checked_rows(Case("rms_norm", (8192, 8192), "float32", "forward")), torch.arange(8192))
    large = running.checked_rows(Case("rms_norm", (32768, 65536), "float32", "forward"))
    assert len(large) * 65536 == pytest.approx(1 << 26, rel=0.01)


def absent(_case, _given):
    raise AbsentError("not here")


def twice(case, given):
    call = NORMKIT.prepare(case, given)
    return lambda: tuple(2 * output for output in call())


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("op", ["rms_norm", "add_layer_norm"])
def test_wrong_and_absent_peers(op, direction):
    told = []
    peers = (NORMKIT, Peer("twice", twice), Peer("nobody", absent))
    case = Case(op, (4, 16), "float32", direction)
    found = measure([case], seconds=0.0, peers=peers, progress=lambda *given: told.append(given))
    (cell,) = found.cells
    own, wrong = cell.measurements
    assert told == [(str(case), 0, 1)]
    assert (own.peer, own.is_wrong, wrong.peer, wrong.is_wrong) == ("normkit", False, "twice", True)
    assert wrong.error == pytest.approx(1.0, rel=1e-5)
    assert wrong.worst in case.answers
    assert (own.is_fresh, wrong.is_fresh) == (False, direction == "forward-out")
    assert min(own.seconds, wrong.seconds, cell.floor_seconds) > 0
    assert cell.others is None or 0 <= cell.others <= 1
    assert cell.left_out == (("nobody", "not here"),)
    assert (own.saved_bytes is None) == (not case.is_differentiated)
    assert min(own.spread, wrong.spread, cell.floor_spread) >= 0
    document = json.loads(json.dumps(found.to_json()))
    assert document["schema_version"] == 2
    assert document["cells"][0]["case"] == {"op": op, "shape": [4, 16], "dtype": "float32", "direction": direction}


@pytest.mark.slow
def test_who_has_own_threads_comes_last():
    order = []

    def noting(name):
        def prepare(case, given):
            call = NORMKIT.prepare(case, given)
            return lambda: order.append(name) or call()

        return prepare

    peers = (Peer("apart", noting("apart"), has_own_threads=True), Peer("a", noting("a")), Peer("b", noting("b")))
    found = measure([Case("rms_norm", (4, 16), "float32", "forward")], seconds=0.0, peers=peers)
    assert [measured.peer for measured in found.cells[0].measurements] == ["apart", "a", "b"]
    last = max(position for position, name in enumerate(order) if name != "apart")
    # Its first call is the one that is checked.
    assert order.index("apart") == 0
    assert order[1:last].count("apart") == 0


@pytest.mark.slow
def test_what_the_memory_cannot_hold_is_refused_first():
    fits = Case("rms_norm", (4, 16), "float32", "forward")
    with pytest.raises(InputError, match=r"float32 10000000x1000000 needs about \d+ GiB and this machine has \d+;"):
        measure([fits, Case("rms_norm", (10_000_000, 1_000_000), "float32", "forward")], peers=(Peer("x", absent),))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", ["prepare", "forward", "backward"])
def test_who_raises_is_left_out_with_the_reason(stage):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, _dy):
            raise MemoryError("out of memory\nlong story")

    def prepare(case, given):
        if stage == "prepare":
            raise MemoryError("out of memory")
        call = NORMKIT.prepare(case, given)

        def run():
            if stage == "forward":
                raise MemoryError("out of memory")
            return tuple(map(Broken.apply, call()))

        return run

    peers = (Peer("broken", prepare), NORMKIT)
    (cell,) = measure([Case("rms_norm", (4, 16), "float32", "backward")], seconds=0.0, peers=peers).cells
    assert cell.left_out == (("broken", "raised MemoryError out of memory"),)
    assert [found.peer for found in cell.measurements] == ["normkit"]


@pytest.mark.slow
def test_who_leaves_the_device_unusable_is_named(monkeypatch):
    def prepare(_case, _given):
        raise MemoryError("illegal access")

    monkeypatch.setattr(running, "_is_usable", lambda _given: False)
    with pytest.raises(RuntimeError, match=r"^broken raised MemoryError illegal access, and left the machine"):
        measure([Case("rms_norm", (4, 16), "float32", "forward")], peers=(Peer("broken", prepare), NORMKIT))


@pytest.mark.slow
def test_the_times_of_a_device_with_a_host():
    pretended = replace(
        CPU,
        noun="GPU",
        peers=(NORMKIT,),
        memory=lambda: 1 << 20,
        times=lambda calls, _seconds: {name: Time(2e-6, 0.0, 7e-6) for name in calls},
    )
    case = Case("rms_norm", (4, 16), "float32", "backward")
    (cell,) = measure([case], device=pretended).cells
    (own,) = cell.measurements
    assert (own.seconds, own.host_seconds, own.latency) == (2e-6, 7e-6, 7e-6)
    assert own.bytes_per_second == pytest.approx(3 * 4 * 16 * 4 / 2e-6)
    assert cell.floor_seconds == pytest.approx(1.5 * 2e-6)
    with pytest.raises(InputError, match=r"needs about 0 GiB and this GPU has 0; choose a smaller shape"):
        measure([Case("rms_norm", (400, 1600), "float32", "backward")], device=pretended)


@pytest.mark.slow
def test_a_backward_pass_keeps_no_outputs():
    # Those of all peers together would fill a GPU.
    outputs = []

    def prepare(case, given):
        del case

        def run():
            doubled = given.x * given.weight
            outputs.append(doubled.untyped_storage()._weak_ref())
            return (doubled,)

        return run

    def times(calls, _seconds):
        assert {"it", "copy"} >= calls.keys()
        for reference in outputs:
            alive.append(torch.UntypedStorage._expired(reference))
        return {name: Time(1.0, 0.0) for name in calls}

    alive: list[bool] = []
    device = replace(CPU, times=times, peers=(Peer("it", prepare),))
    measure([Case("rms_norm", (4, 16), "float32", "backward")], device=device)
    assert alive
    assert all(alive)
