"""Norms of two inputs: gates before and after, through which function; conditioned scales and shifts; sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import NormSpec, specs
from normkit.identification.behaviour import identify

RMS = specs.TORCH_RMS_NORM.replace(eps=1e-6)


class Gated(nn.Module):
    def __init__(self, n, activation, placement):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.activation, self.placement = activation, placement

    def norm(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)

    def forward(self, x, gate):
        if self.placement == "before":
            return self.norm(x * self.activation(gate))
        return self.norm(x) * self.activation(gate)


class OptionalGate(Gated):
    def forward(self, x, z=None):
        return self.norm(x) if z is None else super().forward(x, z)


class NeededAfterAll(Gated):
    """Its gate has a default that does not work."""

    def forward(self, x, gate=None):
        return self.norm(x) * torch.sigmoid(gate.to(torch.float32))


@pytest.mark.parametrize("placement", ["before", "after"])
@pytest.mark.parametrize(
    ("activation", "name"),
    [(F.silu, "silu"), (torch.sigmoid, "sigmoid"), (lambda gate: gate, "none"), (F.gelu, "gelu")],
)
@pytest.mark.parametrize("shape", [(2, 32), (2, 3, 32)])
def test_gates(activation, name, placement, shape):
    passport = identify(Gated(32, activation, placement), shape)
    assert (passport.verdict, passport.spec) == ("gated", None)
    value = passport.readings["gate"].value
    assert (value["argument"], value["placement"], value["activation"]) == ("gate", placement, name)
    # Held at 64, all of these multiply by a power of two: the norm that is left is found to the last cast.
    found = NormSpec.from_json(value["spec"])
    assert found.replace(output_dtype="input") == RMS
    assert passport.evidence[0].startswith(f"gate multiplies elementwise {placement} the norm")


def test_a_gate_through_an_unusual_function_is_a_gate():
    value = identify(Gated(32, torch.exp, "after"), 32).readings["gate"].value
    assert value == {"argument": "gate", "placement": "after", "activation": None}


@pytest.mark.slow
def test_a_gate_that_need_not_be_given():
    passport = identify(OptionalGate(32, F.silu, "before"), 32)
    assert (passport.verdict, passport.spec.replace(output_dtype="input")) == ("norm", RMS)
    assert passport.readings["gate"].value == {
        "argument": "z",
        "placement": "before",
        "activation": "silu",
        "optional": True,
    }
    assert "gate" not in identify(nn.LayerNorm(32), 32).readings


@pytest.mark.slow
def test_a_gate_whose_default_does_not_work():
    assert identify(NeededAfterAll(32, F.silu, "after"), 32).readings["gate"].value["activation"] == "sigmoid"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, gate: torch.tanh(x) * gate, "depends on its own input alone"),
        (lambda x, y: x + y, "grows as the input"),
        (lambda x, y: x @ y.mT @ y, "grows as the input"),
    ],
)
def test_two_tensors_make_no_norm(function, reason):
    passport = identify(function, 32)
    assert passport.verdict == "not a norm"
    assert reason in passport.evidence[0]


class Adaptive(nn.Module):
    def __init__(self, n, width, several=False):
        super().__init__()
        self.linear, self.several = nn.Linear(width, 2 * n), several
        self.norm = nn.LayerNorm(n, elementwise_affine=False, eps=1e-6)

    def forward(self, x, emb=None):
        scale, shift = self.linear(F.silu(emb)).chunk(2, -1)
        y = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return (y, scale, shift) if self.several else y


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("width", [32, 12])
def test_scale_and_shift_from_another_input(width, several):
    passport = identify(Adaptive(32, width, several), (2, 3, 32))
    assert (passport.verdict, passport.spec) == ("adaptive", None)
    value = passport.readings["condition"].value
    assert (value["argument"], value["shape"], value["scale"], value["shift"]) == ("emb", [2, width], True, True)
    assert (value["spec"]["centre_numerator"], value["spec"]["eps"]) == (True, 1e-6)
    assert "has_weight" not in value["spec"]
    # A function has no parameters in 16 bits: what no reading decided is not claimed.
    assert ("cast" in value["spec"]) is ("casts" in passport.readings)


def test_conditioning_that_begins_at_zero():
    module = Adaptive(32, 12)
    nn.init.zeros_(module.linear.weight)
    nn.init.zeros_(module.linear.bias)
    assert identify(module, (2, 3, 32)).verdict == "adaptive"
    assert bool((module.linear.weight == 0).all())


@pytest.mark.parametrize(
    ("function", "scale", "shift"),
    [
        (lambda x, c: F.layer_norm(x, (32,)) * (1 + c.mean(-1, keepdim=True)), True, False),
        (lambda x, c: F.layer_norm(x, (32,)) + c, False, True),
        (lambda x, *, condition: F.rms_norm(x, (32,)) * (1 + condition) + condition.flip(-1), True, True),
        (lambda x, scale, shift: F.layer_norm(x, (32,)) * (1 + scale) + shift, True, True),
    ],
)
def test_scale_or_shift_alone_and_given_directly(function, scale, shift):
    passport = identify(function, (2, 3, 32))
    assert passport.verdict == "adaptive"
    value = passport.readings["condition"].value
    assert (value["scale"], value["shift"]) == (scale, shift)


@pytest.mark.parametrize("both", [False, True])
def test_a_residual_that_is_added_first(both):
    def add_norm(x, residual):
        total = x + residual
        y = F.rms_norm(total, (32,), eps=1e-6)
        return (y, total) if both else y

    passport = identify(add_norm, 32)
    assert (passport.verdict, passport.spec.replace(cast="late")) == ("norm", specs.NANOCHAT)
    value = passport.readings["residual"].value
    assert (value["argument"], value["spec"]["eps"]) == ("residual", 1e-6)
    assert "residual is added to x before it is normalized" in passport.evidence[0]


def test_the_norm_of_a_sum_has_its_weight():
    class AddNorm(nn.RMSNorm):
        def forward(self, x, residual):
            return super().forward(x + residual)

    module = AddNorm(32, eps=1e-6)
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
    passport = identify(module, 32)
    assert (passport.spec, passport.weight_name) == (specs.OLMO2, "weight")
    x, residual = torch.randn(2, 3, 32)
    torch.testing.assert_close(passport(x + residual), module(x, residual).detach())


@pytest.mark.slow
def test_a_block_that_ends_in_a_norm_is_not_adaptive():
    passport = identify(nn.TransformerDecoderLayer(8, 2, 8), (2, 3, 8))
    assert (passport.verdict, passport.spec) == ("norm", None)
    assert passport.evidence[0] == "with memory held constant, no spec describes what is left"


def test_an_argument_that_changes_nothing():
    def norm(x, unused):
        del unused
        return F.rms_norm(x, (32,))

    passport = identify(norm, 32)
    assert passport.evidence[0] == "unused is needed, and changes nothing"


@pytest.mark.parametrize(
    ("path", "arguments", "verdict"),
    [
        ("qwen3_next.Qwen3NextRMSNormGated", (32,), "gated"),
        ("kimi_linear.KimiLinearRMSNormGated", (32,), "gated"),
        ("bamba.BambaRMSNormGated", (32, 8), "norm"),
        ("qwen2_5_omni.Qwen2_5_OmniAdaLayerNormZero", (32,), "adaptive"),
        ("qwen2_5_omni.Qwen2_5_OmniAdaLayerNormZero_Final", (32,), "adaptive"),
        ("esmfold2.EsmFold2AdaptiveLayerNorm", (32,), "adaptive"),
    ],
)
def test_classes_of_transformers(path, arguments, verdict):
    from importlib import import_module

    family, name = path.split(".")
    module = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(*arguments)
    passport = identify(module, (2, 3, 32))
    assert passport.verdict == verdict
    assert {"gated": "gate", "norm": "gate", "adaptive": "condition"}[verdict] in passport.readings
