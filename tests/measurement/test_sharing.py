"""Norms at several places: called too often, listed twice, or with a parameter of another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.measurement.running import runner
from normkit.measurement.sharing import Sharing, find_shared
from normkit.measurement.structure import survey


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], final: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.blocks, self.final = nn.ModuleList(blocks), final

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.final(x)


def shared(model: nn.Module) -> dict[str, Sharing]:
    run = runner(model.eval(), {"input_ids": torch.arange(6)[None]})
    with torch.no_grad():
        return find_shared(model, survey(model, run))


def norm() -> nn.Module:
    return nn.LayerNorm(8)


def test_a_norm_for_each_place() -> None:
    assert shared(Stack([Block(norm()), Block(norm())], norm())) == {}


def test_one_module_at_two_places() -> None:
    one = norm()
    assert shared(Stack([Block(norm()), Block(one)], one)) == {
        "blocks.1.norm": Sharing(calls=2, around=1, twins=("final",))
    }


def test_both_norms_of_a_block_are_one_module() -> None:
    class Two(Block):
        def __init__(self) -> None:
            super().__init__(norm())
            self.second = self.norm

        def forward(self, x: Tensor) -> Tensor:
            return self.second(super().forward(x))

    assert shared(Stack([Two(), Block(norm())], norm())) == {
        "blocks.0.norm": Sharing(calls=2, around=1, twins=("blocks.0.second",))
    }


def test_a_block_that_runs_twice_brings_its_norm_along() -> None:
    block = Block(norm())
    assert shared(Stack([block, block, Block(norm())], norm())) == {}


def test_a_model_within_a_model_that_runs_twice() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Stack([Block(norm()), Block(norm())], norm())

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.tower(input_ids) + self.tower(input_ids + 1)

    assert shared(Pair()) == {}


def test_one_parameter_in_two_modules() -> None:
    model = Stack([Block(norm()), Block(norm())], norm())
    model.final.bias = model.blocks[0].norm.bias
    assert {path: sharing.twins for path, sharing in shared(model).items()} == {
        "blocks.0.norm": ("final",),
        "final": ("blocks.0.norm",),
    }


def test_one_parameter_in_two_calls_of_a_function() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.weight = nn.Embedding(9, 8), nn.Parameter(torch.ones(8))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = F.layer_norm(self.embedding(input_ids), (8,), self.weight)
            return F.layer_norm(x.tanh(), (8,), self.weight)

    assert {path: sharing.twins for path, sharing in shared(Functional()).items()} == {
        ":layer_norm": (":layer_norm#2",),
        ":layer_norm#2": (":layer_norm",),
    }


class Recurrence(nn.Module):
    """A state that each input enters, normalized at every time, by one norm or by one of a list."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.norms = nn.ModuleList([norm()]) if listed else norm()
        self.listed = listed

    def forward(self, input_ids: Tensor) -> Tensor:
        one = self.norms[0] if self.listed else self.norms
        arriving = self.embedding(input_ids)
        state = torch.zeros_like(arriving[:, 0])
        for x in arriving.unbind(1):
            state = torch.tanh(one(x + self.recurrent(state)))
        return state


@pytest.mark.slow
def test_a_norm_inside_a_recurrence_serves_one_place() -> None:
    assert shared(Recurrence(listed=False)) == {}
    assert shared(Recurrence(listed=True)) == {}


def test_a_norm_called_more_often_than_the_matrix_beside_it() -> None:
    class Two(Block):
        def __init__(self) -> None:
            super().__init__(norm())
            self.second = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.second(self.norm(x))

    found = shared(Stack([Two(), Block(norm())], norm()))
    assert found == {"blocks.0.norm": Sharing(calls=2, around=1, twins=())}
