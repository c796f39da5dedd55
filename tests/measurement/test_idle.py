"""Norms that nothing reads and branches that are one vector, on a model of a few lines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.measurement.blocks import BlockCall
from normkit.measurement.idle import IdleParts

WIDTH = 16


class Adapted(nn.Module):
    """A matrix with an addition of low rank that starts at zero."""

    def __init__(self):
        super().__init__()
        self.matrix, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return self.matrix(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, is_read):
        super().__init__()
        self.norm, self.closing, self.branch, self.is_read = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Adapted(),
            is_read,
        )

    def forward(self, x):
        y = self.norm(x)
        assert y.shape == x.shape
        return self.closing(x + self.branch(y if self.is_read else x))


def idle(is_read=True, change=lambda _block: None):
    torch.manual_seed(0)
    block = Block(is_read).eval()
    change(block)
    x = torch.randn(2, 4, WIDTH)
    model = nn.Sequential(block)
    idle = IdleParts(["0.norm", "0.closing"])
    with torch.no_grad(), idle.watching(model):
        output = model(x)
    blocks = [BlockCall(path="0", index=0, module=block)]
    return idle.unread(model, output, lambda: model(x)), idle.constant(blocks)


def test_what_is_read_and_what_is_returned_is_used():
    assert idle() == ((), ())


def test_a_norm_that_nothing_reads_though_its_shape_is_looked_at():
    assert idle(is_read=False) == (("0.norm",), ())


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_branch_that_is_one_vector(bias):
    def kill(block):
        nn.init.zeros_(block.branch.matrix.weight)
        nn.init.constant_(block.branch.matrix.bias, bias)

    # A part that adds nothing to a branch that works is no branch: an adapter starts so.
    assert idle(change=kill) == ((), ("0.branch",))


def test_a_row_that_differs_is_no_constant():
    def keep(block):
        block.branch.matrix.weight.data.mul_(1e-3)
        nn.init.constant_(block.branch.matrix.bias, 1.0)

    assert idle(change=keep)[1] == ()
