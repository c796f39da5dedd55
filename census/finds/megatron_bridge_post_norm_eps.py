"""Megatron-Bridge: the norms after Gemma's attention and MLP have eps 1e-5 instead of the configuration's 1e-6.

    NORMKIT_REAL_MODELS=FOLDER python census/finds/megatron_bridge_post_norm_eps.py

Megatron-Bridge needs GPUs: nothing of it is run. `src/megatron/bridge/models/common/te_layers.py:47` at commit
067f987df03b8355b03192d88d70f1709fedf51a makes the norm without eps, whose default is 1e-5. The report is
docs/wild/reports/megatron_bridge_post_norm_eps.md.
"""

from __future__ import annotations

import torch

import normkit as nk
from patching import versions
from real_models import RealModel


def with_eps(eps):
    return lambda norm, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + norm.weight)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("torch", "transformers"))
    model = RealModel("gemma3", tokens=128)
    norm = next(norm for path, norm in model.norms.items() if "post_attention" in path)
    print("normkit, transformers' norm after the attention:", nk.identify(norm, norm.weight.shape[0]).spec)
    smallest = model.smallest_rows("post_")
    right = model.logits()
    path = min(smallest, key=smallest.get)
    print(f"Gemma 3 270M, {len(smallest)} norms after a sublayer")
    print(f"  smallest mean square that enters one: {smallest[path]:.3g} ({path})")
    print(f"  eps 1e-6: perplexity {model.perplexity(right):.4f}")
    model.compare("eps 1e-5 in the norms after a sublayer", with_eps(1e-5), only="post_", against=right)
    model.compare("eps 1e-6 written out (the fix)", with_eps(1e-6), only="post_", against=right)
