"""Every peer computes the same norm, or says why it takes no part."""

from __future__ import annotations

import sys

import pytest
import torch

from normkit.bench.cases import PASSES, Case, arguments
from normkit.bench.peers import PEERS, AbsentError

BY_NAME = {peer.name: peer for peer in PEERS}
RIGHT = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("name", ["normkit", "torch", "LlamaRMSNorm", "onnxruntime"])
def test_rms_norm(name):
    case = Case("rms_norm", (4, 16), "float32", "forward")
    given = arguments(case)
    expected = given.x * torch.rsqrt(given.x.square().mean(-1, keepdim=True) + 1e-6) * given.weight
    torch.testing.assert_close(BY_NAME[name].prepare(case, given)()[0], expected, **RIGHT)


@pytest.mark.parametrize("name", ["normkit", "torch"])
def test_the_sum_is_returned_beside_the_norm(name):
    case = Case("add_layer_norm", (4, 16), "float32", "forward")
    given = arguments(case)
    y, new_residual = BY_NAME[name].prepare(case, given)()
    torch.testing.assert_close(new_residual, given.x + given.residual)
    expected = torch.nn.functional.layer_norm(new_residual, (16,), given.weight, given.bias, 1e-6)
    torch.testing.assert_close(y, expected, **RIGHT)


def test_onnx_layer_normalization():
    case = Case("layer_norm", (4, 16), "float32", "forward")
    given = arguments(case)
    expected = torch.nn.functional.layer_norm(given.x, (16,), given.weight, given.bias, 1e-6)
    torch.testing.assert_close(BY_NAME["onnxruntime"].prepare(case, given)()[0], expected, **RIGHT)


@pytest.mark.parametrize("op", ["rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("name", ["normkit", "torch"])
def test_who_has_out_writes_into_the_same_tensors(name, op):
    case = Case(op, (4, 16), "float32", "forward-out")
    given = arguments(case)
    call = BY_NAME[name].prepare(case, given)
    first, again = call(), call()
    assert all((a is b) == BY_NAME[name].has_out for a, b in zip(first, again, strict=True))
    fresh = BY_NAME[name].prepare(Case(op, (4, 16), "float32", "forward"), given)()
    torch.testing.assert_close(again, fresh, **RIGHT)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("LlamaRMSNorm", ("layer_norm", (2, 8), "float32", "forward"), "has no LayerNorm"),
        ("onnxruntime", ("layer_norm", (2, 8), "float32", "backward"), "forward only"),
        ("onnxruntime", ("layer_norm", (2, 8), "bfloat16", "forward"), "has no bfloat16"),
    ],
)
def test_who_takes_no_part_says_why(name, values, why):
    case = Case(*values)
    with pytest.raises(AbsentError, match=why):
        BY_NAME[name].prepare(case, arguments(case))


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    case = Case("rms_norm", (2, 8), "float32", "forward")
    with pytest.raises(AbsentError, match="is not installed: pip install"):
        BY_NAME["onnxruntime"].prepare(case, arguments(case))


def test_a_compiler_that_fails(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    case = Case("rms_norm", (2, 8), "float32", "forward")
    with pytest.raises(AbsentError, match="did not compile: RuntimeError"):
        BY_NAME["torch.compile"].prepare(case, arguments(case))


@pytest.mark.slow
# torch's own compiler imports what torch has deprecated.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("direction", PASSES)
def test_the_compiled_formula(direction):
    from normkit.bench.running import measure

    found = measure(
        [Case("add_layer_norm", (8, 16), "float32", direction)], seconds=0.0, peers=[BY_NAME["torch.compile"]]
    )
    assert [m.is_wrong for m in found.cells[0].measurements] == [False]
