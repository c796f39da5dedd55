"""Tables in one vector, vectors of several processes in one, and copies read in their order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normkit.measurement.row_counters import Table, Tables
from normkit.watching.async_copies import AsyncCopy, CopyQueue

LAYOUT = [
    Table(name="peaks", shape=(2,), keeps_largest=True),
    Table(name="sums", shape=(2, 3)),
    Table(name="none", shape=(0, 4)),
]


def made() -> Tables:
    return Tables(LAYOUT, torch.device("cpu"))


def test_empty_tables_are_zeros_and_lowest_numbers():
    tables = made()
    assert tables["sums"].dtype == torch.float64
    assert tables["sums"].tolist() == [[0.0] * 3] * 2
    assert tables["peaks"].tolist() == [-math.inf] * 2


def test_a_packed_vector_is_a_copy_that_unpacks_to_the_tables():
    tables = made()
    tables["sums"].copy_(torch.arange(6.0).view(2, 3))
    tables["peaks"].copy_(torch.tensor([3.0, -1.0]))
    vector = tables.packed()
    tables.clear()
    assert tables["sums"].eq(0).all()
    assert tables["peaks"].isneginf().all()
    found = tables.unpacked(vector)
    assert found["sums"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["peaks"].tolist() == [3, -1]
    assert found["none"].shape == (0, 4)
    tables.part(vector, "sums")[1, 2] = 9
    assert tables.unpacked(vector)["sums"][1, 2] == 9
    with pytest.raises(KeyError):
        tables.part(vector, "no such table")


def test_sums_of_several_vectors_are_added_and_the_largest_kept():
    vectors = []
    for value in (1.0, 2.0, -5.0):
        tables = made()
        tables["sums"].fill_(value)
        tables["peaks"][0] = value
        vectors.append(tables.packed())
    found = made().unpacked(made().merged(torch.stack(vectors)))
    assert found["sums"].eq(-2).all()
    assert found["peaks"].tolist() == [2.0, -math.inf]


class Late:
    """Numbers that are ready after they were asked for so many times."""

    def __init__(self, asked: int) -> None:
        self.asked = asked

    def is_ready(self, patience: float = 0.0) -> bool:
        self.asked -= 1
        return self.asked < 0 or patience > 0

    def read(self) -> Tensor | None:
        return torch.zeros(1)


def test_a_copy_holds_what_was_copied():
    values = torch.ones(2)
    copy = AsyncCopy(values)
    values.fill_(7)
    assert copy.is_ready()
    found = copy.read()
    assert (found.dtype, found.tolist()) == (torch.float64, [1.0, 1.0])


def test_a_later_copy_waits_for_the_earlier():
    queue = CopyQueue()
    queue.put(0, Late(asked=1))
    queue.put(1, AsyncCopy(torch.ones(1)))
    assert list(queue.take_ready()) == []
    assert [step for step, _ in queue.take_ready()] == [0, 1]
    assert list(queue.take_ready()) == []


def test_patience_waits_for_what_is_pending():
    queue = CopyQueue()
    queue.put(4, Late(asked=9))
    assert [step for step, _ in queue.take_ready(1.0)] == [4]
