"""Each way to misbehave, whatever the formula, is seen, and named alone."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from faulty_norms import Gain, NoEps
from normkit import specs
from normkit.testing import conduct, violations
from normkit.testing.norm_under_test import Subject


class Right(Gain):
    def forward(self, x):
        return (self.weight.float() * self.rms(x)).to(x.dtype)


class Changed(Right):
    """A right norm whose call is change(norm, x), norm(x) being the right output."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(super().forward, x)


def in_memory_order(x):
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride())


def scaled_start(y, factor):
    return torch.cat([y[:1] * factor, y[1:]])


def last_bits(y):
    """As sums in an order that changes from call to call make them."""
    return y * (1 + torch.finfo(y.dtype).eps * (torch.rand(y.shape) < 0.5))


def nan_at_zero(norm, x):
    largest = x.abs().amax(-1, keepdim=True).detach()
    return norm(x) * (largest / largest)


class WritesToItsInput(Gain):
    """x.float() is x itself in float32: nano-vllm#170."""

    def forward(self, x):
        wide = x.float()
        y = (self.weight.float() * self.rms(x)).to(x.dtype)
        wide.data.mul_(2)
        return y


class LeaksGradients(torch.autograd.Function):
    @staticmethod
    def forward(_, y):
        return y.clone()

    @staticmethod
    def backward(_, dy):
        return dy + 0 * dy.sum()


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("norm", "check", "words"),
    [
        (WritesToItsInput, "input kept", "other numbers"),
        (lambda norm, x: norm(x.view(-1, x.shape[-1])).view(x.shape), "layout", "it refuses transposed inputs"),
        (lambda norm, x: norm(in_memory_order(x)), "layout", "other numbers for transposed inputs"),
        (
            lambda norm, x: scaled_start(norm(x), 1.1 if len(x) > 1 else 1.0),
            "batch position",
            "sample 0 of a batch of 7",
        ),
        (lambda norm, x: norm(x) + (0 * x.double().sum()).to(x.dtype), "row isolation", "of the output"),
        # The backward of a row sees the sum over all rows.
        (lambda norm, x: norm(LeaksGradients.apply(x)), "row isolation", "of the gradient"),
        (nan_at_zero, "constant rows", "outputs that are NaN or infinite for a row of 0.0 (float32)"),
        (lambda norm, x: norm(x.float()), "output dtype", "float32"),
        (lambda norm, x: norm(x), None, ""),
    ],
)
def test_misconduct(norm, check, words):
    found = violations(norm() if isinstance(norm, type) else Changed(norm), specs.OLMO2)
    assert [violation.check for violation in found] == ([] if check is None else [check])
    assert all(words in violation.found for violation in found)


@pytest.mark.slow
def test_a_spec_without_eps_may_give_nan_on_a_zero_row():
    assert violations(NoEps(), specs.OLMO2.replace(eps=0.0)) == ()


class WritesToItsLastOutput(Right):
    def forward(self, x):
        y = super().forward(x)
        if torch.is_grad_enabled():
            return y
        if getattr(self, "last", y[..., :1]).shape != y.shape or self.last.dtype != y.dtype:
            self.last = torch.empty_like(y)
        return self.last.copy_(y)


class Counts(Right):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1.1 if self.calls > 1 else 1)


class CentredInTraining(Right):
    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True) if self.training else x)


class ScaledInEval(Right):
    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else 1.01)


class EvalOnly(Right):
    def forward(self, x):
        assert not self.training
        return super().forward(x)


class WrongAmongMany(Right):
    def forward(self, x):
        y = super().forward(x).flatten(0, -2)
        return torch.cat([y[:1024], 0 * y[1024:]]).view(x.shape)


class NegatesNothing(Right):
    def forward(self, x):
        return (self.weight.float().abs() * self.rms(x)).to(x.dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("norm", "check", "words"),
    [
        (WritesToItsLastOutput(), "repeated calls", "an output that the next call writes to"),
        (Changed(lambda norm, x: F.dropout(norm(x), 0.1, True)), "repeated calls", "other numbers for the same input"),
        (Counts(), "repeated calls", "other numbers for the same input"),
        (Changed(lambda norm, x: last_bits(norm(x))), "repeated calls", "other last bits for the same input"),
        (CentredInTraining().eval(), "modes", "in training mode: samples are coupled there"),
        (ScaledInEval(), "modes", "another output in eval mode"),
        (EvalOnly().eval(), "modes", "in training mode AssertionError"),
        (
            Changed(lambda norm, x: norm(torch.as_strided(x, x.shape, x.stride(), 0))),
            "layout",
            "other numbers for sliced inputs",
        ),
        (
            Changed(lambda norm, x: norm(x) * (1.1 if x.numel() == x.shape[-1] else 1)),
            "batch position",
            "position 0 of sample 0",
        ),
        (WrongAmongMany(), "batch position", "of a batch of"),
        (Changed(lambda norm, x: norm(x).nan_to_num()), "row isolation", "numbers in the row of a NaN"),
        (NegatesNothing(), "formula", "outputs of root mean square"),
    ],
)
def test_what_shows_only_at_some_calls_layouts_batches_or_gains(norm, check, words):
    found = violations(norm, specs.OLMO2)
    assert found[0].check == check
    assert words in found[0].found


