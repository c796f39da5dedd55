"""What a call does beside its result: to its input, to a module's state, to random generators."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification import side_effects
from normkit.identification.behaviour import identify
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed


def readings(norm, shape=(2, 6)):
    with undisturbed():
        return side_effects.side_effect_readings(Specimen(norm), shape, torch.Generator().manual_seed(0))


def in_place(x):
    x = x.float()
    return x.mul_((x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def scribbles(x):
    y = F.rms_norm(x, (6,))
    x.zero_()
    return y


@pytest.mark.parametrize(
    ("norm", "value", "said"),
    [
        (nn.LayerNorm(6), "kept", "the same after the call"),
        (nn.Identity(), "kept", "lies in the memory of the input"),
        (in_place, "overwritten", "works in place"),
        (scribbles, "overwritten", "changes its own input"),
    ],
)
def test_the_input(norm, value, said):
    reading = readings(norm)["input"]
    assert reading.value == value
    assert said in " ".join(reading.evidence)


def test_a_norm_in_place_is_still_found():
    passport = identify(in_place, 6)
    assert passport.spec.eps == 1e-6
    assert passport.readings["input"].value == "overwritten"


class Counting(nn.Module):
    """Remembers what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return F.rms_norm(x, (6,)) * (self.calls if self.training else 1.0)


@pytest.mark.parametrize(
    ("norm", "output", "updates"),
    [
        (nn.LayerNorm(6), "as in eval", []),
        (nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.5)), "random", []),
        (nn.BatchNorm1d(6), "batch statistics", ["num_batches_tracked", "running_mean", "running_var"]),
        (nn.BatchNorm1d(6, momentum=0.0, affine=False), "batch statistics", ["num_batches_tracked"]),
        (Counting(), "different", ["calls"]),
    ],
)
def test_training_mode(norm, output, updates):
    assert readings(norm)["training"].value == {"output": output, "updates": updates}


def test_a_function_has_no_mode():
    assert "training" not in readings(torch.tanh)


def test_a_module_that_cannot_be_trained_is_left_open():
    class Frozen(nn.Module):
        def forward(self, x):
            if self.training:
                raise RuntimeError("eval only")
            return F.rms_norm(x, (6,))

    reading = readings(Frozen())["training"]
    assert reading.value is None
    assert "eval only" in reading.undecidable


@pytest.mark.parametrize(
    ("norm", "said", "is_norm_like"),
    [
        (lambda x: F.dropout(x, 0.5), "draws random numbers", False),
        (lambda x: torch.rand_like(x), "draws random numbers", False),
        (lambda x: torch.tanh(x) + 0.01 * torch.randn_like(x), "draws random numbers", False),
        (lambda x: F.rms_norm(x, (6,)) + 0.01 * torch.randn_like(x), "draws random numbers", True),
        (lambda x: F.rms_norm(x, (6,)) * (1 + 0.01 * random.random()), "keeps a state", True),
    ],
)
def test_what_is_not_repeatable_is_undecidable(norm, said, is_norm_like):
    passport = identify(norm, 6)
    assert (passport.verdict, passport.spec) == ("undecidable", None)
    assert said in passport.evidence[0]
    assert passport.readings["repeatable"].value is False
    assert ("scale" in passport.readings) is is_norm_like
