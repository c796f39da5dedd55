"""How a norm is called, and one clear line where it cannot be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import specs
from normkit.errors import DtypeError, IdentificationError, KindError, NormkitError, ShapeError
from normkit.identification import calling
from normkit.identification.behaviour import identify
from normkit.identification.specimen import Specimen


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
