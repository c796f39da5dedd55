from __future__ import annotations

import torch
from torch import nn

from normkit.identification.tracing import trace
from normkit.measurement.blocks import find_blocks


class Block(nn.Module):
    """x + f(x), in a tuple if asked."""

    def __init__(self, width: int = 8, in_tuple: bool = False):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.in_tuple = in_tuple

    def forward(self, x):
        y = x + self.linear(x)
        return (y, None) if self.in_tuple else y


class Experts(nn.Module):
    """A block with a list of two-layer experts inside."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6))

    def forward(self, x):
        return x + sum(expert(x) for expert in self.experts)


class Stack(nn.Module):
    """Modules of some lists, called one after the other."""

    def __init__(self, **lists):
        super().__init__()
        self.names = list(lists)
        for name, members in lists.items():
            setattr(self, name, members if isinstance(members, nn.Module) else nn.ModuleList(members))

    def forward(self, x):
        for name in self.names:
            for member in getattr(self, name):
                x = member(x)
                x = x[0] if isinstance(x, tuple) else x
        return x


def found(model, run=None):
    blocks = find_blocks(model, trace(model, run or (lambda: model(torch.randn(2, 5, 8)))))
    assert all(model.get_submodule(block.path) is block.module for block in blocks)
    return [(block.path, block.index) for block in blocks]


def test_members_of_a_module_list():
    assert found(Stack(layers=[Block(), Block(in_tuple=True)])) == [("layers.0", 0), ("layers.1", 1)]


def test_the_order_is_that_of_the_calls():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            return self.layers[0](self.layers[1](x))

    assert found(Backwards()) == [("layers.1", 0), ("layers.0", 1)]


def test_experts_are_inside_their_block():
    assert found(Stack(layers=[Experts(), Experts()])) == [("layers.0", 0), ("layers.1", 1)]


def test_two_lists_share_one_count():
    model = Stack(encoder=[Block(), Block()], decoder=[Block(), Block(), Block()])
    assert [path for path, _ in found(model)] == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"]
    assert [index for _, index in found(model)] == [0, 1, 2, 3, 4]


def test_a_list_of_one_beside_a_longer_one_is_no_stack():
    assert found(Stack(layers=[Block(), Block()], head=[Block()])) == [("layers.0", 0), ("layers.1", 1)]


def test_one_block_is_a_stack_where_there_is_no_longer_one():
    assert found(Stack(layers=[Block()])) == [("layers.0", 0)]


def test_layers_without_modules_of_their_own_are_no_blocks():
    assert found(Stack(layers=[nn.Linear(8, 8), nn.Linear(8, 8)], norms=[nn.LayerNorm(8), nn.LayerNorm(8)])) == []


def test_members_of_a_sequential_inside_a_list():
    stages = [nn.Sequential(Block(), nn.Sequential(nn.Linear(8, 8))), nn.Sequential(Block(), nn.Linear(8, 16))]
    # The second stage changes the width, so the stages are no blocks; the first stage's members are.
    assert found(Stack(stages=stages)) == [("stages.0.0", 0), ("stages.0.1", 1)]


def test_a_sequential_of_one_class():
    assert found(Stack(blocks=nn.Sequential(Block(), Block()))) == [("blocks.0", 0), ("blocks.1", 1)]


def test_a_sequential_of_several_classes_is_a_branch():
    assert found(Stack(head=nn.Sequential(nn.Sequential(nn.Linear(8, 8)), Block()))) == []


def test_images_and_rows_are_not_a_stream():
    model = Stack(layers=[Block(), Block()])
    assert found(model, lambda: model(torch.randn(5, 8))) == []
    assert found(model, lambda: model(torch.randn(2, 3, 5, 8))) == []


def test_a_block_called_many_times_is_one_block():
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=32,
        embedding_size=8,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    model = AlbertModel(config).eval()
    path = "encoder.albert_layer_groups.0"
    assert found(model, lambda: model(input_ids=torch.arange(3, 9)[None])) == [(path, 0)]
