"""gpt-neox: RMS norms train with eps 1e-8 by default, and are converted to transformers with 1e-6.

    NORMKIT_REAL_MODELS=FOLDER python census/finds/gpt_neox_rms_norm_eps.py

gpt-neox needs CUDA to be imported: its lines are written out here, from commit
ea7aefd8f8e183256992d9fede4d7c71a46d67a5. The report is docs/wild/reports/gpt_neox_rms_norm_eps.md.
"""

from __future__ import annotations

import torch
from torch import nn

import normkit as nk
from patching import versions
from real_models import RealModel

# megatron/neox_arguments/neox_args.py:197; tools/ckpts/convert_neox_to_hf.py:332 where the YAML names no eps.
TRAINED, CONVERTED = 1.0e-8, 1.0e-6


class NeoxRMSNorm(nn.Module):
    """megatron/model/norms.py:62-103, without its bias and its partial rows."""

    def __init__(self, dim, eps=TRAINED):
        super().__init__()
        self.eps, self.scale = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.to(torch.float32)
        return (self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


def with_eps(eps):
    return lambda norm, x: norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("torch", "transformers"))
    for name, eps in (("as trained", TRAINED), ("as converted", CONVERTED)):
        print(f"{name}: normkit: {nk.identify(NeoxRMSNorm(64, eps), 64).spec}")
    for rms in (1.0, 1e-2, 1e-3):
        row = torch.full((1, 64), rms)
        ratio = (NeoxRMSNorm(64, CONVERTED)(row) / NeoxRMSNorm(64)(row))[0, 0].item()
        print(f"  rows of rms {rms:g}: converted / trained = {ratio:.4f}")
    for name in ("smollm2", "qwen05"):
        model = RealModel(name, tokens=128)
        smallest = min(model.smallest_rows().values())
        right = model.logits(with_eps(TRAINED))
        print(f"{name}, had it been trained by gpt-neox: smallest mean square that enters a norm {smallest:.3g}")
        print(f"  eps 1e-8: perplexity {model.perplexity(right):.4f}")
        model.compare("eps 1e-6, as converted", with_eps(CONVERTED), against=right)
