"""The tiny models hide nothing: what a mistake could pass unseen through is not in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from folding_cases import results
from normkit.checkpoint.logits import true_logits
from tiny_models import FIXED_EPS, HEADS, RECIPES, WIDTH, gain_offset, norms, set_eps, tiny

OWN_EPS = {
    "olmo": (None,),
    "distilbert": (1e-12,),
    **dict.fromkeys(("bart", "mbart"), (1e-5,)),
    **dict.fromkeys(("deepseek_v3", "deepseek_v3_full_q"), (0.25, 1e-6)),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), (0.25, 1e-6)),
    **dict.fromkeys(("zamba2", "zamba2_adapters"), (0.25, 1e-5)),
    **dict.fromkeys(("wav2vec2_stable", "hubert_stable", "wavlm_stable"), (0.25, 1e-5)),
}
"""The eps of the norms of a model that was asked for 0.25, where its code has another one."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", RECIPES)
def test_every_gain_bias_and_table_can_be_missed(family: str) -> None:
    model, inputs = tiny(family)
    gained = [module for module in norms(model).values() if getattr(module, "weight", None) is not None]
    assert gained or family == "olmo"
    for module in gained:
        gain = module.weight + gain_offset(module)
        assert (gain == 0).sum() == 1
        assert gain.abs().sort().values.flatten()[1] > 0.4
        assert gain.max() > 0
    assert sum(int((module.weight < 0).sum()) for module in gained) > 2 or family == "olmo"
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().min() > 0
            assert parameter.numel() == 1 or parameter.std() > 0
    for table in (module.weight for module in model.modules() if isinstance(module, nn.Embedding)):
        assert table.mean(-1).abs().mean() > 0.05
    assert all(dropout.p == 0 for dropout in model.modules() if isinstance(dropout, nn.Dropout))
    (logits, *_) = results(model, inputs).values()
    assert logits.isfinite().all()
    assert logits.std() > 0.04


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", RECIPES)
def test_only_the_square_variant_is_square(family: str) -> None:
    plain, square = (dict(tiny(family, square=square)[0].named_parameters()) for square in (False, True))
    gains = {name for name in plain if name.split(".")[-2:][0].endswith(("norm", "Norm"))}
    sizes = {tuple(value.shape) for name, value in plain.items() if value.dim() == 2 and name not in gains}
    # What reads a residual stream and writes into it may have no other shape; that of images has 24 features,
    # a merger joins four of its rows, Zamba2 joins the stream and the embedding, WavLM's gate reads one head.
    allowed = {WIDTH, 24, 96, {"zamba2": 2 * WIDTH, "wavlm": WIDTH // HEADS}.get(family.split("_")[0], WIDTH)}
    assert {shape[0] for shape in sizes if shape[0] == shape[1]} <= allowed
    squares = [name for name, value in square.items() if value.dim() == 2 and value.shape[0] == value.shape[1]]
    assert len(squares) > sum(value.shape == (WIDTH, WIDTH) for value in plain.values())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", RECIPES)
def test_the_head_shares_the_table_or_not(family: str) -> None:
    for tied in RECIPES[family].ties:
        model, _ = tiny(family, tied=tied)
        shares = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert shares == tied
    if not RECIPES[family].ties:
        with pytest.raises(ValueError, match="cannot have tied=True"):
            tiny(family, tied=True)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", RECIPES)
def test_eps_is_that_of_every_norm(family: str) -> None:
    found = set()
    for module in norms(tiny(family, eps=0.25)[0]).values():
        found |= {getattr(module, "eps", getattr(module, "variance_epsilon", None))}
    assert found == set(OWN_EPS.get(family, (0.25,)))
    assert set(FIXED_EPS) <= set(RECIPES)


def test_eps_seed_dtype_and_further_options_reach_the_model() -> None:
    model, inputs = tiny("opt", eps=10.0)
    other, _ = tiny("opt")
    assert not torch.equal(true_logits(other, **inputs), true_logits(model, **inputs))
    # A family that forgets eps is told it again.
    set_eps(other, 10.0)
    assert torch.equal(true_logits(other, **inputs), true_logits(model, **inputs))
    wide, inputs = tiny("llama", seed=3)
    narrow, others = tiny("llama", seed=3, dtype=torch.bfloat16)
    assert torch.equal(inputs["input_ids"], others["input_ids"])
    assert torch.equal(wide.model.norm.weight.bfloat16(), narrow.model.norm.weight)
    other, _ = tiny("llama", seed=4, attention_dropout=0.25)
    assert not torch.equal(wide.model.norm.weight, other.model.norm.weight)
    assert other.config.attention_dropout == 0.25
