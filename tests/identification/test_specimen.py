"""What is identified is a copy: whatever is done to it, the module that was given stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.errors import ModelError, ShapeError
from normkit.identification.specimen import Specimen, UnrecognisedError


def test_the_copy_has_no_hooks_and_shares_nothing():
    module = nn.LayerNorm(4).to(torch.bfloat16).train()
    calls = []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    specimen = Specimen(module)
    with torch.no_grad():
        specimen.draw(torch.Generator().manual_seed(0))
        specimen.parameters["bias"].fill_(3.0)
        specimen(torch.randn(2, 4))
    assert calls == []
    assert module.training
    assert module.weight.dtype == torch.bfloat16
    assert bool((module.weight == 1).all())
    assert bool((module.bias == 0).all())
    assert specimen.parameters["bias"].tolist() == [3.0] * 4
    assert not specimen.module.training


def test_a_hook_that_holds_on_to_everything_is_not_copied():
    class Uncopyable:
        def __deepcopy__(self, memo):
            raise RuntimeError("copied")

        def __call__(self, *_):
            return None

    module = nn.LayerNorm(4)
    module.register_forward_hook(Uncopyable())
    assert Specimen(module)(torch.randn(2, 4)).shape == (2, 4)


def test_what_cannot_be_copied_is_refused():
    module = nn.LayerNorm(4)
    module.scaled = torch.ones(4, requires_grad=True) * 2  # not a leaf, which deepcopy refuses
    with pytest.raises(ModelError, match=r"a LayerNorm cannot be copied .* pass lambda x: norm\(x\)$"):
        Specimen(module)
    x = torch.randn(2, 4)
    assert torch.equal(Specimen(lambda x: module(x))(x), module(x))


def test_the_input_is_not_changed_by_a_norm_in_place():
    x = torch.randn(2, 4)
    before = x.clone()
    Specimen(lambda x: x.mul_(2.0))(x)
    assert torch.equal(x, before)


def test_a_shape_that_does_not_fit_is_an_error():
    with pytest.raises(ShapeError, match=r"refuses an input of shape \(2, 5\)"):
        Specimen(nn.LayerNorm(4))(torch.randn(2, 5))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x, x), "it returns tuple"),
        (lambda x: x.sum(-1), r"into torch.float32 of shape \(2,\)"),
        (lambda x: x > 0, "into torch.bool"),
    ],
)
def test_an_output_that_is_not_like_the_input_is_no_norm(function, reason):
    with pytest.raises(UnrecognisedError, match=reason) as refusal:
        Specimen(function)(torch.randn(2, 4))
    assert refusal.value.verdict == "not a norm"


def test_a_second_input_may_be_a_gate():
    specimen = Specimen(lambda x, gate: x * gate)
    with pytest.raises(UnrecognisedError, match="cannot be called with one tensor") as refusal:
        specimen(torch.ones(2, 4))
    assert refusal.value.verdict == "gated"
    assert torch.equal(
        specimen.adapted(lambda run, x: run(x, 0.5 * x))(torch.full((2, 4), 2.0)), torch.full((2, 4), 2.0)
    )


def test_a_module_without_memory_gets_some():
    specimen = Specimen(nn.LayerNorm(4, device="meta"))
    assert bool(torch.isfinite(specimen(torch.randn(2, 4))).all())


def test_calls_in_other_dtypes_leave_the_parameters():
    specimen = Specimen(nn.LayerNorm(4))
    with torch.no_grad():
        specimen.parameters["weight"].fill_(1 / 3)
        y = specimen.call_in(torch.bfloat16, torch.randn(2, 4).bfloat16())
    assert y.dtype == torch.bfloat16
    assert specimen.parameters["weight"].dtype == torch.float32
    assert specimen.parameters["weight"][0] == torch.tensor(1 / 3)
    assert specimen.call_in(torch.bfloat16, torch.randn(2, 5)) is None
