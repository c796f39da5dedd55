"""Which streams are counted, and where their numbers lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.measurement.probing import Probe
from normkit.measurement.structure import survey

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """Three blocks, with something between them or nothing."""

    def __init__(self, between, order=(0, 1, 2)):
        super().__init__()
        self.blocks, self.between, self.order = nn.ModuleList(Block() for _ in range(3)), between, order

    def forward(self, x):
        for index in self.order:
            x = self.between(self.blocks[index](x))
        return x


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("between", "order", "entered"),
    [
        (lambda x: x, (0, 1, 2), (0,)),
        (lambda x: 2 * x, (0, 1, 2), (0, 1, 2)),
        # The same tensor, with other numbers in it.
        (lambda x: x.mul_(2), (0, 1, 2), (0, 1, 2)),
        # The middle block is given its own output too, and the last one output of three.
        (lambda x: x, (0, 1, 1, 2), (0, 1, 2)),
    ],
)
def test_the_input_of_a_block_is_counted_where_it_is_not_the_output_of_the_one_before(between, order, entered):
    model, x = Stack(between, order), torch.randn(2, 5, WIDTH)
    given: dict[str, list[torch.Tensor]] = {}
    for path, module in model.blocks.named_children():
        module.register_forward_pre_hook(lambda _, args, path=path: given.setdefault(path, []).append(args[0].clone()))
    structure = survey(model, lambda: model(x))
    layout = structure.layout(is_pooled=False)
    assert layout.entered == entered
    given.clear()
    with Probe(model, layout) as probe:
        model(x)
    for block in probe.measured().blocks(structure):
        rows = torch.cat(given[str(block.index)]).double().flatten(0, 1)
        assert block.stream_in.rows == len(rows)
        # float32 sums of eight squares.
        assert block.stream_in.rms_max == pytest.approx(float(rows.square().mean(-1).sqrt().max()), rel=1e-6)


@torch.no_grad()
def test_a_group_of_features_is_a_row():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (2, 4)), nn.RMSNorm(4)), torch.randn(3, 5, 8)
    layout = survey(model, lambda: model(x)).layout(is_pooled=False)
    assert list(layout.features[:2]) == [4, 4]
    assert layout.dtypes == {"2": (torch.float32, torch.float32)}
