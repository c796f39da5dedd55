from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from measurement.test_layout import Adding, Listed, found
from normkit.identification.tracing import trace
from normkit.measurement.layout import find_blocks


class Convolving(nn.Module):
    """A block of maps, whose stream a convolution brings to another size, and whose branch is a list of its own."""

    def __init__(self, entering, leaving):
        super().__init__()
        self.branch = nn.Sequential(*(nn.Sequential(nn.Conv2d(leaving, leaving, 1)) for _ in range(2)))
        self.shortcut = nn.Conv2d(entering, leaving, 1, stride=2) if entering != leaving else nn.Identity()

    def forward(self, x):
        x = self.shortcut(x)
        return x + self.branch(x)


def test_blocks_of_maps_have_the_axis_of_their_channels():
    last = Listed(layers=[Adding(), Adding()])
    first = Listed(layers=[Convolving(8, 8), Convolving(8, 8)])
    for model, x, axis in ((last, torch.randn(2, 3, 5, 8), -1), (first, torch.randn(2, 8, 5, 5), 1)):
        blocks = find_blocks(model, trace(model, lambda model=model, x=x: model(x)))
        assert [(block.path, block.axis) for block in blocks] == [("layers.0", axis), ("layers.1", axis)]
        assert blocks[0].rows(x).shape[-1] == 8


def test_the_first_of_a_stage_changes_the_sizes_and_layers_inside_blocks_do_not_count():
    sizes = ((8, 16, 16), (16, 32, 32, 32), (32, 64))
    stages = [nn.Sequential(*(Convolving(*pair) for pair in pairwise(widths))) for widths in sizes]
    model = Listed(stages=stages)
    assert [path for path, _ in found(model, lambda: model(torch.randn(2, 8, 32, 32)))] == [
        *("stages.0.1", "stages.1.1", "stages.1.2")
    ]
    # A Sequential of one member is no list; the layers inside that member are no blocks either.
    stages = {"two": nn.Sequential(Convolving(8, 8), Convolving(8, 8)), "one": nn.Sequential(Convolving(8, 16))}
    model = Listed(**stages)
    assert [path for path, _ in found(model, lambda: model(torch.randn(2, 8, 8, 8)))] == ["two.0", "two.1"]
