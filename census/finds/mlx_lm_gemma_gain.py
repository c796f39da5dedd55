"""mlx-lm: Gemma's 1 + weight is added in the weight's dtype, so a bfloat16 gain loses its last digits.

    NORMKIT_REAL_MODELS=FOLDER python census/finds/mlx_lm_gemma_gain.py

The report is docs/wild/reports/mlx_lm_gemma_gain.md.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models import gemma3_text
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

import normkit as nk
from patching import fixed, versions
from real_models import RealModel

DTYPES = {torch.bfloat16: mx.bfloat16, torch.float16: mx.float16, torch.float32: mx.float32}


def called(norm):
    """A norm of MLX as a function of tensors of torch."""

    def call(x, weight):
        dtype = DTYPES.get(x.dtype, mx.float32)
        norm.weight = mx.array(weight.detach().float().numpy()).astype(DTYPES.get(weight.dtype, mx.float32))
        y = norm(mx.array(x.float().numpy()).astype(dtype))
        return torch.from_numpy(np.array(y.astype(mx.float32))).to(x.dtype)

    return call


def show(module):
    norm = module.RMSNorm(64, eps=1e-6)
    print("  normkit:", nk.identify(called(norm), 64, weight=torch.zeros(64)).spec)
    norm.weight = mx.full((64,), 2**-8, dtype=mx.bfloat16)
    y = norm(16 * mx.ones((1, 64), dtype=mx.float32))
    print(f"  a row of equal numbers, stored gain 2^-8: {y[0, 0].item():.7f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("mlx", "mlx-lm", "torch", "transformers"))
    print("transformers\n  normkit:", nk.identify(Gemma3RMSNorm(64), 64).spec)
    print("as installed")
    show(gemma3_text)
    print("with the fix")
    show(fixed("mlx_lm_gemma_gain", gemma3_text))
    model = RealModel("gemma3", tokens=128)
    gains = {path: 1 + norm.weight.detach() for path, norm in model.norms.items()}
    off = torch.cat([(gain.bfloat16().float() / gain - 1).abs()[gain != 0] for gain in gains.values()])
    print(f"Gemma 3 270M: {len(gains)} norms, {len(off)} gains that are not 0, stored in bfloat16")
    print(f"  changed by the sum in bfloat16: {(off > 0).double().mean():.1%}, by at most {off.max():.2e}")
    right = model.logits()
    print(f"  gains added in float32: perplexity {model.perplexity(right):.4f}")

    def rounded(norm, x):
        gain = (1 + norm.weight).bfloat16().float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * gain

    model.compare("gains added in bfloat16, all else in float32", rounded, against=right)
