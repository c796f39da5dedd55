"""Norms of other libraries, recognised as what their source says they are.

torch's own; x-transformers and timm as they are installed; and by their published formula some that need what a CPU
does not have: Megatron-LM, OLMo-core, TransformerLens and flash-linear-attention (its kernels are written in Triton).
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from normkit import NormSpec, identify, specs
from normkit.identification.passport import CONVENTIONS


def timm(name):
    """A class of timm.layers. Its package imports torchvision, whose wheels are for CUDA; its norms do not need it."""
    if "timm_layers" not in sys.modules:
        layers = ModuleType("timm_layers")
        layers.__path__ = [str(Path(find_spec("timm").origin).parent / "layers")]
        sys.modules["timm_layers"] = layers
    for module in ("norm", "filter_response_norm", "evo_norm", "grn"):
        if found := getattr(importlib.import_module(f"timm_layers.{module}"), name, None):
            return found
    raise AttributeError(name)


def x_transformers(name):
    """A class of x-transformers."""
    return getattr(importlib.import_module("x_transformers.x_transformers"), name)


def assert_recognised(norm, shape, spec, undecided=()):
    """It is a norm with this spec, in all fields but those of the readings that may be open."""
    passport = identify(norm, shape)
    assert passport.verdict == "norm"
    assert passport.spec is not None, passport.evidence
    open_readings = set(passport.undecidable) & set(CONVENTIONS)
    assert open_readings <= set(undecided), passport.undecidable
    open_fields = {field for name in open_readings for field in CONVENTIONS[name]}
    expected, found = spec.to_json(), passport.spec.to_json()
    assert {name: found[name] for name in found if name not in open_fields} == {
        name: expected[name] for name in expected if name not in open_fields
    }
    # Open or not, the passport computes what the norm computes.
    module = norm.float().eval() if isinstance(norm, nn.Module) else norm
    x = torch.randn(3, *shape[1:], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(passport(x), module(x).detach(), rtol=1e-5, atol=1e-5)


def drawn(module):
    """A module with parameters that are not their first values."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return module


SPATIAL = (2, 16, 5, 5)
BARE = NormSpec(has_weight=False, has_bias=False)


@pytest.mark.parametrize(
    ("norm", "shape", "spec", "undecided"),
    [
        (nn.GroupNorm(4, 16, eps=1e-3), SPATIAL, NormSpec(axes="all_but_batch", groups=4, eps=1e-3), ()),
        # No parameter spans the channels.
        (nn.GroupNorm(4, 16, affine=False), SPATIAL, BARE.replace(axes="all_but_batch", groups=4), ()),
        # In 16 bits torch's instance norm goes through its batch norm, which rounds mean and 1/std.
        (nn.InstanceNorm2d(16, affine=True), SPATIAL, NormSpec(axes="all_but_batch", groups=16), ("casts",)),
        (nn.InstanceNorm1d(16, affine=True), (2, 16, 5), NormSpec(axes="all_but_batch", groups=16), ("casts",)),
        (nn.InstanceNorm2d(16), SPATIAL, BARE.replace(axes=(-2, -1)), ("casts",)),
        (nn.InstanceNorm1d(16), (2, 16, 5), BARE, ("casts",)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_torchs_group_and_instance_norms(norm, shape, spec, undecided):
    assert_recognised(drawn(norm), shape, spec, undecided)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(16), (2, 16)),
        (nn.BatchNorm1d(16), (2, 16, 5)),
        (nn.BatchNorm2d(16), SPATIAL),
        (nn.BatchNorm2d(16, affine=False), SPATIAL),
        (nn.BatchNorm2d(16, track_running_stats=False), SPATIAL),
        (nn.SyncBatchNorm(16), SPATIAL),
    ],
    ids=repr,
)
def test_a_batch_norm_is_one_in_either_mode(norm, shape, training):
    norm.train(training)
    passport = identify(norm, shape)
    assert (passport.verdict, passport.spec) == ("batch", None)
    assert norm.training == training


