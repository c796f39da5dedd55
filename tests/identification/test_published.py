"""Norms by their published formula, recognised as what their source says they are.

Of libraries that are not installed or need what a CPU does not have: Megatron-LM, OLMo-core, T5X, keras, diffusers,
TransformerLens, the Annotated Transformer and flash-linear-attention (its kernels are written in Triton).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import NormSpec, identify, specs
from recognition import assert_recognised


class Weighted(nn.Module):
    """Holds a weight, and a bias if wanted."""

    def __init__(self, n, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n) + 0.5)
        self.bias = nn.Parameter(torch.rand(n) + 0.5) if bias else None


class MegatronL2Norm(nn.Module):
    """Megatron-LM, `core/transformer/torch_norm.py`: an RMSNorm without a weight, by the name of L2Norm."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class OlmoCoreL2(nn.Module):
    """OLMo-core, `nn/functional.l2_normalize`: no eps, so a row of zeros gives NaN."""

    def forward(self, x):
        return x / torch.linalg.vector_norm(x, ord=2, dim=-1, keepdim=True, dtype=torch.float32).type_as(x)


class LensLayerNorm(Weighted):
    """TransformerLens, `components/layer_norm.py`."""

    def forward(self, x):
        dtype = x.dtype
        x = x.float() if dtype in (torch.float16, torch.bfloat16) else x
        x = x - x.mean(-1, keepdim=True)
        scale = (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return (x / scale * self.weight + self.bias).to(dtype)


class OlmoCoreRMSNorm(Weighted):
    """OLMo-core, `nn/layer_norm.py`, with the weight cast to the row: the row is rounded, the output float32."""

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight.type_as(wide) * wide.to(x.dtype)


class T5XLayerNorm(Weighted):
    """T5X, `examples/t5/layers.LayerNorm`: row and scale are rounded to the input's dtype, and multiplied there."""

    def forward(self, x):
        wide = x.float()
        row = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return row * self.weight.to(x.dtype)


class KerasLayerNorm(Weighted):
    """keras on torch, of its default dtype: the input becomes float32, and stays so."""

    def forward(self, x):
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float(), 1e-3)


class DiffusersRMSNorm(Weighted):
    """diffusers, `models/normalization.RMSNorm(bias=True)`."""

    def forward(self, x):
        row = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            row = row.to(self.weight.dtype)
        return row * self.weight + self.bias


class LensRMSNormPre(nn.Module):
    """TransformerLens, `components/rms_norm_pre.py`."""

    def forward(self, x):
        dtype = x.dtype
        x = x.float() if dtype in (torch.float16, torch.bfloat16) else x
        return (x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)


class AnnotatedLayerNorm(Weighted):
    """The Annotated Transformer: `Tensor.std` divides by n - 1, and eps is outside the root."""

    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.weight * (x - mean) / (std + 1e-6) + self.bias


class FlaL2Norm(nn.Module):
    """flash-linear-attention, `modules/norm/l2norm.py`: eps inside the root, in float32, one rounding."""

    def forward(self, x):
        wide = x.float()
        return (wide * (1 / torch.sqrt((wide * wide).sum(-1, keepdim=True) + 1e-6))).to(x.dtype)


class FlaGroupNorm(Weighted):
    """flash-linear-attention, `modules/norm/layernorm.py`, `group_norm_ref(upcast=True)`."""

    def forward(self, x):
        rows = x.float().unflatten(-1, (4, -1))
        rows = rows - rows.mean(-1, keepdim=True)
        rows = rows * (1 / torch.sqrt(rows.square().mean(-1, keepdim=True) + 1e-5))
        y = rows.flatten(-2) * self.weight.float()
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


class FlaRMSNormGated(Weighted):
    """flash-linear-attention, `modules/norm/layernorm_gated.py`, `rms_norm_ref`."""

    def __init__(self, n, norm_before_gate=False):
        super().__init__(n)
        self.norm_before_gate = norm_before_gate

    def forward(self, x, z):
        dtype, x, gate = x.dtype, x.float(), F.silu(z.float())
        x = x if self.norm_before_gate else x * gate
        y = x * (1 / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)) * self.weight.float()
        return (y * gate if self.norm_before_gate else y).to(dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("norm", "spec", "undecided"),
    [
        (MegatronL2Norm(), specs.NANOCHAT, ()),
        (OlmoCoreL2(), specs.L2_NORM.replace(eps=0.0, eps_placement="inside"), ("eps", "casts")),
        (LensLayerNorm(64, bias=True), NormSpec(), ()),
        (LensRMSNormPre(), specs.NANOCHAT.replace(eps=1e-5), ()),
        (OlmoCoreRMSNorm(64), specs.LLAMA.replace(eps=1e-5, output_dtype="float32"), ()),
        (T5XLayerNorm(64), specs.OLMO2.replace(cast="input"), ()),
        (KerasLayerNorm(64, bias=True), NormSpec(eps=1e-3, output_dtype="float32"), ()),
        (DiffusersRMSNorm(64, bias=True), specs.T5.replace(eps=1e-5, has_bias=True), ()),
        (
            AnnotatedLayerNorm(64, bias=True),
            specs.ANNOTATED_TRANSFORMER.replace(output_dtype="promote"),
            ("casts",),
        ),
        (FlaL2Norm(), NormSpec(**{**specs.NANOCHAT.to_json(), "axes": (-1,), "reduction": "sum"}), ()),
        (FlaGroupNorm(64), NormSpec(groups=4, has_bias=False), ()),
        (FlaGroupNorm(64, bias=True), NormSpec(groups=4), ()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_by_their_published_formula(norm, spec, undecided):
    assert_recognised(norm, (2, 3, 64), spec, undecided)


@pytest.mark.parametrize(("norm_before_gate", "placement"), [(True, "after"), (False, "before")])
def test_a_gated_norm_by_its_published_formula(norm_before_gate, placement):
    passport = identify(FlaRMSNormGated(64, norm_before_gate), (2, 3, 64))
    assert (passport.verdict, passport.spec) == ("gated", None)
    gate = passport.readings["gate"].value
    assert (gate["argument"], gate["placement"], gate["activation"]) == ("z", placement, "silu")
    assert NormSpec.from_json(gate["spec"]) == specs.OLMO2.replace(eps=1e-5)
