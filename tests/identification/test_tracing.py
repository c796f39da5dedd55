"""One forward pass, written down."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification.tracing import first_output, trace


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.project = nn.Linear(4, 4)

    def forward(self, x, *, residual=None):
        y = self.project(F.rms_norm(self.norm(x), (4,), eps=1e-3))
        y = F.scaled_dot_product_attention(y, y, y)
        return F.rms_norm(y, (4,)) + (0 if residual is None else residual), y


def test_calls_in_the_order_of_their_start():
    block = Block()
    x = torch.randn(2, 3, 4)
    seen = trace(block, lambda: block(x, residual=x))
    assert [call.path for call in seen.modules] == ["", "norm", "project"]
    root, norm, _ = seen.modules
    assert (root.bare, norm.bare) == (False, True)
    assert (root.tensors, norm.tensors) == (2, 1)
    assert norm.module is block.norm
    assert norm.input_shape == norm.output_shape == (2, 3, 4)
    calls = [(call.parent, call.function, call.ordinal) for call in seen.functions]
    assert calls == [("norm", "layer_norm", 0), ("", "rms_norm", 0), ("", "sdpa", 0), ("", "rms_norm", 1)]
    assert dict(seen.functions[1].arguments) == {"normalized_shape": (4,), "weight": None, "eps": 1e-3}
    assert seen.functions[0].arguments["weight"] is block.norm.weight
    orders = [call.order for call in (*seen.modules, *seen.functions)]
    assert len(set(orders)) == len(orders)
    assert root.order < norm.order < seen.functions[0].order < seen.functions[1].order


def test_the_model_is_left_as_it_was_also_after_an_error():
    block = Block()

    def fail():
        block(torch.randn(2, 3, 4))
        raise RuntimeError("after the call")

    with pytest.raises(RuntimeError, match="after the call"):
        trace(block, fail)
    for module in block.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Fallible(nn.Module):
    def forward(self, _x):
        raise RuntimeError("no")


class Careful(nn.Module):
    def __init__(self):
        super().__init__()
        self.fallible = Fallible()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        try:
            return self.fallible(x)
        except RuntimeError:
            return F.rms_norm(self.norm(x), (4,))


def test_a_call_that_raised_does_not_name_the_calls_after_it():
    model = nn.Sequential(Careful(), nn.Identity())
    seen = trace(model, lambda: model(torch.randn(2, 4)))
    assert [call.path for call in seen.modules] == ["", "0", "0.norm", "1"]
    assert [call.parent for call in seen.functions if call.function == "layer_norm"] == ["0.norm"]


def test_of_several_outputs_a_stage_gives_its_first_and_a_joint_block_the_stream_that_came_first():
    image, text = torch.zeros(2, 16, 8), torch.zeros(2, 5, 8)
    smaller = torch.zeros(2, 4, 16)
    # A stage of Swin V2 returns what leaves it and what came before its last map.
    assert first_output((smaller, image), (image, (4, 4))) is smaller
    # A block of Flux takes the image first and returns the text first.
    assert first_output((text, image), (image, text, None)) is image
    assert first_output((image,), (image, text)) is image
    assert first_output(("logits",), (image,)) is None
