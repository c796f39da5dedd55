"""Every peer computes the same norm, or says why it takes no part."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from normkit.bench import peers
from normkit.bench.cases import EPS, OPS, PASSES, Case, arguments
from normkit.bench.peers import GPU_PEERS, PEERS, AbsentError
from normkit.bench.running import measure

BY_NAME = {peer.name: peer for peer in (*PEERS, *GPU_PEERS)}
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
    found = measure(
        [Case("add_layer_norm", (8, 16), "float32", direction)], seconds=0.0, peers=[BY_NAME["torch.compile"]]
    )
    assert [m.is_wrong for m in found.cells[0].measurements] == [False]


def wide_layer_norm(x, weight, bias, eps):
    # torch's own sums the bias's gradient in 16 bits on the CPU, and is rightly found wrong.
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def liger_rms_norm(x, weight, eps, offset, casting_mode, in_place):
    assert (offset, casting_mode, in_place) == (0.0, "gemma", False)
    return F.rms_norm(x, weight.shape, weight, eps)


def liger_add_rms_norm(x, residual, *arguments):
    return liger_rms_norm(x + residual, *arguments), x + residual


def quack_rms_norm(x, weight=None, bias=None, residual=None, eps=1e-5, prenorm=False):
    assert bias is None
    assert prenorm == (residual is not None)
    total = x if residual is None else x + residual
    y = F.rms_norm(total, weight.shape, weight, eps)
    return (y, total) if prenorm else y


def quack_layer_norm(x, weight, bias=None, eps=1e-5):
    assert weight.dtype == bias.dtype == torch.float32
    return wide_layer_norm(x, weight, bias, eps)


def flash_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False):
    total = x if residual is None else x + residual
    y = F.rms_norm(total, weight.shape, weight, eps) if bias is None else wide_layer_norm(total, weight, bias, eps)
    return (y, total) if prenorm else y


PRETENDED = {
    "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction": SimpleNamespace(apply=wide_layer_norm)},
    "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": SimpleNamespace(apply=liger_rms_norm)},
    "liger_kernel.ops.fused_add_rms_norm": {"LigerFusedAddRMSNormFunction": SimpleNamespace(apply=liger_add_rms_norm)},
    "quack.rmsnorm": {"rmsnorm": quack_rms_norm, "layernorm_fwd": quack_layer_norm},
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": flash_norm, "rms_norm_fn": flash_norm},
}


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    peers._loaded.cache_clear()
    yield
    peers._loaded.cache_clear()


@pytest.fixture
def pretended(monkeypatch):
    for name, content in PRETENDED.items():
        package = name.partition(".")[0]
        for part in (package, name.rpartition(".")[0], name):
            monkeypatch.setitem(sys.modules, part, SimpleNamespace(__path__=[]))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_all_compute_the_same_norm(op, dtype, direction):
    peers = [BY_NAME[name] for name in ("Liger", "quack", "flash-attn")]
    (cell,) = measure([Case(op, (8, 16), dtype, direction)], seconds=0.0, peers=peers).cells
    absent = ("quack",) if op.endswith("layer_norm") and direction == "forward+backward" else ()
    assert tuple(name for name, _ in cell.left_out) == absent
    assert [found.peer for found in cell.measurements if not found.is_wrong] == [
        peer.name for peer in peers if peer.name not in absent
    ]


@pytest.mark.parametrize(("name", "package"), [("Liger", "liger-kernel"), ("quack", "quack-kernels")])
def test_a_package_that_is_not_installed(name, package, monkeypatch):
    for module in PRETENDED:
        monkeypatch.setitem(sys.modules, module, None)
    case = Case("rms_norm", (4, 16), "float32", "forward")
    with pytest.raises(AbsentError, match=rf"is not installed: pip install {package} \(.*\)$"):
        BY_NAME[name].prepare(case, arguments(case))


def test_a_package_that_does_not_load_is_tried_once(monkeypatch):
    tried = []

    def broken(name):
        tried.append(name)
        raise RuntimeError("no driver\nlong story")

    monkeypatch.setattr(peers, "import_module", broken)
    case = Case("rms_norm", (4, 16), "float32", "forward")
    for _ in range(2):
        with pytest.raises(AbsentError, match=r"^cannot be imported: RuntimeError no driver$"):
            BY_NAME["quack"].prepare(case, arguments(case))
    assert tried == ["quack.rmsnorm"]


def test_what_quack_does_not_differentiate():
    case = Case("add_layer_norm", (4, 16), "float32", "backward")
    with pytest.raises(AbsentError, match="no gradient"):
        BY_NAME["quack"].prepare(case, arguments(case))


@pytest.mark.usefixtures("pretended")
def test_eps_is_everyones():
    case = Case("rms_norm", (2, 16), "float32", "forward")
    given = arguments(case)
    given.x.mul_(1e-3)
    expected = F.rms_norm(given.x, (16,), given.weight, EPS)
    for name in ("torch", "Liger", "quack", "flash-attn"):
        torch.testing.assert_close(BY_NAME[name].prepare(case, given)()[0], expected)
