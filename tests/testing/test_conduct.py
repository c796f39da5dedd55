"""Each way to misbehave, whatever the formula, is seen, and named alone."""

from __future__ import annotations

import pytest
import torch

from faulty_norms import Gain, NoEps
from normkit import specs
from normkit.testing import violations


class Right(Gain):
    def forward(self, x):
        return (self.weight.float() * self.rms(x)).to(x.dtype)


class WritesToItsInput(Gain):
    """x.float() is x itself in float32: nano-vllm#170."""

    def forward(self, x):
        wide = x.float()
        y = (self.weight.float() * self.rms(x)).to(x.dtype)
        wide.data.mul_(2)
        return y


class Views(Right):
    def forward(self, x):
        return super().forward(x.view(-1, x.shape[-1])).view(x.shape)


class ReadsMemoryInOrder(Right):
    def forward(self, x):
        return super().forward(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()))


class FirstOfTheBatch(Right):
    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y[:1] * 1.1, y[1:]]) if len(y) > 1 else y


class SharesNaN(Right):
    def forward(self, x):
        return super().forward(x) + 0 * x.sum().to(x.dtype)


class LeaksGradients(torch.autograd.Function):
    @staticmethod
    def forward(_, y):
        return y.clone()

    @staticmethod
    def backward(_, dy):
        return dy + 0 * dy.sum()


class SharesNaNInItsGradient(Right):
    def forward(self, x):
        # The backward of a row sees the sum over all rows.
        return super().forward(LeaksGradients.apply(x))


class NaNAtZero(Right):
    def forward(self, x):
        largest = x.abs().amax(-1, keepdim=True).detach()
        return super().forward(x) * (largest / largest)


class AlwaysFloat32(Gain):
    def forward(self, x):
        return self.weight.float() * self.rms(x)


@pytest.mark.parametrize(
    ("norm", "check", "words"),
    [
        (WritesToItsInput, "input kept", "other numbers"),
        (Views, "layout", "it refuses transposed ones"),
        (ReadsMemoryInOrder, "layout", "other numbers for transposed ones"),
        (FirstOfTheBatch, "batch position", "sample 0 of a batch of 7"),
        (SharesNaN, "row isolation", "of the output"),
        (SharesNaNInItsGradient, "row isolation", "of the gradient"),
        (NaNAtZero, "constant rows", "outputs that are NaN or infinite for a row of 0.0 (float32)"),
        (AlwaysFloat32, "output dtype", "float32"),
    ],
)
def test_misconduct(norm, check, words):
    found = violations(norm(), specs.OLMO2)
    assert [violation.check for violation in found] == [check]
    assert words in found[0].found


def test_a_right_norm_does_none_of_it():
    assert violations(Right(), specs.OLMO2) == ()


def test_a_spec_without_eps_may_give_nan_on_a_zero_row():
    assert violations(NoEps(), specs.OLMO2.replace(eps=0.0)) == ()
