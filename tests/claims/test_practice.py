"""Claims C63 to C65: where norms sit in real models."""

from __future__ import annotations

import torch
from torch import nn

from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.inspection import placement
from normkit.inspection.blocks import find_blocks


class Block(nn.Module):
    def __init__(self, is_pre: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.is_pre = nn.LayerNorm(16), nn.Linear(16, 16), is_pre

    def forward(self, x):
        return x + self.linear(self.norm(x)) if self.is_pre else self.norm(x + self.linear(x))


def swept(is_pre: bool) -> str:
    model, x = nn.Sequential(nn.ModuleList([Block(is_pre)])[0], nn.Identity()), torch.randn(2, 8, 16)
    stack = nn.Module()
    stack.blocks = nn.ModuleList([Block(is_pre), Block(is_pre)])
    stack.forward = lambda x: stack.blocks[1](stack.blocks[0](x))
    model = stack.eval()
    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)
    blocks = find_blocks(model, called)
    sweeps, _, _ = placement.sweep(model, sites, blocks, lambda: model(x))
    return sweeps[0].placement


def test_c63_pre_and_post_norm_are_told_apart_by_behaviour(measured):
    found = swept(True), swept(False)
    assert found == ("pre", "post")
    measured("the two snippets, replayed on scaled inputs, are found as pre and post")


def test_c64_a_final_norm_stands_before_the_readout(inspections, measured):
    finals = {name: inspection.final_norm for name, inspection in inspections.items()}
    assert finals == {"layernorm": "transformer.ln_f", "rmsnorm": "model.norm"}
    measured("both shipped models have one: `transformer.ln_f`, `model.norm`")


def test_c65_the_shipped_models_are_pre_norm(inspections, measured):
    placements = {block.placement for inspection in inspections.values() for block in inspection.blocks}
    assert placements == {"pre"}
    measured("GPT-2 and Llama, the families of the shipped models: every block pre")
