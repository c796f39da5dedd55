"""Claims C48 to C51: dot products, token lengths and attention."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import below
from normkit import NormSpec, geometry

N, D = 32, 8
PLAIN = NormSpec(eps=0.0, has_weight=False, has_bias=False)


def projections():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, D, N, generator=generator, dtype=torch.float64) / math.sqrt(N)


def test_c48_lengths_bound_dot_products(measured):
    query, key = torch.randn(2, 40, D, dtype=torch.float64)
    logits = query @ key.T / math.sqrt(D)
    assert (logits.abs() <= geometry.logit_bound(query, key).max() * (1 + 1e-15)).all()
    same = torch.randn(1, D, dtype=torch.float64)
    attained = below(geometry.logit_bound(same, same) - same.square().sum() / math.sqrt(D), 1e-14)
    measured(f"no logit passes |q| |k| / sqrt(d); attained where q and k are parallel, {attained}")


@pytest.mark.slow
def test_c49_token_lengths_come_closer_together(inspections, measured):
    words = []
    for name, inspection in inspections.items():
        shapes = [site.geometry for site in inspection.sites]
        widest = max(shapes, key=lambda shape: shape.spread_in)
        words.append(f"{name} {widest.spread_in:.1f} before, {widest.spread_out:.2f} after")
        assert all(shape.spread_out < 3 for shape in shapes)
    measured("95 % over 5 % quantile of row lengths at the widest norm: " + "; ".join(words))


def test_c50_attention_ignores_the_scale_of_what_enters_the_norm(measured):
    x = torch.randn(24, N, dtype=torch.float64)
    scales = torch.tensor([0.1, 1.0, 10.0, 100.0], dtype=torch.float64)
    bare = geometry.entropy_over_scale(x, *projections(), scales).mean(-1)
    normed = geometry.entropy_over_scale(x, *projections(), scales, PLAIN).mean(-1)
    same = below(normed - normed[0], 1e-12)
    assert bare[0] - bare[-1] > 2
    measured(f"input x 0.1 to x 100: mean entropy {bare[0]:.2f} to {bare[-1]:.2f} nats without a norm; {same} with one")


def test_c51_the_weights_can_still_make_scores_explode(measured):
    x = geometry.to_sphere(geometry.centre(torch.randn(24, N, dtype=torch.float64)))
    query_weight, key_weight = projections()
    logits = [(x @ (c * query_weight).T) @ (x @ (c * key_weight).T).T / math.sqrt(D) for c in (1, 100)]
    factor = (logits[1].abs().max() / logits[0].abs().max()).item()
    entropies = [geometry.attention_entropy(values).mean().item() for values in logits]
    measured(
        f"W_Q and W_K x 100: logits x {factor:.0f}, mean entropy {entropies[0]:.2f} to {entropies[1]:.2f} nats, "
        "behind a norm"
    )
