"""The hooks of a watch, on and off."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from normkit.watching.instruments import _stream, _with_stream
from small_training import Run, Transformer


@pytest.mark.slow
def test_off_the_sentinel_alone_looks():
    run = Run()

    def body(each: Run) -> None:
        loss = each.loss(each.model, each.batch())
        gauging = each.watch._gauging
        switch, tables = gauging.switch, gauging.tables
        counted = sum(float(tables[name].abs().nan_to_num(posinf=0).sum()) for name in ("rows", "bins", "heads"))
        assert switch.on == (len(each.losses) == 0) == (counted > 0)
        seen = gauging._instruments.sentinel[:, 1].tolist()
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
        place, found = _stream(output)
        assert (place, found is stream) == (1, True)
        replaced = _with_stream(output, place, other)
        assert type(replaced) is type(output)
        assert replaced[1] is other
        assert replaced[0] is mask
    assert _stream(mask) == (None, None) == _stream("text")
    assert _with_stream(stream, None, other) is other


def test_a_shared_norm_counts_all_of_its_calls():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm, self.head = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.norm(self.embedding(tokens)) * 3))

    (site,) = Run(Shared).go(steps=1).watch.inspection().sites
    assert (site.calls, site.forward_calls, site.input.rows) == (2, 2, 32)
