"""Claims C63 to C65, C67 and C68: where norms sit in real models, and which they are."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from helpers import ROOT
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement import placement
from normkit.measurement.layout import find_blocks


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


@pytest.mark.slow
def test_c63_pre_and_post_norm_are_told_apart_by_behaviour(measured):
    found = swept(True), swept(False)
    assert found == ("pre", "post")
    measured("the two snippets, replayed on scaled inputs, are found as pre and post")


@pytest.mark.slow
def test_c64_a_final_norm_stands_before_the_readout(inspections, measured):
    finals = {name: inspection.final_norm for name, inspection in inspections.items()}
    assert finals == {"layernorm": "transformer.ln_f", "rmsnorm": "model.norm"}
    measured("both shipped models have one: `transformer.ln_f`, `model.norm`")


@pytest.mark.slow
def test_c65_the_shipped_models_are_pre_norm(inspections, measured):
    placements = {block.placement for inspection in inspections.values() for block in inspection.blocks}
    assert placements == {"pre"}
    measured("GPT-2 and Llama, the families of the shipped models: every block pre")


DECODERS, OTHERS = {"Decoders"}, {"Encoders", "Encoder-decoders", "Vision", "Sound"}
RECENT = 2024


def families(sections: set[str], since: int, before: int = 9999) -> list[dict[str, str]]:
    """The rows of docs/reference/census.md in these sections with a notice of these years."""
    found, section, header = [], "", []
    for line in (ROOT / "docs" / "reference" / "census.md").read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        cells = re.split(r" ?\| ?", line)[1:-1]
        if cells and cells[0] == "family":
            header = cells
        elif section in sections and cells and not cells[0].startswith("---"):
            found.append(dict(zip(header, cells, strict=True)))
    return [row for row in found if row["notice"] and since <= int(row["notice"]) < before]


def only(formula: str, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The families whose plain norms all are of this formula; what is none comes after a plus."""
    plain = [(row, re.split(r" \+ \d|^\d", row["norms"])[0]) for row in rows]
    return [row for row, norms in plain if norms and all(norm.startswith(formula) for norm in norms.split("; "))]


def test_c67_modern_decoders_are_pre_norm_with_rms_norm(measured):
    words = []
    for sections, title in ((DECODERS, "decoders"), (OTHERS, "other families")):
        rows = families(sections, RECENT)
        rms = only("RMSNorm", rows)
        pre = [row for row in rows if row["placement"] in ("pre", "parallel")]
        both = [row for row in rms if row in pre]
        assert (2 * len(both) > len(rows)) is (sections is DECODERS)
        words.append(f"{len(rms)} of {len(rows)} {title} RMSNorm alone, {len(pre)} pre-norm, {len(both)} both")
    measured("; ".join(words))


def test_c68_layer_norm_was_the_rule_until_2023(measured):
    words = []
    for sections, title in ((DECODERS, "decoders"), (OTHERS, "others")):
        for years, name in (((0, RECENT), "up to 2023"), ((RECENT, 9999), "since")):
            rows = families(sections, *years)
            layer, rms = len(only("LayerNorm", rows)), len(only("RMSNorm", rows))
            assert (layer > rms) is not (sections is DECODERS and name == "since")
            words.append(f"{title} {name}: {layer} of {len(rows)} LayerNorm alone, {rms} RMSNorm alone")
    measured("; ".join(words))
