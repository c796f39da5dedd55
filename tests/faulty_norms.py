"""The fault catalogue: real faults of normalization layers, each in a few lines, from the report it is known by.

Every fault has the spec that its author meant, what `identify` must find instead, and the check of
`normkit.testing.assert_conforms` that must name it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normkit import NormSpec, specs

N = 64


class Gain(nn.Module):
    """A norm with a gain; `forward` is the formula of a subclass."""

    def __init__(self, n: int = N, eps: float = 1e-6, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((n,), start))
        self.eps = eps

    def rms(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class GainAndBias(Gain):
    """A norm with gain and bias."""

    def __init__(self, n: int = N, eps: float = 1e-5) -> None:
        super().__init__(n, eps)
        self.bias = nn.Parameter(torch.zeros(n))

    def affine(self, row: Tensor, x: Tensor) -> Tensor:
        return (self.weight.float() * row + self.bias.float()).to(x.dtype)


class LlamaWithEps(Gain):
    def forward(self, x):
        return self.weight * self.rms(x).to(x.dtype)


class EpsOutside(GainAndBias):
    def forward(self, x):
        wide = x.float()
        std = wide.var(-1, keepdim=True, correction=0).sqrt()
        return self.affine((wide - wide.mean(-1, keepdim=True)) / (std + self.eps), x)


class EpsAsClamp(Gain):
    def forward(self, x):
        wide = x.float()
        rms = wide.pow(2).mean(-1, keepdim=True).sqrt()
        return (self.weight.float() * (wide / rms.clamp_min(self.eps))).to(x.dtype)


class NoEps(Gain):
    def forward(self, x):
        wide = x.float()
        return (self.weight.float() * (wide / wide.pow(2).mean(-1, keepdim=True).sqrt())).to(x.dtype)


class UnbiasedVariance(GainAndBias):
    def forward(self, x):
        wide = x.float()
        row = (wide - wide.mean(-1, keepdim=True)) / torch.sqrt(wide.var(-1, keepdim=True) + self.eps)
        return self.affine(row, x)


class WrongPower(GainAndBias):
    def forward(self, x):
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        return self.affine(centred / (centred.pow(2).mean(-1, keepdim=True) + self.eps) ** 2, x)


class RsqrtSlip(Gain):
    def forward(self, x):
        wide = x.float()
        return (self.weight.float() * wide * (wide.pow(2).mean(-1, keepdim=True) + self.eps) ** -1).to(x.dtype)


class EpsOfTheDtype(Gain):
    def forward(self, x):
        wide = x.float()
        eps = torch.finfo(x.dtype).eps
        return (self.weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class EpsThatUnderflows(Gain):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.tensor(self.eps).to(x.dtype)))


class Rescaled(Gain):
    def forward(self, x):
        wide = x.float()
        wide = wide / wide.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        return (self.weight.float() * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class CancellingVariance(GainAndBias):
    def forward(self, x):
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        var = (wide.pow(2).mean(-1, keepdim=True) - mean.pow(2)).clamp_min(0)
        return self.affine((wide - mean) * torch.rsqrt(var + self.eps), x)


class NegativeVariance(GainAndBias):
    def forward(self, x):
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        var = wide.pow(2).mean(-1, keepdim=True) - mean.pow(2)
        return self.affine((wide - mean) * torch.rsqrt(var + self.eps), x)


class OffsetMissed(Gain):
    def forward(self, x):
        return (self.rms(x) * self.weight.float()).to(x.dtype)


class OffsetTwice(Gain):
    def forward(self, x):
        return (self.rms(x) * (1.0 + (1.0 + self.weight.float()))).to(x.dtype)


class OffsetInSixteenBits(Gain):
    def forward(self, x):
        return (self.rms(x) * (1.0 + self.weight).float()).to(x.dtype)


class OverAxes(GainAndBias):
    """A layer norm over other axes than the last."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x):
        wide = x.float()
        centred = wide - wide.mean(self.axes, keepdim=True)
        return self.affine(centred * torch.rsqrt(centred.pow(2).mean(self.axes, keepdim=True) + self.eps), x)


class MultiplyThenCast(Gain):
    def forward(self, x):
        return (self.weight.float() * self.rms(x)).to(x.dtype)


class SixteenBitStatistics(Gain):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class AlwaysFloat32(Gain):
    def forward(self, x):
        return self.weight.float() * self.rms(x).to(x.dtype)


class GainRoundedToo(Gain):
    def forward(self, x):
        return self.weight.to(x.dtype) * self.rms(x).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    id: str
    """Its place in the catalogue."""
    report: str
    """Where it happened."""
    build: Callable[[], nn.Module]
    """Makes the faulty norm, N features wide."""
    meant: NormSpec
    found: Mapping[str, object] | None = field(default_factory=dict)
    """The conventions in which what `identify` decides differs from `meant`; None if no spec describes the fault."""
    verdict: str = "norm"
    """Of `identify`."""
    evidence: str = ""
    """What a line of evidence must say."""
    checks: tuple[str, ...]
    """The violations, in order."""


