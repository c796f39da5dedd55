"""The studies of papers from 2023 to 2026: each measure against its formula, and each verdict turned."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from normkit.errors import InputError
from normkit.study.arm_context import ArmContext
from normkit.study.catalogue import load, settings_of
from normkit.study.experiments import (
    data_size,
    entropy,
    gradient_rise,
    late_blocks,
    massive,
    placement,
    removal,
    selectable_keys,
)
from normkit.study.model_parts import initialise
from normkit.study.result import Arm
from normkit.study.transformer import Transformer, TransformerConfig
from tiny_study import decided_claim

SMALL = TransformerConfig(layers=4, width=16, heads=2, context=8)


def context(name, **changed):
    return ArmContext(settings={**settings_of(load(name), "quick"), "layers": 4, "width": 16, **changed}, seed=0)


@pytest.mark.slow
def test_mix_ln_is_post_ln_in_its_first_quarter_and_a_block_of_zeros_costs_nothing():
    model = late_blocks.build(context("late-blocks"), "Mix-LN")
    assert [block.attention.placement for block in model.blocks] == ["post", "pre", "pre", "pre"]
    text = bytes(range(256)) * 40
    last = model.blocks[3]
    with torch.no_grad():
        for linear in (last.attention.branch.out, last.mlp.branch.down):
            linear.weight.zero_()
            linear.bias.zero_()
    whole = late_blocks.held_out_loss(model, text, window=32)
    assert late_blocks.removed_loss(model, 3, text) == whole != late_blocks.removed_loss(model, 0, text)
    stream, angles = late_blocks.through_blocks(model, torch.arange(8)[None])
    # The angle is of the last block's identity: float64 of float32 numbers, arccos near 1 has the root of the rounding.
    assert (stream[3], angles[3]) == (stream[2], pytest.approx(0.0, abs=1e-7))
    # Post-LN: unit rows, up to eps.
    assert stream[0] == pytest.approx(1.0, abs=1e-3)
    assert angles[0] > 0.01


def test_hybrid_norm_normalizes_values_head_by_head_and_has_no_norm_before_attention():
    model = placement.build(context("placement", heads=2), "hybrid")
    attention = model.blocks[0].attention
    values = attention.branch.value(torch.randn(3, 5, 16))
    assert torch.allclose(values.unflatten(-1, (4, 4)).square().mean(-1), torch.ones(()), atol=1e-4)
    assert isinstance(attention.norm, nn.Identity)
    assert model.blocks[0].mlp.placement == "post"


def test_a_removed_norm_is_affine_and_norms_go_in_turn():
    norm = removal.RemovableNorm(8)
    x = torch.randn(64, 8)
    assert torch.equal(norm(x), nn.functional.layer_norm(x, (8,)))
    # The running average begins at 1 and moves by a tenth.
    assert norm.scale.item() == pytest.approx(0.9 + 0.1 * x.std(-1, correction=0).mean().item(), rel=1e-5)
    removal.remove_in_turn(norm, 1.0)
    y, z = torch.randn(2, 4, 8)
    assert torch.allclose(norm(y) + norm(z), norm(y + z) + norm(torch.zeros(4, 8)), atol=1e-5)
    model = Transformer(TransformerConfig(layers=2, width=16, heads=2, context=8, norm=removal.RemovableNorm))
    removal.remove_in_turn(model, 0.4)
    norms = [module for module in model.modules() if isinstance(module, removal.RemovableNorm)]
    assert [bool(norm.is_removed) for norm in norms] == [True, True, False, False, False]


def test_dynamic_tanh_is_its_formula_and_counts_what_is_saturated():
    layer = data_size.DynamicTanh(4)
    x = torch.tensor([[0.0, 1.0, -2.0, 40.0]])
    assert torch.equal(layer(x), torch.tanh(0.5 * x))
    assert layer.saturated.item() == 0.25


def test_the_net_of_gradient_rise_ignores_the_scale_of_its_matrices_and_decay_is_corrected():
    net, x = gradient_rise.NormalizedNet(8, 0), torch.randn(4, 8)
    y = net(x)
    y.square().sum().backward()
    radial = (net.first * net.first.grad).sum() / (net.first.norm() * net.first.grad.norm())
    assert abs(radial.item()) < 1e-5
    with torch.no_grad():
        net.first.mul_(3.0)
    assert torch.allclose(net(x), y, atol=1e-5)
    assert gradient_rise.blocks([float(value) for value in range(80)])[:2] == [0.5, 2.5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "last"), [("falling rate", 10 * math.sqrt(2)), ("falling rate, corrected decay", math.sqrt(2))]
)
def test_the_corrected_decay_keeps_the_steady_state_where_it_was(arm, last):
    # The rate ends at 0.2 * (0.01 + 0.99 * (1 + cos pi) / 2) = 0.002; sqrt(2 * 0.2 / 0.002) = 10 sqrt(2).
    measured = load("gradient-rise").measure(context("gradient-rise", width=4, steps=40), Arm(name=arm))
    assert measured["steady"][0] == pytest.approx(math.sqrt(2), rel=0.01)
    assert measured["steady"][-1] == pytest.approx(last, rel=0.01)


@pytest.mark.slow
def test_a_reparametrized_matrix_has_its_gain_as_spectral_norm_and_no_row_has_less_entropy_than_the_bound():
    model = Transformer(SMALL)
    entropy.reparametrize(model)
    layer = model.blocks[0].mlp.branch.up
    with torch.no_grad():
        layer.parametrizations.weight[1].gamma.fill_(2.5)
        for _ in range(20):
            model(torch.zeros(1, 8, dtype=torch.long))
    assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(2.5, rel=0.02)
    plain = Transformer(SMALL)
    with torch.no_grad():
        for block in plain.blocks:
            block.attention.branch.query.weight.mul_(3.0)
    share, slack = entropy.lowest_entropy(plain, torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0)))
    assert 0 < share < 1
    assert 0 < slack < 1
    with torch.no_grad():
        next(plain.parameters()).fill_(math.nan)
    assert entropy.lowest_entropy(plain, torch.zeros(2, 8, dtype=torch.long)) == (None, None)


class Planted(nn.Module):
    """Three layers, the second of which writes 5,000 into channel 3 of the first token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(3))
        self.layers[1] = Writer()
        self.head = nn.Linear(8, 64)
        initialise(self, 0)

    def get_decoder(self):
        return self

    def forward(self, ids, **_outputs):
        states = [self.embedding(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        weights = torch.eye(ids.shape[1]).expand(1, 2, -1, -1)
        logits = self.head(states[-1])
        return SimpleNamespace(hidden_states=[*states, states[-1]], attentions=[weights] * 3, logits=logits)


class Writer(nn.Module):
    def forward(self, x):
        x = x.clone()
        x[0, 0, 3] = 5000.0
        return x


def test_a_planted_massive_activation_is_found_where_it_is_born():
    model = Planted()
    window = torch.arange(17)[None]
    found = massive.measured(model, window, [window + 5, window + 9])
    assert (found["count"], found["first"], found["spread"], found["sink"]) == (1, 1.0, 0.0, 0.0)
    assert found["mean"] == 0.0
    assert abs(found["zero"]) > 1.0
    assert abs(found["beside"]) < 0.5
    assert found["ratios"][0] < 1000 < found["ratios"][1] == found["ratio"]


@pytest.mark.parametrize(
    ("name", "place", "measured", "verdict"),
    [
        ("massive", 0, {"ratio": 5e3, "count": 3, "first": 1.0}, "reproduced"),
        ("massive", 0, {"ratio": 5e2, "count": 3, "first": 1.0}, "not testable here"),
        ("massive", 0, {"ratio": 5e3, "count": 30, "first": 1.0}, "not reproduced"),
    ],
)
def test_a_verdict_of_one_model_follows_from_its_numbers(name, place, measured, verdict):
    assert decided_claim(load(name).claims[place], {0: {massive.ARM: measured}}).verdict == verdict


def test_a_model_is_one_that_ships_or_a_folder():
    assert massive.folder_of("rmsnorm").name == "rmsnorm"
    with pytest.raises(InputError, match=r"^expected a folder with a trained model, got 'nope': --set model=PATH$"):
        massive.folder_of("nope")


def losses(**held_out):
    return {0: {name.replace("_", " "): {"held_out": value, "cut": value + 1} for name, value in held_out.items()}}


@pytest.mark.parametrize(
    ("removed", "never", "verdict"),
    [(2.01, 5.0, "reproduced"), (2.5, 5.0, "not reproduced"), (2.01, 2.0, "not testable here")],
)
def test_removal_is_judged_against_what_a_norm_gains(removed, never, verdict):
    measured = losses(norms_kept=2.0, norms_removed=removed, never_a_norm=never)
    assert decided_claim(load("removal").claims[0], measured).verdict == verdict


def test_majorities_are_counted_and_keys_inside_the_hull_are_hidden():
    ids, majority = next(selectable_keys.majority_batches({"classes": 3, "batch": 64, "window": 7}, 0))
    assert [int(row.mode().values) for row in ids[:8]] == majority[:8].tolist()
    model = Transformer(
        TransformerConfig(vocabulary=5, context=5, width=2, layers=1, heads=1, norm=None, final_norm=False)
    )
    with torch.no_grad():
        model.position.weight.zero_()
        model.embedding.weight.copy_(torch.tensor([[1.0, 1], [1, -1], [-1, -1], [-1, 1], [0, 0]]))
        model.blocks[0].attention.branch.query.weight.zero_()
        model.blocks[0].attention.branch.query.bias.zero_()
    # Four corners of a square and its middle; a query of zero attends to all alike.
    assert selectable_keys.of_attention(model, torch.arange(5)[None]) == (pytest.approx(1.0), pytest.approx(0.2))
