"""mlx-lm: norms of MiniCPM3 and DeepSeek-V3.2 have MLX's default eps, 1e-5, instead of the models' 1e-6.

    python census/finds/mlx_lm_latent_eps.py

The report is docs/wild/reports/mlx_lm_latent_eps.md.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models import deepseek_v32, minicpm3
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Config, DeepseekV32Indexer

import normkit as nk
from patching import fixed, versions

LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4}
MINICPM3 = {
    "model_type": "minicpm3",
    "hidden_size": 64,
    "dim_model_base": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}
MINICPM3 |= {
    "num_attention_heads": 4,
    "vocab_size": 8,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "max_position_embeddings": 64,
}
MINICPM3 |= {
    "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "original_max_position_embeddings": 64}
}
EPS = {"rms_norm_eps": 1e-6}


def of_rows(norm, n):
    """The formula that a norm of MLX computes, read from rows of many sizes."""
    torch.manual_seed(0)
    x = torch.randn(256, n) * torch.logspace(-4, 1, 256)[:, None]
    return nk.identify_rows(x, np.array(norm(mx.array(x.numpy()))), np.ones(n)).spec


def show(minicpm3, deepseek_v32):
    attention = minicpm3.Attention(minicpm3.ModelArgs(**MINICPM3, **LATENT, **EPS))
    for name, n in (("q_a_layernorm", 32), ("kv_a_layernorm", 16)):
        print(f"  normkit, MiniCPM3, {name}: {of_rows(getattr(attention, name), n)}")
    indexer = deepseek_v32.Indexer(deepseek_v32.ModelArgs(**EPS))
    print(f"  normkit, DeepSeek-V3.2, k_norm: {of_rows(indexer.k_norm, 128)}")


def with_latent_eps(model, tokens, eps):
    """Logits of MiniCPM3, and the smallest mean square that enters its latent norms."""
    entered = []
    for block in model.model.layers:
        for norm in (block.self_attn.q_a_layernorm, block.self_attn.kv_a_layernorm):
            norm.variance_epsilon = eps
            norm.register_forward_pre_hook(lambda _, x: entered.append(x[0].square().mean(-1).min().item()))
    with torch.no_grad():
        return model(tokens).logits, min(entered)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("mlx", "mlx-lm", "torch", "transformers"))
    torch.manual_seed(0)
    reference = MiniCPM3ForCausalLM(MiniCPM3Config(num_hidden_layers=2, vocab_size=1024)).eval()
    attention = reference.model.layers[0].self_attn
    print("transformers")
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        norm = getattr(attention, name)
        print(f"  normkit, MiniCPM3, {name}: {nk.identify(norm, norm.weight.shape[0]).spec}")
    with torch.device("meta"):
        indexer = DeepseekV32Indexer(DeepseekV32Config(), 0)
    print(f"  normkit, DeepSeek-V3.2, k_norm: {nk.identify(indexer.k_norm.to_empty(device='cpu'), 128).spec}")
    print("as installed")
    show(minicpm3, deepseek_v32)
    print("with the fix")
    show(fixed("mlx_lm_latent_eps", minicpm3), fixed("mlx_lm_latent_eps", deepseek_v32))
    tokens = torch.randint(1024, (1, 32))
    (right, size), (wrong, _) = (with_latent_eps(reference, tokens, eps) for eps in (1e-6, 1e-5))
    print("MiniCPM3-4B's widths, two blocks, untrained, in transformers")
    print(f"  smallest mean square that enters a latent norm: {size:.3g}")
    print(f"  largest logit {right.abs().max():.4f}, off by at most {(wrong - right).abs().max():.1e} with eps 1e-5")
    y = [norm(mx.full((1, 16), 0.003)).tolist()[0][0] for norm in (nn.RMSNorm(16), nn.RMSNorm(16, eps=1e-6))]
    print(f"  a latent of root mean square 0.003 would come out at {y[0] / y[1]:.4f} of its length")
