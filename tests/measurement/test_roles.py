"""Roles of norms where a block has two streams, and of norms that lie in no block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.measurement.structure import Structure, survey

WIDTH, TOKENS = 32, 12


def read(model: nn.Module, x: torch.Tensor) -> Structure:
    model.eval()
    return survey(model, lambda: model(x))


class TwoStreams(nn.Module):
    """Two streams side by side, as image and text in SD3; the last block returns the first alone."""

    def __init__(self, is_last=False, is_post=False):
        super().__init__()
        self.norm, self.other, self.is_last, self.is_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), is_last, is_post
        self.linear, self.turn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, text):
        if self.is_post:
            return self.norm(x + self.linear(x)), self.other(text + self.turn(text))
        read, both = self.norm(x), self.other(text)
        x = x + self.linear(F.scaled_dot_product_attention(read, both, both))
        return (x, None) if self.is_last else (x, text + self.turn(both))


@pytest.mark.parametrize("is_post", [False, True])
def test_a_stream_beside_the_first_gives_its_norms_their_roles(is_post):
    """They were called norms of queries and keys, as they are on the way to attention and have other rows."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([TwoStreams(False, is_post), TwoStreams(not is_post, is_post)])

        def forward(self, x):
            text = x[:, :5].detach().clone()
            for layer in self.layers:
                x, text = layer(x, text)
            return x

    structure = read(Stack(), torch.randn(2, TOKENS, WIDTH))
    assert [one.placement for one in structure.sweeps] == ["post" if is_post else "pre"] * 2
    assert set(structure.roles.values()) == {"post" if is_post else "pre"}


class Residual(nn.Module):
    """A residual block of maps; it widens its map where the sizes differ, and is no block there."""

    def __init__(self, entering, leaving):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, entering), nn.Conv2d(entering, leaving, 3, padding=1)
        self.skip = nn.Identity() if entering == leaving else nn.Conv2d(entering, leaving, 1)

    def forward(self, x):
        return self.skip(x) + self.conv(self.norm(x))


def test_norms_of_a_unet_that_lie_in_no_block_are_neither_embedding_nor_final():
    """The final norm was the first norm on the way up that has as many channels as the last block."""

    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([Residual(8, 8), Residual(8, 8)])
            self.middle = nn.ModuleList([Residual(8, 16), Residual(16, 16)])
            self.up = nn.ModuleList([Residual(16, 8), Residual(16, 8)])
            self.out = nn.GroupNorm(4, 8)

        def forward(self, x):
            kept = self.down[1](self.down[0](x))
            x = self.up[0](F.interpolate(self.middle[1](self.middle[0](kept)), scale_factor=2))
            return self.out(self.up[1](torch.cat([x, F.interpolate(kept, scale_factor=2)], 1)))

    structure = read(Up(), torch.randn(2, 8, 6, 6))
    assert structure.final_norm is None
    assert {path for path, role in structure.roles.items() if role == "pre"} == {
        "down.0.norm",
        "down.1.norm",
        "middle.1.norm",
    }
    assert "embedding" not in structure.roles.values()


@pytest.mark.parametrize("is_beside_the_second", [True, False])
def test_a_norm_between_two_stacks_belongs_to_the_one_that_it_lies_beside(is_beside_the_second):
    """As in ConvNeXt, where a norm before the convolution that halves a map was called the final norm of a model."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

        def forward(self, x):
            return x + self.linear(self.norm(x))

    class Stage(nn.Module):
        def __init__(self, width, *, has_first=False, has_last=False):
            super().__init__()
            between = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH))
            self.first = nn.Sequential(*between) if has_first else nn.Identity()
            self.layers = nn.Sequential(Block(width), Block(width))
            self.last = nn.Sequential(*between) if has_last else nn.Identity()

        def forward(self, x):
            return self.last(self.layers(self.first(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            one = Stage(WIDTH, has_last=not is_beside_the_second)
            self.stages = nn.ModuleList([one, Stage(2 * WIDTH, has_first=is_beside_the_second)])
            self.norm = nn.LayerNorm(2 * WIDTH)

        def forward(self, x):
            for stage in self.stages:
                x = stage(x)
            return self.norm(x)

    roles = read(Model(), torch.randn(2, TOKENS, WIDTH)).roles
    assert roles["norm"] == "final"
    path, role = ("stages.1.first.0", "embedding") if is_beside_the_second else ("stages.0.last.0", "final")
    assert roles[path] == role
