"""Wrong derivatives are seen, each named alone; where there are none, that is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from faulty_norms import Gain, GainAndBias
from normkit import specs
from normkit.testing import violations


class DetachedScale(Gain):
    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps).detach()
        return (self.weight.float() * wide * scale).to(x.dtype)


class NoGraph(Gain):
    def forward(self, x):
        with torch.no_grad():
            return (self.weight.float() * self.rms(x)).to(x.dtype)


class NotByX(Gain):
    def forward(self, x):
        return (self.weight.float() * self.rms(x.detach())).to(x.dtype)


class NotByTheGain(Gain):
    def forward(self, x):
        return (self.weight.detach().float() * self.rms(x)).to(x.dtype)


class Backward(torch.autograd.Function):
    """A right input gradient, and sums over rows as they are spoilt."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, spoilt):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            wide = leaf.float()
            centred = wide - wide.mean(-1, keepdim=True)
            row = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
            y = (weight.detach().float() * row + bias.detach().float()).to(x.dtype)
        ctx.saved, ctx.spoilt = (leaf, y, row.detach(), weight.dtype), spoilt
        return y.detach()

    @staticmethod
    def backward(ctx, dy):
        leaf, y, row, dtype = ctx.saved
        (dx,) = torch.autograd.grad(y, leaf, dy)
        dweight, dbias = (dy.float() * row).flatten(0, -2), dy.flatten(0, -2)
        if ctx.spoilt == "gain summed in 16 bits":
            total = torch.zeros(row.shape[-1], dtype=dtype)
            for part in dweight.to(dtype).split(256):
                total += part.sum(0)
            return dx, total, dbias.float().sum(0).to(dtype), None, None
        if ctx.spoilt == "last row of the bias":
            return dx, dweight.sum(0).to(dtype), dbias[: len(dbias) * 9 // 10].float().sum(0).to(dtype), None, None
        return dx, dweight.sum(0).to(dtype), dbias.float().sum(0).to(dtype), None, None


class Spoilt(GainAndBias):
    def __init__(self, spoilt):
        super().__init__(n=16)
        self.spoilt = spoilt

    def forward(self, x):
        return Backward.apply(x, self.weight, self.bias, self.eps, self.spoilt)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("norm", "spec", "checks", "words"),
    [
        (DetachedScale(), specs.OLMO2, ["input gradient"], "a relative error of"),
        (NoGraph(), specs.OLMO2, ["input gradient"], "none (RuntimeError"),
        (NotByX(), specs.OLMO2, ["input gradient"], "none: the output does not depend on x"),
        (NotByTheGain(), specs.OLMO2, ["gain gradient"], "none: the output does not depend on it"),
        (Spoilt("gain summed in 16 bits"), specs.TORCH_LAYER_NORM, ["gain gradient"], "rows in bfloat16"),
        (Spoilt("last row of the bias"), specs.TORCH_LAYER_NORM, ["bias gradient"], "rows in float32"),
        (Spoilt(""), specs.TORCH_LAYER_NORM, [], ""),
    ],
    ids=lambda value: getattr(value, "spoilt", type(value).__name__) if isinstance(value, nn.Module) else None,
)
def test_wrong_derivatives(norm, spec, checks, words):
    found = violations(norm, spec)
    assert [violation.check for violation in found] == checks
    assert all(words in violation.found for violation in found)


@pytest.mark.slow
def test_the_rows_are_many():
    [seen] = violations(Spoilt("gain summed in 16 bits"), specs.TORCH_LAYER_NORM)
    assert "over 65,520 rows" in seen.found


class SpoiltBackward(torch.autograd.Function):
    """Forward and backward of torch, spoilt by a norm before the input's gradient is taken."""

    @staticmethod
    def forward(context, x, weight, bias, norm):
        norm.last = x
        context.save_for_backward(x, weight, bias)
        context.norm = norm
        return norm.formula(x, weight, bias)

    @staticmethod
    def backward(context, dy):
        x, *parameters = (part.detach().requires_grad_() for part in context.saved_tensors)
        with torch.enable_grad():
            y = context.norm.formula(x, *parameters)
        dx, *others = torch.autograd.grad(y, [x, *parameters], dy)
        return context.norm.spoilt(dx, dy, context.saved_tensors[0]), *others, None


class SpoiltInput(GainAndBias):
    def forward(self, x):
        return SpoiltBackward.apply(x, self.weight, self.bias, self)

    def formula(self, x, weight, bias):
        row = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (weight.float() * row + bias.float()).to(x.dtype)

    def spoilt(self, dx, _dy, _x):
        return dx


class WrongForViews(SpoiltInput):
    def spoilt(self, dx, _dy, x):
        return dx if x.is_contiguous() else dx.flip(-1)


class WrongForExpandedOutputs(SpoiltInput):
    def spoilt(self, dx, dy, _x):
        return 2 * dx if 0 in dy.stride() else dx


class WrongOverManyRows(SpoiltInput):
    def spoilt(self, dx, _dy, x):
        return 2 * dx if len(x.flatten(0, -2)) > 4096 else dx


class WrongUnderALargeMean(SpoiltInput):
    def spoilt(self, dx, _dy, x):
        return torch.where(x.mean(-1, keepdim=True).abs() > 10, 0, dx)


class KeepsOneInputOnly(SpoiltInput):
    def spoilt(self, dx, _dy, x):
        return dx if self.last.data_ptr() == x.data_ptr() else 0 * dx


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("norm", "checks"),
    [
        (SpoiltInput, ()),
        (WrongForViews, ("layout",)),
        (WrongForExpandedOutputs, ("layout",)),
        (WrongOverManyRows, ("input gradient",)),
        (WrongUnderALargeMean, ("input gradient",)),
        (KeepsOneInputOnly, ("input gradient",)),
    ],
)
def test_an_input_gradient_that_is_wrong_somewhere_only(norm, checks):
    found = violations(norm(), specs.TORCH_LAYER_NORM)
    assert tuple(violation.check for violation in found) == checks


class WrongOutputsOverManyRows(SpoiltInput):
    """Its gradients are right."""

    def formula(self, x, weight, bias):
        y = super().formula(x, weight, bias)
        rows = torch.arange(y[..., 0].numel()).reshape(*y.shape[:-1], 1)
        return torch.where((rows >= 4096) & (not torch.is_grad_enabled()), 0, y)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [(), ("input gradient", "gain gradient", "bias gradient")])
def test_outputs_that_are_wrong_from_a_row_on(skip):
    [seen] = violations(WrongOutputsOverManyRows(), specs.TORCH_LAYER_NORM, dtypes=(torch.float32,), skip=skip)
    assert seen.check == "batch position"
    assert seen.found == "12,272 of 16,368 rows wrong in float32, the first of them row 4,096"


@pytest.mark.slow
def test_an_output_that_is_wrong_for_rare_rows_is_no_matter_of_the_batch():
    class WrongForRareRows(Gain):
        def forward(self, x):
            y = (self.weight.float() * self.rms(x)).to(x.dtype)
            rare = (x.float().mean(-1, keepdim=True) - 0.65).abs() < 0.03
            return torch.where(rare, 1.001 * y, y)

    [seen] = violations(WrongForRareRows(), specs.OLMO2, dtypes=(torch.float32,), skip=("input gradient",))
    assert seen.check == "formula"
    assert seen.found.endswith(", alone as well")
