"""Functions of parameters and of arrays, shapes that a norm takes, and one clear line for what cannot be called."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import NormSpec, specs
from normkit.errors import DtypeError, IdentificationError, InputError, KindError, NormkitError, ShapeError
from normkit.identification import calling
from normkit.identification.behaviour import identify
from normkit.identification.specimen import Specimen, as_tensor

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


def needs(length):
    """A norm that refuses fewer positions than this."""

    def norm(x):
        x.unfold(1, length, 1)
        return F.rms_norm(x, (x.shape[-1],), eps=1e-6)

    return norm


@pytest.mark.parametrize(
    ("norm", "given", "called"),
    [
        (nn.LayerNorm(6), (8, 6), (2, 6)),
        (nn.LayerNorm(6), (8, 100, 6), (2, 4, 6)),
        (nn.LayerNorm(6), (8, 1, 6), (2, 2, 6)),
        (nn.LayerNorm((5, 6)), (8, 5, 6), (2, 5, 6)),
        (needs(9), (2, 3, 6), (2, 16, 6)),
        (needs(40), (2, 3, 6), (2, 64, 6)),
        (needs(9), (2, 12, 6), (2, 12, 6)),
    ],
)
def test_a_convenient_shape(norm, given, called):
    assert calling.convenient(Specimen(norm), given, None) == (called, None)


def test_a_minimum_size_does_not_hide_the_norm():
    assert identify(needs(9), (2, 3, 6)).spec.eps == 1e-6


def of_one_shape(*sizes):
    """A function that takes this shape only, as what was exported or compiled for it."""

    def norm(x):
        assert x.shape == sizes
        return F.layer_norm(x, sizes[-1:])

    return norm


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_one_shape_only(samples):
    sizes = (samples, 3, 8)
    called = (max(samples, 2), 3, 8), samples
    assert calling.convenient(Specimen(of_one_shape(*sizes)), sizes, None) == called
    passport = identify(of_one_shape(*sizes), sizes)
    assert passport.spec == specs.OLMO
    assert f"it takes batches of {samples} " in passport.readings["kind"].evidence[-1]


def test_samples_that_feel_each_other_do_so_at_one_shape_too():
    def norm(x):
        assert x.shape == (4, 8)
        return F.batch_norm(x, None, None, training=True)

    assert identify(norm, (4, 8)).verdict == "batch"


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])
def test_an_exported_norm(samples):
    x = torch.randn(samples, 3, 8)
    exported = torch.export.export(nn.LayerNorm(8), (x,)).module()
    passport = identify(exported, tuple(x.shape))
    assert (passport.spec, passport.weight_name) == (specs.TORCH_LAYER_NORM, "weight")


def raising(error):
    def norm(_x):
        raise error

    return norm


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyError("a"), RuntimeError("never"), NotImplementedError(), AssertionError()]
)
def test_what_raises_whatever_it_is_given(error):
    with pytest.raises(IdentificationError, match=f"raises {type(error).__name__} whatever it is given") as refusal:
        identify(raising(error), 6)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("shape", [(2, 17), (2, 3, 17)])
def test_another_size_is_a_matter_of_shape(shape):
    with pytest.raises(ShapeError, match="refuses an input of shape"):
        identify(nn.LayerNorm(16), shape)


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (lambda x, mask, table: F.rms_norm(x[mask], (6,)) + table["a"], "it wants mask, table beside x"),
        (lambda x, *, index: x[index.long() + 10], "it wants index beside x"),
        (torch.lerp, "one tensor is not what it takes"),
        (lambda: 0, "one tensor is not what it takes"),
    ],
)
def test_arguments_that_nobody_gave(norm, said):
    with pytest.raises(IdentificationError, match=said) as refusal:
        identify(norm, 6)
    assert str(refusal.value).endswith("pass call=")


def test_a_call_gives_them():
    def norm(x, index):
        return F.rms_norm(x, (6,), eps=1e-6)[index]

    found = identify(norm, 6, call=lambda norm, x: norm(x, torch.arange(len(x))))
    assert found.spec.eps == 1e-6


def test_a_call_that_does_not_work_is_named():
    with pytest.raises(IdentificationError, match="call raises TypeError"):
        identify(nn.LayerNorm(6), 6, call=lambda norm, x: norm(x, 3))


def test_several_tensors():
    def both(x):
        return F.rms_norm(x, (6,), eps=1e-6), x

    with pytest.raises(IdentificationError, match=r"that at 0 is a norm of its input; pass call=.* norm\(x\)\[0\]"):
        identify(both, 6)
    assert identify(both, 6, call=lambda norm, x: norm(x)[0]).spec.eps == 1e-6
    assert identify(lambda x: (x, x), 6).verdict == "not a norm"
    assert identify(nn.GRU(6, 6), 6).verdict == "not a norm"


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (lambda x: F.rms_norm(x.to("meta"), (6,)), "returns a tensor on meta for one on cpu"),
        (lambda x: F.rms_norm(x, (6,), torch.ones(6, device="meta")), "refuses an input on cpu"),
    ],
)
def test_another_device(norm, said):
    with pytest.raises(IdentificationError, match=said):
        identify(norm, 6)


@pytest.mark.parametrize("device", ["meta", "nowhere", "cuda:99"])
def test_devices_that_cannot_be_used(device):
    with pytest.raises(IdentificationError, match="device"):
        identify(nn.LayerNorm(6), 6, device=device)


@pytest.mark.parametrize("norm", [nn.LayerNorm, 3, None, "LayerNorm", torch.ones(6)])
def test_what_is_no_norm_at_all(norm):
    with pytest.raises(KindError, match="norm must be a module or a function"):
        identify(norm, 6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool, "float32"])
def test_dtypes_that_cannot_be_used(dtype):
    with pytest.raises(DtypeError, match="dtype must be one of floating point"):
        identify(nn.LayerNorm(6), 6, dtype=dtype)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: x.to(torch.complex64),
        lambda x: x.int(),
        lambda x: x.sum(-1),
        lambda _x: None,
        lambda x: x.tolist(),
        lambda x: x.to_sparse(),
        lambda x: x * float("nan"),
        lambda x: torch.cat([x, x]),
    ],
)
def test_outputs_that_are_no_norms(norm):
    assert identify(norm, 6).verdict == "not a norm"


def test_what_raises_only_at_times_is_never_a_bare_exception():
    def moody(x):
        if x.abs().max() > 100:
            raise KeyError("too large")
        return F.rms_norm(x, (6,))

    with pytest.raises(NormkitError, match="too large"):
        identify(moody, 6)
