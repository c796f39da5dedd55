import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.errors import InputError
from normkit.study import PLACEMENTS, Transformer, TransformerConfig
from normkit.study.transformer import Residual

SMALL = TransformerConfig(vocabulary=11, context=6, width=8, layers=2, heads=2)


class Doubled(nn.Module):
    def forward(self, x):
        return x.flip(-1) + 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_branch_is_placed_as_its_formula_says(placement):
    x = torch.randn(3, 8, dtype=torch.float64)
    residual = Residual(Doubled(), TransformerConfig(width=8, placement=placement, residual_scale=1.5), 1).double()

    def norm(rows):
        return F.layer_norm(rows, (8,))

    f, a = Doubled(), 1.5
    expected = {
        "pre": a * x + f(norm(x)),
        "post": norm(a * x + f(x)),
        "peri": a * x + norm(f(norm(x))),
        "output": a * x + norm(f(x)),
        "none": a * x + f(x),
    }[placement]
    torch.testing.assert_close(residual(x), expected, rtol=1e-12, atol=1e-12)


def test_a_token_sees_no_later_one_and_norms_may_shrink_with_depth():
    config = TransformerConfig(width=8, depth_scaled=True, placement="pre")
    x = torch.randn(3, 8, dtype=torch.float64)
    residual = Residual(nn.Identity(), config, 4).double()
    torch.testing.assert_close(residual(x) - x, F.layer_norm(x, (8,)) / 2, rtol=1e-12, atol=1e-12)
    ids = torch.tensor([[1, 2, 3, 4]])
    changed = torch.tensor([[1, 2, 3, 9]])
    causal, full = Transformer(SMALL), Transformer(TransformerConfig(**{**SMALL.__dict__, "causal": False}))
    assert torch.equal(causal(ids)[:, :3], causal(changed)[:, :3])
    assert not torch.equal(full(ids)[:, :3], full(changed)[:, :3])


def test_models_of_one_seed_share_the_weights_of_one_name_and_shape():
    pre, post = Transformer(SMALL, seed=3), Transformer(TransformerConfig(**{**SMALL.__dict__, "placement": "post"}), 3)
    shared = dict(post.named_parameters())
    matrices = [(path, weight) for path, weight in pre.named_parameters() if path in shared]
    assert len(matrices) >= 30
    assert all(torch.equal(weight, shared[path]) for path, weight in matrices)
    other = dict(Transformer(SMALL, seed=4).named_parameters())
    assert not torch.equal(pre.embedding.weight, other["embedding.weight"])


@pytest.mark.parametrize(
    ("choices", "has"),
    [
        ({"placement": "pre"}, True),
        ({"placement": "post"}, False),
        ({"placement": "post", "final_norm": True}, True),
        ({"placement": "pre", "final_norm": False}, False),
        ({"norm": None}, False),
    ],
)
def test_the_final_norm_is_there_where_it_is_usual_or_asked_for(choices, has):
    model = Transformer(TransformerConfig(width=8, heads=2, layers=1, **choices))
    assert isinstance(model.final_norm, nk.LayerNorm) is has


def test_the_branch_gain_scales_values_outputs_and_the_mlp_only():
    plain, scaled = Transformer(SMALL), Transformer(TransformerConfig(**{**SMALL.__dict__, "branch_gain": 0.5}))
    ratios = {
        path.split(".")[-2]: round((dict(scaled.blocks.named_parameters())[path].norm() / weight.norm()).item(), 6)
        for path, weight in plain.blocks.named_parameters()
        if weight.dim() == 2
    }
    assert ratios == {"query": 1.0, "key": 1.0, "value": 0.5, "out": 0.5, "up": 0.5, "down": 0.5}


@pytest.mark.parametrize(
    ("choices", "words"),
    [({"heads": 3}, "3 heads do not divide"), ({"placement": "after"}, "placement must be one of")],
)
def test_what_cannot_be_built_is_refused(choices, words):
    with pytest.raises(InputError, match=words):
        TransformerConfig(**choices)
