"""The hooks of a watch, on and off."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.identification.tracing import first_output
from normkit.measurement.hooks import _with_stream
from normkit.measurement.instruments import _GradientCounter, gradient_counted
from normkit.measurement.row_counters import GRADIENT_SUMS, Tables, gradient_table, named
from small_training import Run, Transformer


@pytest.mark.slow
def test_only_the_sentinel_counts_in_unmeasured_steps():
    run = Run()

    def body(each: Run) -> None:
        loss = each.loss(each.model, each.batch())
        recorder = each.watch._recorder
        switch, tables = recorder.instruments, recorder.tables
        counted = sum(float(tables[name].abs().nan_to_num(posinf=0).sum()) for name in ("rows", "bins", "heads"))
        assert switch.on == (len(each.losses) == 0) == (counted > 0)
        seen = recorder.instruments.sentinel[:, 1].tolist()
        # Four calls of functions have no hook.
        assert sorted(seen) == [0.0] * 4 + [1.0] * 7
        each.optimizer.zero_grad()
        loss.backward()
        each.tell(loss)
        each.optimizer.step()

    batch = run.batch()
    run.go(steps=3, every=9, body=body, batch=(batch,))
    assert run.said == []


@pytest.mark.slow
def test_a_call_belongs_to_the_innermost_module():
    """Queries are normalized by a module that calls the function which the attention calls for its keys."""
    sites = Run(lambda: Transformer(in_modules=True)).go(steps=1).watch.inspection().sites
    assert {site.path: site.calls for site in sites if "attention" in site.path} == {
        f"blocks.{index}.attention{name}": 1 for index in range(2) for name in (".q_norm", ":rms_norm")
    }


def test_the_stream_of_a_tuple_is_put_back_in_its_place():
    Pair = namedtuple("Pair", ["mask", "stream"])
    mask, stream, other = torch.ones(2, dtype=torch.bool), torch.ones(3), torch.zeros(3)
    for output in ((mask, stream), [mask, stream], Pair(mask, stream)):
        assert first_output(output) is stream
        replaced = _with_stream(output, stream, other)
        assert type(replaced) is type(output)
        assert replaced[1] is other
        assert replaced[0] is mask
    assert first_output(mask) is None is first_output("text")
    assert _with_stream(stream, stream, other) is other


def test_a_shared_norm_counts_all_of_its_calls():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm, self.head = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.norm(self.embedding(tokens)) * 3))

    (site,) = Run(Shared).go(steps=1).watch.inspection().sites
    assert (site.calls, site.forward_calls, site.input.rows) == (2, 2, 32)


def guarded(body: Any, table: Tensor, *args: Tensor) -> None:
    body(table, *args)


@pytest.mark.parametrize("is_traced", [False, True])
def test_the_gradient_of_autograd_is_counted_and_left_as_it_is(is_traced: bool):
    table = Tables([gradient_table(1)], torch.device("cpu"))["activation gradients"][0]
    leaf, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(3, 5, 8)

    def loss(is_counted: bool) -> tuple[Tensor, Tensor]:
        x = leaf.sin()
        y = x
        if is_counted:
            y = _GradientCounter.apply(x, table) if is_traced else x
            if not is_traced:
                assert gradient_counted(x, table, guarded) is None
        return x, (y * weight).square().sum()

    x, plain = loss(False)
    (expected,) = torch.autograd.grad(plain, x, retain_graph=True)
    (at_leaf,) = torch.autograd.grad(plain, leaf)
    _, watched = loss(True)
    assert torch.equal(torch.autograd.grad(watched, leaf)[0], at_leaf)
    line = named(table, GRADIENT_SUMS)
    assert line["rows"] == 15
    assert line["squares"] * 8 == pytest.approx(float(expected.double().square().sum()), rel=1e-6)


def test_a_tensor_changed_in_place_afterwards_is_counted_as_it_was():
    table = Tables([gradient_table(1)], torch.device("cpu"))["activation gradients"][0]
    x = torch.randn(2, 4, requires_grad=True) * 2
    assert gradient_counted(x, table, guarded) is None
    x.mul_(3.0)
    x.sum().backward()
    assert named(table, GRADIENT_SUMS) == pytest.approx({"rows": 2, "squares": 18, "nonfinite": 0})


def test_a_parameter_is_not_gradient_counted():
    """A hook on it would stay."""
    table = Tables([gradient_table(1)], torch.device("cpu"))["activation gradients"][0]
    parameter = torch.nn.Parameter(torch.ones(2, 4))
    gradient_counted(parameter, table, guarded)
    parameter.sum().backward()
    assert not table.any()
