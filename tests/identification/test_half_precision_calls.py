"""Calls in 16 bits, and the share of their outputs that a program gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import NormSpec, specs
from normkit.identification import half_precision_calls
from normkit.identification.affine import Affine
from normkit.identification.arithmetic import DEFINITION
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed

WEIGHT = Affine(weight="weight")


def made(norm, spec, affine, shape):
    with undisturbed():
        return half_precision_calls.make_runs(Specimen(norm), spec, affine, shape, torch.Generator().manual_seed(0))


def test_dtypes_of_the_runs():
    found = made(nk.Norm(specs.LLAMA, 64), specs.LLAMA, WEIGHT, (2, 64))
    half, full, other = torch.bfloat16, torch.float32, torch.float16
    pairs = [(half, half), (full, half), (half, full), (other, other), (full, other), (other, full)]
    assert [(run.weight.dtype, run.x.dtype) for run in found] == pairs
    assert all(run.x.numel() >= 8192 for run in found)
    alone = made(nk.Norm(specs.NANOCHAT, 64), specs.NANOCHAT, Affine(), (2, 64))
    assert [run.x.dtype for run in alone] == [half, other]


def test_a_short_weight_is_drawn_again_in_as_many_outputs():
    found = made(nk.Norm(specs.LLAMA, 4), specs.LLAMA, WEIGHT, (2, 4))
    assert len({tuple(run.weight.tolist()) for run in found if run.weight.dtype == torch.bfloat16}) >= 4
    assert sum(run.x.numel() for run in found[:12:3]) == 8192


def test_an_offset_loses_bits_of_every_entry():
    for run in made(nk.Norm(specs.GEMMA, 64), specs.GEMMA, WEIGHT, (2, 64)):
        if run.weight.dtype != torch.float32:
            lost = run.weight + 1 != run.weight.float() + 1
            assert lost.double().mean() > 0.8


def test_rows_of_two_are_felt_by_eps():
    # Without it each output is +-1, exact in any dtype, and late and early casts are one.
    spec = NormSpec(has_weight=False, has_bias=False)
    run = made(nk.Norm(spec, 2), spec, Affine(), (2, 2))[0]
    assert 0.2 < float(((run.y.abs() > 0.05) & (run.y.abs() < 0.95)).double().mean()) < 0.9


def test_match_counts_equal_bits():
    run = made(nk.Norm(specs.NANOCHAT, 64), specs.NANOCHAT, Affine(), (2, 64))[0]
    assert run.match(run.y) == 1.0
    other = run.y.clone()
    other.view(-1)[:82] *= 2
    assert run.match(other) == pytest.approx(1 - 82 / run.y.numel())
    not_numbers = half_precision_calls.Run(x=run.x, y=torch.full_like(run.y, torch.nan), weight=None, bias=None)
    assert not_numbers.match(not_numbers.y) == 1.0
    assert not_numbers.match(run.y) == 0.0


def test_float32_outputs_match_to_a_few_ulp():
    y = torch.ones(8)
    run = half_precision_calls.Run(x=y.half(), y=y, weight=None, bias=None)
    assert run.match(y.double() * (1 + 4e-7)) == 1.0
    assert run.match(y.double() * (1 + 4e-6)) == 0.0


def test_the_rate_names_the_order():
    def norm(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)

    spec = specs.OLMO.replace(cast="none", statistics_dtype="input", round_rstd=True)
    with undisturbed():
        found = made(norm, spec, Affine(), (2, 16))
        own = half_precision_calls.rate(found[:1], spec)
        wrong = half_precision_calls.rate(found[:1], specs.OLMO)
    assert own.share == 1.0
    # Without vector instructions torch.var gives the bits of the definition.
    assert own.order in ("x * (1 / s), v by torch.var", DEFINITION)
    assert wrong.order == DEFINITION
    assert wrong.share < 0.9


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), True),
        (lambda x: (x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype), False),
        (nn.LayerNorm(64), False),
    ],
)
def test_overflow(norm, expected):
    with undisturbed():
        assert half_precision_calls.overflows(Specimen(norm), (2, 64), torch.Generator().manual_seed(0)) is expected
