"""Norms of other libraries as they are installed, recognised as what their source says they are."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from normkit import NormSpec, identify, specs
from recognition import assert_recognised


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


def drawn(module):
    """A module with parameters that are not their first values."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return module


SPATIAL = (2, 16, 5, 5)
BARE = NormSpec(has_weight=False, has_bias=False)


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
@pytest.mark.slow
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


@pytest.mark.sampled(8)
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
