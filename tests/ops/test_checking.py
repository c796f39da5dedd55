"""Before the kernels of a GPU compute a kind of call, a few rows are held against the reference.

Triton's interpreter stands for the GPU; what a broken GPU would give is made of its answers.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import PRESETS
from normkit import specs
from normkit.kernels.triton import loading
from normkit.ops import calls, checking, devices
from normkit.ops.plans import plan, spec_of
from triton_kernels import triton_kernels

LAYER = plan(specs.TORCH_LAYER_NORM)
X, WEIGHT = torch.zeros(3, 24), torch.zeros(24)


@pytest.fixture(autouse=True)
def _afresh(monkeypatch):
    monkeypatch.setattr(checking, "_passed", set())
    monkeypatch.setattr(checking, "_failed", set())


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    with triton_kernels():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["TORCH_LAYER_NORM", "LLAMA", "GEMMA", "SCALE_NORM", "NANOCHAT"])
def test_right_kernels_pass(name, dtype):
    """One feature and two, where dx is the rounding of what cancels, and a residual in another dtype."""
    spec = PRESETS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n, residual in ((1, None), (2, None), (24, torch.zeros(3, 24))):
            weight = torch.zeros(n, dtype=dtype) if spec.has_weight else None
            bias = torch.zeros(n) if spec.has_bias else None
            given = torch.zeros(3, n, dtype=dtype), weight, bias, residual
            assert checking.passes(plan(spec), *given, has_gradient=True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("operator", "place", "broken", "said"),
    [
        ("normalize_forward", 0, lambda y: y * 1.0001, "y is off by"),
        ("normalize_forward", 0, lambda y: y.index_fill(0, torch.tensor(4), torch.nan), "y is off by nan"),
        ("normalize_backward", 0, lambda dx: dx.roll(1, 0), "dx is off by"),
        ("normalize_backward", 1, lambda dweight: dweight / 5, "dweight is off by"),
        ("normalize_backward", 2, torch.zeros_like, "dbias is off by"),
    ],
)
def test_a_wrong_number_is_one_warning_and_plain_torch_from_there(monkeypatch, operator, place, broken, said):
    operators = devices.operators()
    right = getattr(operators, operator)

    def wrong(*arguments):
        found = list(right(*arguments))
        found[place] = broken(found[place])
        return tuple(found)

    assert checking.passes(LAYER, X[:, :9], WEIGHT[:9], WEIGHT[:9], None, has_gradient=True)
    monkeypatch.setattr(operators, operator, wrong)
    with pytest.warns(RuntimeWarning, match=f"failed their self-check on GPU None.*: {said}") as told:
        assert not any(
            # Neither again, nor what passed before, nor any other kind.
            checking.passes(LAYER, X[:, :n], WEIGHT[:n], WEIGHT[:n], None, has_gradient=True)
            for n in (24, 24, 9, 8)
        )
    assert len(told) == 1


def test_kernels_that_cannot_run_are_the_same(monkeypatch):
    def refused(*_):
        raise RuntimeError("PTX was compiled for another GPU\nand more")

    monkeypatch.setattr(devices.operators(), "normalize_forward", refused)
    with pytest.warns(RuntimeWarning, match="RuntimeError: PTX was compiled for another GPU; norms on this GPU"):
        assert not checking.passes(LAYER, X, WEIGHT, WEIGHT, None, has_gradient=False)


def test_it_runs_once_for_each_kind(monkeypatch):
    seen = []
    monkeypatch.setattr(checking, "_differences", lambda kind, _spec: iter(seen.append(kind) or ()))
    for x, has_gradient in ((X, False), (X, True), (X[:2], True), (X.half(), True), (X[:, :8], True)):
        for _ in range(2):
            weight = WEIGHT[: x.shape[1]]
            assert checking.passes(LAYER, x, weight, weight, None, has_gradient=has_gradient)
    assert [(kind.sizes, kind.dtypes[0], kind.has_gradient) for kind in seen] == [
        ((24,), torch.float32, False),
        ((24,), torch.float32, True),
        ((24,), torch.float16, True),
        ((8,), torch.float32, True),
    ]


@pytest.mark.usefixtures("kernels")
def test_it_leaves_the_random_numbers_and_the_gradients_of_the_user_alone():
    state = torch.get_rng_state()
    weight = WEIGHT.clone().requires_grad_()
    assert checking.passes(LAYER, X, weight, weight, None, has_gradient=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert weight.grad is None


@pytest.mark.slow
def test_a_compiler_runs_it_while_it_traces(monkeypatch):
    """Of any width: the second makes a compiler take the width for a symbol."""
    seen = []
    monkeypatch.setattr(checking, "_differences", lambda kind, _spec: iter(seen.append(kind.sizes) or ()))

    def call(x):
        return x + 1 if checking.passes(plan(specs.LLAMA), x, x[0], None, None, has_gradient=False) else x - 1

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for n in (8, 9, 10, 10):
        assert compiled(torch.zeros(3, n)).sum() == 3 * n
    assert seen == [(8,), (9,), (10,)]


@pytest.mark.parametrize("passes", [True, False])
def test_both_ways_to_the_kernels_ask(monkeypatch, passes):
    """Tensors on a GPU that is not there, as torch imagines them."""
    asked = []
    monkeypatch.setattr(loading, "device_reason", lambda _index: None)
    monkeypatch.setattr(loading, "supports_tensors", lambda *_: None)
    monkeypatch.setattr(checking, "passes", lambda *_, has_gradient: asked.append(has_gradient) or passes)
    with FakeTensorMode():
        x = torch.empty(3, 8, device="cuda", requires_grad=True)
        assert calls.choose(LAYER, x, None, None).uses_kernel is passes
        if not passes:
            with pytest.raises(RuntimeError, match="failed their self-check"):
                calls.normalize_plain(x.detach(), LAYER, None, None)
    assert asked == ([True] if passes else [True, False])


@pytest.mark.parametrize("name", PRESETS)
def test_arguments_of_an_operator_are_turned_back_into_the_spec(name):
    found = plan(PRESETS[name])
    if found.unsupported is None:
        given = {"has_weight": PRESETS[name].has_weight, "has_bias": PRESETS[name].has_bias}
        spec = spec_of(*found[1:4], **given)
        assert plan(spec)[1:4] == found[1:4]