@pytest.mark.parametrize(
    ("norm", "shape", "verdict"),
    [
        (weight_norm(nn.Linear(16, 16)), (2, 16), "linear"),
        (spectral_norm(nn.Linear(16, 16)), (2, 16), "linear"),
        (weight_norm(nn.Conv1d(16, 16, 3, padding=1)), (2, 16, 5), "linear"),
        (nn.LocalResponseNorm(4), SPATIAL, "not a norm"),
        (nn.CrossMapLRN2d(4), SPATIAL, "not a norm"),
        (nn.Softmax(-1), (2, 16), "softmax"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_what_is_only_called_a_norm(norm, shape, verdict):
    passport = identify(norm, shape)
    assert (passport.verdict, passport.spec) == (verdict, None)


@pytest.mark.parametrize("dim", [0, None])
def test_a_norm_whose_weight_is_computed_from_others(dim):
    # The gain is g v / |v|: no parameter is the weight, so it is taken as it acts.
    norm = weight_norm(drawn(nn.LayerNorm(16)), dim=dim)
    assert_recognised(norm, (2, 16), NormSpec(), undecided=("gain", "bias", "divisor", "casts", "output dtype"))


def test_normalize_along_the_channels():
    bare = specs.L2_NORM.replace(axes=(1,))
    assert_recognised(lambda x: F.normalize(x, dim=1), SPATIAL, bare, undecided=("gain", "output dtype"))


L2_OF_X_TRANSFORMERS = specs.L2_NORM.replace(multiplier="sqrt_n", output_dtype="input")


@pytest.mark.parametrize(
    ("name", "arguments", "shape", "spec", "undecided"),
    [
        ("LayerNorm", {"dim": 64}, (2, 64), NormSpec(has_bias=False, cast="early", output_dtype="promote"), ()),
        (
            "LayerNorm",
            {"dim": 64, "unit_offset": True},
            (2, 64),
            specs.NEMOTRON.replace(has_bias=False, cast="early", output_dtype="promote"),
            (),
        ),
        ("RMSNorm", {"dim": 64}, (2, 64), specs.X_TRANSFORMERS_RMS, ("casts",)),
        (
            "RMSNorm",
            {"dim": 64, "unit_offset": True},
            (2, 64),
            specs.X_TRANSFORMERS_RMS.replace(weight_offset=1.0, offset_dtype="parameter"),
            ("casts", "offset dtype"),
        ),
        ("ScaleNorm", {"dim": 64}, (2, 64), specs.X_TRANSFORMERS_RMS, ("casts",)),
        (
            "ScaleNorm",
            {"dim": 64, "unit_offset": True},
            (2, 64),
            specs.X_TRANSFORMERS_RMS.replace(weight_offset=1.0, offset_dtype="parameter"),
            ("casts", "offset dtype"),
        ),
        ("SimpleRMSNorm", {"dim": 64}, (2, 64), L2_OF_X_TRANSFORMERS, ("casts",)),
        (
            "MultiheadRMSNorm",
            {"dim": 64, "heads": 4},
            (2, 4, 3, 64),
            specs.X_TRANSFORMERS_RMS.replace(weight_offset=1.0, offset_dtype="parameter"),
            ("casts", "offset dtype"),
        ),
    ],
)
def test_x_transformers(name, arguments, shape, spec, undecided):
    assert_recognised(drawn(x_transformers(name)(**arguments)), shape, spec, undecided)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("AdaptiveLayerNorm", "adaptive"),
        ("AdaptiveRMSNorm", "adaptive"),
        ("DynamicTanh", "elementwise"),
        ("Derf", "elementwise"),
    ],
)
def test_x_transformers_that_no_spec_describes(name, verdict):
    passport = identify(x_transformers(name)(64), (2, 3, 64))
    assert (passport.verdict, passport.spec) == (verdict, None)
    if verdict == "adaptive":
        found = passport.readings["condition"].value
        assert (found["argument"], found["scale"], found["shift"]) == ("condition", True, False)


IN_DTYPE = {"statistics_dtype": "input", "round_rstd": True, "cast": "none", "output_dtype": "promote"}
SIMPLE = NormSpec(eps=1e-6, centre_numerator=False, correction=1, has_bias=False)
RESPONSE = NormSpec(
    centre_numerator=False, centre_statistics=False, axes="all_but_batch", groups=16, cast="early", round_rstd=True
)


@pytest.mark.parametrize(
    ("name", "arguments", "shape", "spec", "undecided"),
    [
        ("LayerNorm", {}, (2, 3, 16), NormSpec(eps=1e-6), ()),
        ("LayerNormFp32", {}, (2, 3, 16), NormSpec(eps=1e-6), ()),
        ("LayerNorm2d", {}, SPATIAL, NormSpec(eps=1e-6, axes=(1,)), ()),
        ("LayerNorm2dFp32", {}, SPATIAL, NormSpec(eps=1e-6, axes=(1,)), ()),
        ("LayerNormExp2d", {}, SPATIAL, NormSpec(eps=1e-6, axes=(1,)), ()),
        ("GroupNorm", {"num_groups": 4}, SPATIAL, NormSpec(axes="all_but_batch", groups=4), ()),
        ("GroupNorm1", {}, SPATIAL, NormSpec(axes="all_but_batch"), ()),
        ("RmsNorm", {}, (2, 3, 16), specs.OLMO2, ()),
        ("RmsNorm", {"affine": False}, (2, 3, 16), specs.NANOCHAT, ()),
        ("RmsNormFp32", {}, (2, 3, 16), specs.OLMO2, ()),
        ("RmsNorm2d", {}, SPATIAL, specs.OLMO2.replace(axes=(1,), **IN_DTYPE), ("casts",)),
        ("RmsNorm2dFp32", {}, SPATIAL, specs.OLMO2.replace(axes=(1,)), ()),
        ("SimpleNorm", {}, (2, 3, 16), SIMPLE.replace(**IN_DTYPE), ("casts",)),
        ("SimpleNormFp32", {}, (2, 3, 16), SIMPLE, ()),
        ("SimpleNorm2d", {}, SPATIAL, SIMPLE.replace(axes=(1,), **IN_DTYPE), ("casts",)),
        ("SimpleNorm2dFp32", {}, SPATIAL, SIMPLE.replace(axes=(1,)), ()),
        # The squares are rounded to 16 bits, then summed in float32.
        ("FilterResponseNormTlu2d", {"apply_act": False}, SPATIAL, RESPONSE, ("casts",)),
        ("FilterResponseNormAct2d", {"apply_act": False}, SPATIAL, RESPONSE, ("casts",)),
    ],
)
def test_timm(name, arguments, shape, spec, undecided):
    assert_recognised(drawn(timm(name)(16, **arguments)), shape, spec, undecided)


@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        # An activation behind it, or inside.
        ("FilterResponseNormTlu2d", {}, "norm"),
        ("FilterResponseNormAct2d", {}, "norm"),
        ("EvoNorm2dS0", {"groups": 4}, "norm"),
        ("EvoNorm2dS1", {"groups": 4}, "norm"),
        # Without its activation, EvoNorm-S0 divides by nothing.
        ("EvoNorm2dS0", {"groups": 4, "apply_act": False}, "affine"),
        # A residual: it grows with its input.
        ("GlobalResponseNorm", {"channels_last": False}, "not a norm"),
    ],
)
def test_timm_that_no_spec_describes(name, arguments, verdict):
    passport = identify(drawn(timm(name)(16, **arguments)), SPATIAL)
    assert (passport.verdict, passport.spec) == (verdict, None)


def test_a_norm_of_timm_that_couples_samples_in_training_only():
    # In eval mode max(running std, x v + instance std) divides, which grows with x where x is positive only.
    passport = identify(drawn(timm("EvoNorm2dB0")(16)), SPATIAL)
    assert passport.verdict in ("batch", "not a norm")
    assert passport.readings["training"].value == {"output": "batch statistics", "updates": ["running_var"]}


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


@pytest.mark.parametrize(
    ("norm", "spec", "undecided"),
    [
        (MegatronL2Norm(), specs.NANOCHAT, ()),
        (OlmoCoreL2(), specs.L2_NORM.replace(eps=0.0, eps_placement="inside"), ("eps", "casts")),
        (LensLayerNorm(64, bias=True), NormSpec(), ()),
        (LensRMSNormPre(), specs.NANOCHAT.replace(eps=1e-5), ()),
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
