"""Norms fused with an addition: which sum is normalized, what leaves as the residual, and in which dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.errors import InputError
from normkit.testing import assert_conforms, violations

ALL = ("residual", "residual dtype", "residual sum")


class Fused(nn.Module):
    """As vLLM's RMSNorm without its kernels, and with one fault of each kind."""

    def __init__(self, fault=""):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.fault = fault

    def forward(self, x, residual):
        wide = x.float() + residual.float()
        left = wide.to(x.dtype if self.fault == "dtype of x" else residual.dtype)
        wide = {"rounded": left.float(), "x alone": x.float()}.get(self.fault, wide)
        y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight
        left = {"old": residual, "added twice": (left.float() + x.float()).to(left.dtype), "y": y}.get(self.fault, left)
        return y, left


def found(norm, asked, **arguments):
    seen = violations(norm, nk.specs.LLAMA, residual=asked, **arguments)
    return {violation.check: violation.found for violation in seen}


def test_each_sum_conforms_as_it_is_asked_for_and_is_named_where_it_is_not():
    assert_conforms(Fused(), nk.specs.LLAMA, residual="wide")
    assert_conforms(Fused("rounded"), nk.specs.LLAMA, residual="rounded")
    assert found(Fused(), "rounded") == {
        "residual sum": "the statistics of the sum in float32, before it is rounded (bfloat16)"
    }
    assert found(Fused("rounded"), "wide") == {
        "residual sum": "the sum rounded to the residual's dtype before the statistics (bfloat16)"
    }


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("x alone", "residual sum", "that of x alone (float32)"),
        ("old", "residual", "the residual as it was"),
        ("y", "residual", "y"),
        ("dtype of x", "residual dtype", "bfloat16"),
    ],
)
def test_a_fault_is_named_alone(fault, check, words):
    assert found(Fused(fault), "wide") == {check: words}


def test_an_addition_twice_is_told_by_its_share():
    seen = found(Fused("added twice"), "wide")
    assert set(seen) == {"residual"}
    assert seen["residual"].endswith("% of it so")


def test_faults_of_the_norm_itself_are_named_beside_it():
    seen = violations(Fused("old"), nk.specs.LLAMA.replace(eps=1e-5), residual="wide")
    assert [violation.check for violation in seen] == ["eps", "residual"]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16, torch.float16)])
def test_normkits_own_round_the_sum(dtypes):
    def fused(x, residual, weight):
        return nk.add_rms_norm(x, residual, (32,), weight, 1e-6)

    assert_conforms(fused, nk.specs.OLMO2, weight=torch.ones(32), residual="rounded", dtypes=dtypes)


def test_a_kernel_that_writes_over_its_inputs_is_told_and_else_right():
    inner = Fused("rounded")

    def kernel(x, residual, weight):
        inner.weight.data = weight.data
        y, left = inner(x, residual)
        return x.copy_(y), residual.copy_(left)

    with torch.no_grad():
        gradients = ("input gradient", "gain gradient", "row isolation", "constant rows")
        seen = found(kernel, "rounded", weight=torch.ones(32), skip=gradients)
    # What it writes over has the input's dtype.
    assert set(seen) == {"input kept", "output dtype"}


def test_a_call_takes_the_residual_after_x():
    def call(norm, x, residual):
        return norm(residual=residual, x=x)

    assert found(Fused(), "wide", call=call) == {}


def test_what_returns_no_pair_is_told_and_another_word_is_refused():
    seen = found(lambda x, *_: 2 * x, "wide", weight=torch.ones(32))
    assert seen == {"call": "TypeError: expected a pair (y, new residual), got a Tensor"}
    with pytest.raises(InputError, match="residual must be 'rounded' or 'wide', got 'float32'"):
        assert_conforms(Fused(), nk.specs.LLAMA, residual="float32")