LATE = specs.OLMO2
LAYER = specs.TORCH_LAYER_NORM
FAULTS = (
    Fault(
        id="A1",
        report="transformers#48762: GLM-5's latent norms with 1e-6 for 1e-5",
        build=LlamaWithEps,
        meant=specs.LLAMA.replace(eps=1e-5),
        found={"eps": 1e-6},
        checks=("eps",),
    ),
    Fault(
        id="A2",
        report="burn#2185: eps added to the standard deviation",
        build=EpsOutside,
        meant=LAYER,
        found={"eps_placement": "outside"},
        checks=("eps", "constant rows"),
    ),
    Fault(
        id="A3",
        report="x-transformers: eps clamps the norm, as in F.normalize",
        build=EpsAsClamp,
        meant=LATE,
        found={"eps_placement": "clamp"},
        checks=("eps", "constant rows"),
    ),
    Fault(
        id="A3 none",
        report="OLMo-core, l2_normalize: no eps",
        build=NoEps,
        meant=LATE,
        found={"eps": 0.0},
        checks=("eps", "constant rows"),
    ),
    Fault(
        id="A4",
        report="annotated-transformer#119: Tensor.var divides by n - 1",
        build=UnbiasedVariance,
        meant=LAYER,
        found={"correction": 1},
        checks=("divisor",),
    ),
    Fault(
        id="A5",
        report="TPlinker#37: ** 2 for ** 0.5",
        build=WrongPower,
        meant=LAYER,
        found=None,
        verdict="not a norm",
        evidence="power -3",
        checks=("formula",),
    ),
    Fault(
        id="A5 rsqrt",
        report="viewset-diffusion#1: the root is missing",
        build=RsqrtSlip,
        meant=LATE,
        found=None,
        verdict="not a norm",
        evidence="power -1",
        checks=("formula",),
    ),
    Fault(
        id="A6",
        report="pytorch#140092: eps=None is the machine epsilon of the input's dtype",
        build=EpsOfTheDtype,
        meant=specs.TORCH_RMS_NORM,
        found={"eps": 2.0**-23},
        checks=("eps",),
    ),
    Fault(
        id="A7",
        report="pytorch#86580: 1e-8 becomes 0 in float16",
        build=lambda: EpsThatUnderflows(eps=1e-8),
        meant=specs.LLAMA.replace(eps=1e-8),
        found={"statistics_dtype": "input", "cast": "none", "round_rstd": True},
        checks=("statistics dtype", "constant rows"),
    ),
    Fault(
        id="A8",
        report="coremltools#2822: rescaled by the largest magnitude, which multiplies eps by its square",
        build=lambda: Rescaled(eps=1e-5),
        meant=LATE.replace(eps=1e-5),
        found=None,
        checks=("eps",),
    ),
    Fault(
        id="A9",
        report="equinox#314: E[x^2] - E[x]^2, clamped at 0",
        build=CancellingVariance,
        meant=LAYER,
        checks=("cancelling variance",),
    ),
    Fault(
        id="A10",
        report="onnxruntime#21935: a negative variance of a constant row, and its root",
        build=lambda: NegativeVariance(eps=1e-12),
        meant=specs.BERT,
        checks=("cancelling variance", "constant rows"),
    ),
    Fault(
        id="B1",
        report="Liger-Kernel#74: Gemma's 1 + weight missed",
        build=OffsetMissed,
        meant=specs.GEMMA,
        found={"weight_offset": 0.0},
        checks=("offset",),
    ),
    Fault(
        id="B2",
        report="mold#1078: the 1 folded into the weight, and added again",
        build=OffsetTwice,
        meant=specs.GEMMA,
        found={"weight_offset": 2.0},
        checks=("offset",),
    ),
    Fault(
        id="B3",
        report="vllm#29810: 15.8125 + 1 rounds in bfloat16",
        build=OffsetInSixteenBits,
        meant=specs.GEMMA,
        found={"offset_dtype": "parameter"},
        checks=("offset dtype",),
    ),
    Fault(
        id="C1",
        report="OpenNMT-tf#6: normalized over the wrong axis",
        build=lambda: OverAxes(1),
        meant=LAYER,
        found={"axes": "all_but_batch_channels_last", "groups": 64},
        evidence="along axis 1",
        checks=("rows",),
    ),
    Fault(
        id="C4",
        report="DeepXi#18: statistics over time and features feel the future",
        build=lambda: OverAxes(1, 2),
        meant=LAYER,
        found={"axes": (-2, -1)},
        checks=("rows",),
    ),
    Fault(
        id="C5",
        report="x-transformers#320: samples feel each other",
        build=lambda: OverAxes(0, 1),
        meant=LAYER,
        found=None,
        verdict="batch",
        evidence="one sample moves the others",
        checks=("rows",),
    ),
    Fault(
        id="E1",
        report="transformers#29402: multiplied, then cast",
        build=MultiplyThenCast,
        meant=specs.LLAMA,
        found={"cast": "late", "output_dtype": "input"},
        checks=("casts", "output dtype"),
    ),
    Fault(
        id="E2",
        report="pytorch#66707: statistics in 16 bits",
        build=SixteenBitStatistics,
        meant=specs.LLAMA,
        found={"statistics_dtype": "input", "cast": "none", "round_rstd": True},
        checks=("statistics dtype", "constant rows"),
    ),
    Fault(
        id="E3",
        report="OLMo-core, nn/layer_norm.py: the weight becomes float32, and so does what leaves",
        build=AlwaysFloat32,
        meant=specs.LLAMA,
        found={"output_dtype": "float32"},
        checks=("output dtype",),
    ),
    Fault(
        id="E4",
        report="T5X, examples/t5/layers.py: the gain is rounded to the input's dtype before it multiplies",
        build=GainRoundedToo,
        meant=specs.LLAMA,
        found={"cast": "input", "output_dtype": "input"},
        checks=("casts", "output dtype"),
    ),
)
