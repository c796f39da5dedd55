"""candle: Gemma 4's norms multiply by 1 + weight, and the checkpoints of Gemma 4 hold the whole gain.

    NORMKIT_REAL_MODELS=FOLDER python census/finds/candle_gemma4_offset.py

candle is Rust: its norm is written out here, from `candle-transformers/src/models/gemma4/text.rs:27-42` (`vision.rs`
has the same lines) at commit 2a13b0f3ff62f7e67013597f2996f764c5735e21. Nothing of candle is run. The report is
docs/wild/reports/candle_gemma4_offset.md.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

import normkit as nk
from patching import versions
from real_models import RealModel


class CandleRmsNorm(nn.Module):
    """text.rs:27-42; `offset` is 1.0 there and 0.0 with the fix."""

    def __init__(self, dim, eps=1e-6, offset=1.0):
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.ones(dim)), eps, offset

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        norm_x = wide.square().sum(-1, keepdim=True) / x.shape[-1]
        return (wide / (norm_x + self.eps).sqrt()).to(x.dtype) * (self.weight + self.offset)


def stored_as_gemma4(offset):
    """Gemma 3's norm, had its checkpoint the whole gain 1 + weight, as Gemma 4's have."""

    def formula(norm, x):
        stored = 1 + norm.weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (stored + offset)

    return formula


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("torch", "transformers"))
    for name, norm in (
        ("transformers", Gemma4RMSNorm(64)),
        ("candle, written out", CandleRmsNorm(64)),
        ("candle with the fix", CandleRmsNorm(64, offset=0.0)),
    ):
        print(f"{name}\n  normkit: {nk.identify(norm, 64).spec}")
    model = RealModel("gemma3", tokens=128)
    print("Gemma 3 270M, its gains stored as Gemma 4 stores them")
    right = model.compare("as transformers computes Gemma 4", stored_as_gemma4(0.0))
    model.compare("as candle does", stored_as_gemma4(1.0), against=right)
