"""burn: RmsNorm rounds the root mean square to the input's dtype before it divides.

    NORMKIT_REAL_MODELS=FOLDER python census/finds/burn_rms_norm.py

burn is Rust: its norm is written out here, from `crates/burn-nn/src/modules/norm/rms.rs:71-76` at commit
2c06be351006851d42fdb6df16b976f4a82d9747. Nothing of burn is run. The report is docs/wild/reports/burn_rms_norm.md.
"""

from __future__ import annotations

import torch
from torch import nn

import normkit as nk
from patching import versions
from real_models import RealModel


class BurnRmsNorm(nn.Module):
    """rms.rs:71-76."""

    def __init__(self, d_model, epsilon=1e-5):
        super().__init__()
        self.gamma, self.epsilon = nn.Parameter(torch.ones(d_model)), epsilon

    def forward(self, x):
        rms = (x.float().square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return (x / rms.to(x.dtype)) * self.gamma


class FixedRmsNorm(BurnRmsNorm):
    """With the fix: divided in float32, then rounded."""

    def forward(self, x):
        rms = (x.float().square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return (x.float() / rms).to(x.dtype) * self.gamma


def in_bfloat16(norm_class):
    """A norm in bfloat16 inside a model that is float32 otherwise."""

    def formula(norm, x):
        own = norm_class(x.shape[-1], norm.variance_epsilon).bfloat16()
        own.gamma = nn.Parameter(norm.weight.detach().bfloat16())
        return own(x.bfloat16()).float()

    return formula


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("torch", "transformers"))
    torch.manual_seed(0)
    x = (torch.rand(512, 1, dtype=torch.float64) * 0.5 + 1.0) * torch.randn(512, 4096, dtype=torch.float64)
    x = x.bfloat16()
    length = x.double().square().mean(-1).sqrt()
    norms = {"burn, written out": BurnRmsNorm, "burn with the fix": FixedRmsNorm}
    for name, norm_class in norms.items():
        passport = nk.identify(norm_class(64), 64)
        print(f"{name}\n  normkit: {passport.spec}")
        for what, why in passport.undecidable.items():
            print(f"  normkit leaves undecided, {what}: {why}")
        with torch.no_grad():
            y = norm_class(4096).bfloat16()(x).double()
        off = (y.square().mean(-1).sqrt() - x.double().square().mean(-1).div(length.square() + 1e-5).sqrt()).abs()
        print(f"  root mean square of a whole row off by at most {off.max():.3%}, in the mean {off.mean():.3%}")
    model = RealModel("smollm2", tokens=128)
    right = model.logits()
    print(f"SmolLM2-135M in float32: perplexity {model.perplexity(right):.4f}")
    for name, norm_class in norms.items():
        model.compare(f"its norms in bfloat16 as in {name}", in_bfloat16(norm_class), against=right)
