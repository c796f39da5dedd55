"""A launch is compiled once, gets its arguments in order, and is compiled to the same sums wherever rows lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from helpers import ROOT
from normkit import specs
from normkit.kernels.triton import launching
from normkit.kernels.triton.launching import Launch
from normkit.ops.plans import plan

pytest.importorskip("triton")


class Kernel:
    """As much of a compiled Triton function as is used."""

    device_caches = None
    arg_names = ("x", "y", "rows", "inner", "N", "BLOCK")

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *arguments, **keywords):
        self.compiled.append((arguments, keywords))
        return self

    def __getitem__(self, grid):
        return lambda *arguments, **keywords: self.launched.append((grid, arguments, keywords))


def test_a_compiled_launch_has_all_arguments_in_order():
    kernel = Kernel()
    # The order of the constants is another than the kernel's.
    launch = Launch(kernel, 5, (7, 3), {"BLOCK": 64, "N": 33}, 8)
    first, second = (torch.ones(2), None), (torch.zeros(2), None)
    run = launching.compile_launch(launch, first)
    options = {"num_warps": 8, "enable_fp_fusion": True, "grid": (5, 1, 1)}
    assert kernel.compiled == [((*first, 7, 3), {"BLOCK": 64, "N": 33, **options})]
    assert kernel.launched == []
    run(first)
    run(second)
    assert len(kernel.compiled) == 1
    assert kernel.launched == [((5, 1, 1), (*given, 7, 3, 33, 64), {}) for given in (first, second)]


def test_a_captured_launch_is_wrapped_for_the_compiler(monkeypatch):
    kernel, wrapped = Kernel(), []
    monkeypatch.setattr(launching, "wrap_triton", lambda function: wrapped.append(function) or function)
    launching.capture(Launch(kernel, 5, (7, 3), {"BLOCK": 64, "N": 33}, 8), (torch.ones(2), None))
    assert wrapped == [kernel]
    ((grid, arguments, keywords),) = kernel.launched
    assert (grid, arguments[2:], keywords) == ((5,), (7, 3), {"BLOCK": 64, "N": 33, "num_warps": 8})


@pytest.fixture
def compiled(monkeypatch, kernels):  # noqa: ARG001
    """The launches that are compiled, none of which runs."""
    from normkit.kernels.triton import operators

    found = []
    monkeypatch.setattr(operators, "compile_launch", lambda launch, _: found.append(launch) or (lambda _: None))
    operators._plans.clear()
    yield found
    operators._plans.clear()


def normalize(x, weight=None, keeps=False):
    from normkit.kernels.triton import operators

    _, conventions, eps, offset, *_ = plan(specs.LLAMA if weight is not None else specs.NANOCHAT)
    function = operators.normalize_forward if keeps else operators.normalize_rows
    return function(x, weight, None, conventions, eps, offset)


def test_a_call_like_one_before_compiles_nothing(compiled):
    x = torch.randn(6, 32)
    normalize(x)
    normalize(torch.randn(6, 32))
    assert len(compiled) == 1
    # Others: rows, strides, dtype, what is kept, a parameter, a norm.
    others = (x[:5], torch.randn(6, 64)[:, :32], x.half(), torch.randn(2, 3, 32))
    for count, given in enumerate(others, 2):
        normalize(given)
        assert len(compiled) == count
    normalize(x, keeps=True)
    normalize(x, weight=torch.ones(32))
    normalize(x, weight=torch.ones(32).half())
    assert len(compiled) == len(others) + 4
    normalize(x, weight=torch.ones(32))
    assert len(compiled) == len(others) + 4


def test_a_pointer_that_is_not_aligned_is_another_call(compiled):
    """Of rows of odd length, which are read where they are."""
    normalize(torch.randn(6, 33))
    normalize(torch.randn(6 * 33 + 1)[1:].view(6, 33))
    assert len(compiled) == 2


@pytest.mark.usefixtures("compiled")
def test_plans_are_forgotten_before_they_are_too_many(monkeypatch):
    from normkit.kernels.triton import operators

    monkeypatch.setattr(operators, "_MOST_PLANS", 3)
    for rows in range(1, 8):
        normalize(torch.randn(rows, 8))
        assert len(operators._plans) <= 3


@pytest.fixture(scope="module")
def tiles():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "tests")}
    program = [sys.executable, ROOT / "tests" / "imagined_gpu.py", "tiles"]
    result = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["1000 torch.bfloat16", "24 torch.float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_order_of_sums_follows_from_width_and_dtype(tiles, which, direction):
    """The layout in registers of what is added is the same wherever rows lie, alone or many, kept or not, with an out.

    From it follows the order of the additions, so the bits.
    """
    found = tiles[which][direction]
    assert len(found) >= 3
    assert all(tile.startswith("tensor<") and "#ttg" in tile for tiles_of in found.values() for tile in tiles_of)
    assert len({json.dumps(tiles_of) for tiles_of in found.values()}) == 1, found
    assert all(found.values())
