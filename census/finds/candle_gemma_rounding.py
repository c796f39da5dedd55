"""candle: Gemma's norms add 1 in bfloat16 and round the row before the gain; transformers rounds once, at the end.

    NORMKIT_REAL_MODELS=FOLDER python census/finds/candle_gemma_rounding.py

candle is Rust: its norm is written out here, from `candle-transformers/src/models/gemma3.rs:47-62` (`gemma.rs`,
`gemma2.rs` and `recurrent_gemma.rs` have the same lines) at commit 2a13b0f3ff62f7e67013597f2996f764c5735e21. Nothing of
candle is run. The report is docs/wild/reports/candle_gemma_rounding.md.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

import normkit as nk
from patching import versions
from real_models import RealModel


class CandleRmsNorm(nn.Module):
    """gemma3.rs:47-62."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        norm_x = wide.square().sum(-1, keepdim=True) / x.shape[-1]
        return (wide / (norm_x + self.eps).sqrt()).to(x.dtype) * (self.weight + 1.0)


class FixedRmsNorm(CandleRmsNorm):
    """With the fix: 1 is added, and the gain multiplies, in float32."""

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        norm_x = wide.square().sum(-1, keepdim=True) / x.shape[-1]
        return (wide / (norm_x + self.eps).sqrt() * (self.weight.to(wide.dtype) + 1.0)).to(x.dtype)


def in_bfloat16(norm_class):
    """A norm in bfloat16 inside a model that is float32 otherwise."""

    def formula(norm, x):
        own = norm_class(x.shape[-1], eps=norm.eps).bfloat16()
        own.weight = nn.Parameter(norm.weight.detach().bfloat16())
        return own(x.bfloat16()).float()

    return formula


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("torch", "transformers"))
    norms = {"transformers": Gemma3RMSNorm, "candle, written out": CandleRmsNorm, "candle with the fix": FixedRmsNorm}
    for name, norm_class in norms.items():
        print(f"{name}\n  normkit: {nk.identify(norm_class(64), 64).spec}")
    model = RealModel("gemma3", tokens=128)
    right = model.logits()
    print(f"Gemma 3 270M in float32: perplexity {model.perplexity(right):.4f}")
    for name, norm_class in norms.items():
        model.compare(f"its norms in bfloat16 as in {name}", in_bfloat16(norm_class), against=right)
