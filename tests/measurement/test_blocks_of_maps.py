from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import normkit as nk
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


class Several(nn.Module):
    """A block of four streams beside each other, as AltUp and hyper-connections have them: no map."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x.mean(0)))


class Moving(Several):
    """A block of maps (B, C, H, W) that moves the channels last for its norm, as VitDet's."""

    def forward(self, x):
        return x + self.linear(self.norm(x.movedim(1, -1))).movedim(-1, 1)


def test_streams_beside_each_other_are_no_map():
    model = Listed(layers=[Several(), Several()])
    assert found(model, lambda: model(torch.randn(4, 2, 5, 8))) == []
    model = Listed(layers=[Moving(), Moving()])
    assert [block.axis for block in find_blocks(model, trace(model, lambda: model(torch.randn(2, 8, 5, 5))))] == [1, 1]


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


class Inverted(nn.Module):
    """A residual of inverted widths (Sandler et al. 2018): no skip where it changes the sizes."""

    def __init__(self, entering, leaving, skips=True):
        super().__init__()
        wide, self.skips = 2 * leaving, skips and entering == leaving
        expand, reduce = nn.Conv2d(entering, wide, 1), nn.Conv2d(wide, leaving, 1)
        norms = [nn.BatchNorm2d(width) for width in (wide, leaving)]
        self.branch = nn.ModuleDict({"expand": expand, "norm": norms[0], "reduce": reduce, "last": norms[1]})

    def forward(self, x):
        y = self.branch["reduce"](nn.functional.relu6(self.branch["norm"](self.branch["expand"](x))))
        y = self.branch["last"](y)
        return x + y if self.skips else y


class Stage(nn.Module):
    """Numbers its members, as timm's RegNet does."""

    def __init__(self, members):
        super().__init__()
        for index, member in enumerate(members):
            self.add_module(f"b{index}", member)

    def forward(self, x):
        for member in self.children():
            x = member(x)
        return x


@pytest.mark.slow
def test_inverted_residuals_are_blocks_where_they_add_to_their_input():
    widths = (8, 8, 8, 16, 16, 16, 32)
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6)
    kept = [("layers.0", 0), ("layers.1", 1), ("layers.3", 2), ("layers.4", 3)]
    model = Listed(layers=[Inverted(*pair) for pair in pairwise(widths)]).eval()
    assert found(model, lambda: model(x)) == kept
    numbered = Stage(Inverted(*pair) for pair in pairwise(widths[1:5]))
    assert found(numbered, lambda: numbered(x)) == [("b0", 0), ("b2", 1)]
    for other in (
        Listed(layers=[Inverted(*pair, skips=False) for pair in pairwise(widths)]),
        Stage(Inverted(8, 8, skips=False) for _ in range(3)),
    ):
        assert found(other, lambda other=other: other(x)) == []
    # ReLU6 bounds the branch. A watch sees the same.
    inspection = nk.inspect(model, x)
    assert [(block.path, block.placement) for block in inspection.blocks] == [(path, "in-branch") for path, _ in kept]
    model.train()
    with nk.watch(model, every=1, say=lambda _: None) as watch:
        loss = model(x).square().mean()
        loss.backward()
        watch.step(loss)
    watched = watch.inspection()
    assert [(b.path, b.placement) for b in watched.blocks] == [(b.path, b.placement) for b in inspection.blocks]
    assert [series.path for series in watched.training.of("stream rms")] == [path for path, _ in kept]


class Joint(nn.Module):
    """A block of joint attention that returns the text's stream first, as those of diffusers do."""

    def __init__(self, joins=False):
        super().__init__()
        self.norm, self.linear, self.joins = nn.LayerNorm(8), nn.Linear(8, 8), joins

    def forward(self, image, text):
        if self.joins:
            both = torch.cat([text, image], 1)
            return tuple((both + self.linear(self.norm(both))).split([text.shape[1], image.shape[1]], 1))
        return text + image.mean(1, keepdim=True), image + self.linear(self.norm(image)) + text.mean(1, keepdim=True)


class JointStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Joint(), Joint(joins=True)])

    def forward(self, image):
        text = image[:, :3].detach()
        for layer in self.layers:
            text, image = layer(image=image, text=text)
        return image


@pytest.mark.slow
def test_the_stream_of_a_block_that_returns_another_one_first():
    torch.manual_seed(0)
    model, x = JointStack(), torch.randn(2, 7, 8)
    inspection = nk.inspect(model, x)
    assert [(block.path, block.placement) for block in inspection.blocks] == [("layers.0", "pre"), ("layers.1", "pre")]
    assert [block.stream_out.rows for block in inspection.blocks] == [14, 14]
    assert {site.role for site in inspection.sites} == {"pre"}


def test_rows_of_one_matrix_are_a_stream_where_a_module_adds_to_them():
    """As the patches of all images in the tower of Qwen2.5-VL."""

    class Layer(nn.Sequential):
        pass

    x = torch.randn(5, 8)
    model = Listed(layers=[Adding(), Adding()])
    assert found(model, lambda: model(x)) == [("layers.0", 0), ("layers.1", 1)]
    # Layers of a head, experts, and a list of several classes.
    model = Listed(head=[Layer(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
    assert found(model, lambda: model(x)) == []
    model = Listed(head=[Adding(), Layer(nn.Linear(8, 8), nn.ReLU())])
    assert found(model, lambda: model(x)) == []
    # One that does not add is a block among others that do.
    model = Listed(layers=[Adding(), Adding(), Adding()])
    model.layers[1].forward = model.layers[1].linear.forward
    assert [path for path, _ in found(model, lambda: model(x))] == ["layers.0", "layers.1", "layers.2"]
