"""Group F on real tiny models: attention logits, and growth over the depth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from normkit.inspection.rules.dynamics import RULES

LOGITS, GROWTH = RULES


def sharpened(model, factor):
    """Queries and keys of the middle block multiplied so that the logits grow `factor` times."""
    projection = model.transformer.h[1].attn.c_attn
    with torch.no_grad():
        projection.weight[:, : 2 * 64] *= math.sqrt(factor)
    return model


def largest_logit(inspection):
    return inspection.attentions[1].sampled_max


@pytest.mark.parametrize(("logit", "severity"), [(150, "warning"), (3e3, "error"), (3e4, "error")])
def test_large_logits(models, inspected, healthy, finding, status, logit, severity):
    model = models.tiny("GPT2")
    assert status(healthy, "F1") == "clean"
    found = finding(inspected(sharpened(model, logit / largest_logit(healthy))), "F1")
    assert (found.severity, found.sites) == (severity, ("transformer.h.1.attn",))
    assert f"largest sampled logit {logit:.4g}" in found.measured
    assert ("critical" in found.measured) == (logit > 1e4)


def test_logits_that_healthy_models_reach_are_clean(models, inspected, healthy, status):
    model = models.tiny("GPT2")
    # The largest seen in a healthy trained model is 67, in MiniLM's first block.
    assert status(inspected(sharpened(model, 80 / largest_logit(healthy))), "F1") == "clean"


def test_sharp_attention_alone_is_clean(models, inspected, facts_of):
    model = models.tiny("GPT2")
    facts = facts_of(inspected(model, tokens=128), model)
    # As in a head that looks at the token before.
    sharp = tuple(replace(attention, entropy=0.5, entropy_min=0.01) for attention in facts.attentions)
    assert LOGITS.check(replace(facts, attentions=sharp)) is None


def test_a_large_bound_that_no_logit_confirms_is_clean(models, healthy, facts_of):
    facts = facts_of(healthy, models.tiny("GPT2"))
    bounded = tuple(replace(attention, bound=1e5) for attention in facts.attentions)
    assert LOGITS.check(replace(facts, attentions=bounded)) is None


def test_a_collapsed_head_is_told_beside_its_logits(models, inspected, healthy, finding):
    model = models.tiny("GPT2")
    found = finding(inspected(sharpened(model, 3e5 / largest_logit(healthy)), tokens=128), "F1")
    assert "the sharpest head looks at one token only" in found.evidence[0]


def test_a_model_without_attention_is_not_checked(inspected, status):
    model = nn.Sequential(nn.Embedding(99, 8), nn.LayerNorm(8))
    inspection = inspected(_Taking(model))
    assert status(inspection, "F1") == "not checked"
    assert status(inspection, "F2") == "not checked"


class _Taking(nn.Module):
    """A model that takes its tokens by name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids):
        return self.inner(input_ids)


class Stack(nn.Module):
    """Residual blocks whose branches double the stream's variance, or read it through a norm."""

    def __init__(self, norm, layers):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(99, 64)
        self.blocks = nn.ModuleList(nn.Sequential(norm(64), nn.Linear(64, 64, bias=False)) for _ in range(layers))
        self.blocks = nn.ModuleList(_Residual(block) for block in self.blocks)
        for block in self.blocks:
            nn.init.orthogonal_(block.branch[1].weight)
        self.norm = nn.LayerNorm(64)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class _Residual(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


@pytest.mark.parametrize("layers", [4, 12])
def test_variance_that_doubles_at_every_block(inspected, finding, status, layers):
    found = finding(inspected(Stack(nn.Identity, layers)), "F2")
    assert found.severity == "warning"
    assert found.sites == tuple(f"blocks.{index}" for index in range(layers))
    assert float(found.measured.split("grows ")[1].split(" times")[0]) == pytest.approx(2, rel=0.1)
    assert status(inspected(Stack(nn.LayerNorm, layers)), "F2") == "clean"


def test_variance_that_rises_in_a_straight_line_is_clean(inspected, status):
    model = Stack(nn.Identity, 6)
    for index, block in enumerate(model.blocks):
        block.branch[1].weight.data /= math.sqrt(index + 1)
    assert status(inspected(model), "F2") == "clean"


def test_a_stream_that_starts_small_is_clean(inspected, status):
    model = Stack(nn.LayerNorm, 12)
    model.embedding.weight.data *= 0.01
    assert status(inspected(model), "F2") == "clean"


def test_weights_that_grow_with_depth_behind_norms(inspected, finding):
    model = Stack(nn.LayerNorm, 12)
    for index, block in enumerate(model.blocks):
        block.branch[1].weight.data *= 2**index
    found = finding(inspected(model), "F2")
    assert found.sites == tuple(f"blocks.{index}" for index in range(6, 12))


def test_massive_activations_are_a_note(inspected, status):
    model = Stack(nn.LayerNorm, 4)
    model.embedding.weight.data[10, 3] = 1e5
    inspection = inspected(model)
    assert status(inspection, "F2") == "finding"
    found = inspection.findings[0]
    assert (found.severity, found.sites) == ("note", tuple(f"blocks.{index}" for index in range(4)))
