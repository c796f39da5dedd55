"""The watch's proof of itself: it holds for what is right, and fails where the pooling or a counter is wrong."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from normkit.measurement import row_counters
from normkit.measurement.row_counters import Tables
from normkit.watching import rendezvous
from normkit.watching.ranks import AsyncCopy, Pending, Ranks

CPU = torch.device("cpu")


def test_one_process_is_verified_on_shards_one_after_the_other() -> None:
    line = rendezvous.verify(Ranks(), CPU)
    found = re.fullmatch(r"observer verified: 27 of 27 statistics within (\S+) of float64 on 5 uneven shards", line)
    assert found is not None
    assert 0 < float(found[1]) < 1e-12


def test_the_shards_are_uneven_shifted_and_hold_the_hard_cases() -> None:
    shards = rendezvous.shards(5)
    assert len({len(shard) for shard in shards}) == 5
    assert len(shards[1]) == 0
    assert sum(bool(shard.isnan().any()) for shard in shards) == 1
    assert any(bool((row == 0).all()) for shard in shards for row in shard)
    means = [float(shard.nanmean()) for shard in shards if len(shard)]
    assert max(means) - min(means) > 40


class Doubling(Ranks):
    def pooled(self, vectors: Tensor, tables: Tables, line: int) -> Tensor:
        return 2 * super().pooled(vectors, tables, line)


class Mute(Ranks):
    def gather(self, step: int, vector: Tensor) -> Pending:
        super().gather(step, vector)
        return Lost(vector)


class Lost(AsyncCopy):
    def read(self) -> Tensor | None:
        return None


def test_a_wrong_pooling_is_not_verified() -> None:
    line = rendezvous.verify(Doubling(), CPU)
    assert not line.startswith("observer verified")
    assert " of 27 statistics are wrong on 5 uneven shards: " in line


def test_a_wrong_counter_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    right = row_counters.RowCounter.add

    def wrong(counter: row_counters.RowCounter, tables: Tables, x: Tensor, mask: Tensor | None) -> None:
        right(counter, tables, x, mask)
        tables["rows"][counter.place, row_counters.ROW_SUMS.index("energy")] += 1e-6

    monkeypatch.setattr(row_counters.RowCounter, "add", wrong)
    line = rendezvous.verify(Ranks(), CPU)
    assert line.startswith("2 of 27 statistics are wrong on 5 uneven shards: share of the mean")


def test_processes_that_do_not_answer_are_said() -> None:
    assert rendezvous.verify(Mute(), CPU).startswith("not verified: the 1 processes did not answer")
