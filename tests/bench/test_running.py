"""Cases go in, checked times come out."""

from __future__ import annotations

import json

import pytest

from normkit.bench.cases import PASSES, Case
from normkit.bench.peers import NORMKIT, AbsentError, Peer
from normkit.bench.running import measure
from normkit.errors import InputError


def absent(_case, _given):
    raise AbsentError("not here")


def twice(case, given):
    call = NORMKIT.prepare(case, given)
    return lambda: tuple(2 * output for output in call())


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
    assert document["schema_version"] == 1
    assert document["cells"][0]["case"] == {"op": op, "shape": [4, 16], "dtype": "float32", "direction": direction}


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


def test_what_the_memory_cannot_hold_is_refused_first():
    fits = Case("rms_norm", (4, 16), "float32", "forward")
    with pytest.raises(InputError, match=r"float32 10000000x1000000 needs about \d+ GiB and this machine has \d+;"):
        measure([fits, Case("rms_norm", (10_000_000, 1_000_000), "float32", "forward")], peers=(Peer("x", absent),))
