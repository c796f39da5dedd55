"""Functions of given parameters and of numpy arrays are identified as modules are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import NormSpec, specs
from normkit.errors import InputError, KindError
from normkit.identification.adapters import as_tensor
from normkit.identification.behaviour import identify

WEIGHT, BIAS = torch.ones(16), torch.zeros(16)


def late(x, weight, bias=None):
    y = F.rms_norm(x.float(), x.shape[-1:], eps=1e-6) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "options", "spec"),
    [
        (late, {"weight": WEIGHT}, specs.OLMO2),
        (late, {"weight": WEIGHT, "bias": BIAS}, specs.OLMO2.replace(has_bias=True)),
        (lambda x, bias: late(x, WEIGHT, bias), {"bias": BIAS}, specs.NANOCHAT.replace(has_bias=True)),
        (
            F.layer_norm,
            {"weight": WEIGHT, "bias": BIAS, "call": lambda norm, x, weight, bias: norm(x, (16,), weight, bias)},
            NormSpec(),
        ),
        (lambda x, weight: late(x, 1 + weight), {"weight": WEIGHT}, specs.MUSE_SPARK),
    ],
)
def test_a_function_is_given_its_parameters(norm, options, spec):
    passport = identify(norm, 16, **options)
    assert (passport.spec, passport.undecidable) == (spec, {})
    assert (passport.weight_name, passport.bias_name) == (
        "weight" if spec.has_weight else None,
        "bias" if spec.has_bias else None,
    )
    if spec.has_weight:
        assert torch.equal(passport.weight, WEIGHT)
    assert not WEIGHT.requires_grad


@pytest.mark.parametrize(
    ("norm", "given", "error", "words"),
    [
        (nn.LayerNorm(16), WEIGHT, InputError, "a module has its own"),
        (late, "weight", KindError, "weight must be a tensor or an array"),
        (late, WEIGHT.int(), KindError, "weight must be a tensor or an array"),
    ],
)
def test_what_is_no_parameter_of_a_function(norm, given, error, words):
    with pytest.raises(error, match=words):
        identify(norm, 16, weight=given)


def of_arrays(x, weight=None):
    """Takes arrays and nothing else, and stays in their dtype."""
    assert isinstance(x, np.ndarray)
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.asarray(1e-5, x.dtype))
    return y if weight is None else y * weight


class Foreign:
    """An array of another library, whose memory can be read in one of the two usual ways."""

    def __init__(self, values, way):
        read = {"dlpack": ("__dlpack__", "__dlpack_device__"), "array": ("__array__",)}[way]
        owner = values if way == "dlpack" else values.numpy()
        self.__class__ = type("Foreign", (), {name: staticmethod(getattr(owner, name)) for name in read})


@pytest.mark.parametrize(
    "norm",
    [
        of_arrays,
        lambda x: of_arrays(np.asarray(x)),
        lambda x: Foreign(F.layer_norm(x, (16,)), "array"),
        lambda x: Foreign(F.layer_norm(x, (16,)), "dlpack"),
    ],
    ids=["in and out", "out", "__array__", "DLPack"],
)
def test_arrays_are_taken_and_returned(norm):
    spec = identify(norm, 16).spec
    assert spec.replace(cast="late", statistics_dtype="float32") == specs.OLMO


def test_a_function_of_arrays_is_given_its_parameters():
    passport = identify(of_arrays, 16, weight=WEIGHT.numpy())
    assert (passport.spec.has_weight, passport.weight_name) == (True, "weight")
    # It runs in float16, not in bfloat16, which numpy has not.
    assert "in float16, not in the other 16-bit dtype" in " ".join(passport.readings["casts"].evidence)


def test_a_dtype_is_kept():
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert as_tensor(WEIGHT.to(dtype).numpy()).dtype == dtype
    assert as_tensor(Foreign(WEIGHT.bfloat16(), "dlpack")).dtype == torch.bfloat16
    assert as_tensor([1.0]) == [1.0]


def test_arrays_that_are_no_norm():
    assert identify(lambda x: np.tanh(np.asarray(x)), 16).verdict == "elementwise"