def test_outputs_that_are_not_finite_are_not_taken_for_coupled_samples():
    [seen] = violations(lambda x: x * float("nan"), specs.NANOCHAT, 16, dtypes=(torch.float32,))
    assert (seen.check, seen.found) == ("formula", "outputs that are NaN or infinite for ordinary rows")


class EntirelyInTheDtype(Gain):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@pytest.mark.slow
def test_a_spec_that_stays_in_sixteen_bits_may_overflow_there():
    norm = EntirelyInTheDtype(eps=1e-5)
    spec = specs.OLMO2.replace(eps=1e-5, statistics_dtype="input", cast="none", round_rstd=True, output_dtype="promote")
    assert violations(norm, spec) == ()


@pytest.mark.parametrize(
    ("spec", "shape", "rows"),
    [
        (specs.OLMO, (2, 3, 4), [[[0] * 4, [1] * 4, [2] * 4], [[3] * 4, [4] * 4, [5] * 4]]),
        (specs.CONVNEXT, (1, 2, 3), [[[0, 1, 2], [0, 1, 2]]]),
        (specs.POOLFORMER.replace(groups=2), (1, 4, 1), [[[0], [0], [1], [1]]]),
    ],
)
def test_the_row_of_every_element(spec, shape, rows):
    assert spec.rows.numbers(torch.zeros(shape)).tolist() == rows


ROWS = specs.OLMO


def seen(norm, spec=ROWS, shape=(2, 3, 12), dtype=torch.float32):
    return conduct.rows(Subject(norm, spec, shape, None, None, None, None, torch.float32).in_dtype(spec, dtype))


def over(*axes, groups=1):
    def norm(x):
        y = x.unflatten(-1, (groups, -1)) if groups > 1 else x
        y = (y - y.mean(axes, keepdim=True)) / (y.var(axes, keepdim=True, correction=0) + 1e-5).sqrt()
        return y.flatten(-2) if groups > 1 else y

    return norm


def causal(x):
    count = torch.arange(1, x.shape[1] + 1).reshape(-1, 1)
    return x / (x.pow(2).mean(-1, keepdim=True).cumsum(1) / count + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (over(1), "outputs along axis 1 move: earlier positions feel later ones"),
        (over(1, 2), "outputs along axes 1, 2 move: earlier positions feel later ones"),
        (over(0), "outputs along axis 0 move: samples are coupled"),
        (over(0, 1, 2), "outputs along axes 0, 1, 2 move: samples are coupled"),
        (
            over(-1, groups=3),
            "4 outputs along axis 2 move: 3 parts of a row have statistics of their own, as where each rank",
        ),
        (torch.tanh, "1 outputs along no axis move: too few share statistics"),
        (nn.BatchNorm1d(3), "outputs along axes 0, 2 move: samples are coupled"),
        (nn.BatchNorm1d(3).eval(), "along no axis move: too few share statistics"),
        (causal, "outputs along axes 1, 2 move"),
    ],
)
def test_other_rows(norm, words):
    found = seen(norm)
    assert found.check == "rows"
    assert words in found.found
    assert found.expected == "only its own row, 12 outputs along axis 2, to move with one element"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_rows(dtype):
    assert seen(over(2), dtype=dtype) is None
    assert seen(over(-1, groups=3), ROWS.replace(groups=3), dtype=dtype) is None
    assert seen(over(1), specs.CONVNEXT.replace(has_weight=False, has_bias=False), dtype=dtype) is None


def test_rows_that_are_not_those_of_the_spec_end_the_search():
    assert [violation.check for violation in violations(over(1), ROWS, (2, 3, 12))] == ["rows"]


def depends_on_size(limit):
    """A norm that adds up a row in another order in larger batches."""

    def norm(x, weight):
        wide = x.float()
        square = wide.square()
        parts = [part.sum(-1, keepdim=True) for part in square.chunk(4 if x[..., 0].numel() < limit else 1, -1)]
        return (weight.float() * wide / (sum(parts) / x.shape[-1] + 1e-6).sqrt()).to(x.dtype)

    return norm


def depends_on_place(x, weight):
    y = depends_on_size(0)(x, weight)
    return torch.cat([y[:-1], y[-1:] * (1 + torch.finfo(y.dtype).eps)]) if len(x) > 1 else y


def depends_on_length(x, weight):
    return depends_on_size(0 if x.dim() < 3 or x.shape[1] < 64 else 1 << 40)(x, weight)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (depends_on_size(64), r"% of the outputs have other bits in a batch of \d+"),
        (depends_on_place, r"% of the outputs have other bits in a batch of 2"),
        (depends_on_length, r"% of the outputs have other bits in a sequence of 64"),
    ],
)
@pytest.mark.slow
def test_bits_that_depend_on_the_batch_are_told_where_it_is_asked_for(norm, words):
    arguments = {"weight": torch.ones(64), "dtypes": (torch.float32,)}
    assert violations(norm, specs.OLMO2, **arguments) == ()
    (seen,) = violations(norm, specs.OLMO2, batch_invariant=True, **arguments)
    assert seen.check == "batch invariance"
    assert re.search(words, seen.found)


@pytest.mark.slow
def test_normkits_own_bits_do_not_depend_on_the_batch():
    assert violations(nk.RMSNorm(48, eps=1e-6), specs.OLMO2, batch_invariant=True) == ()
    assert violations(nk.LayerNorm(48), specs.TORCH_LAYER_NORM, batch_invariant=True) == ()
