"""`identify_rows`: what recorded rows show is right, and what they do not show is open."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

import normkit as nk
from normkit.conventions.rows import CENTRINGS
from normkit.errors import InputError
from normkit.identification.recorded_rows import identify_rows
from normkit.identification.spec_readings import CONVENTIONS

PRESETS = {
    name: spec
    for name, spec in vars(nk.specs).items()
    if isinstance(spec, nk.NormSpec) and spec.axes == (-1,) and spec.groups == 1
}


def drawn(dtype=torch.float32, n=48, rows=512, mean=0.2, scales=None):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, n, generator=generator) + mean
    if scales is not None:
        x = x * torch.logspace(*scales, rows)[:, None]
    weight, bias = (torch.rand(n, generator=generator) + 0.5 for _ in range(2))
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def recorded(spec, x, weight, bias):
    """The norm's output, and the parameters that it has."""
    given = weight if spec.has_weight else None, bias if spec.has_bias else None
    return nk.normalize(x, spec, *given), *given


def decided(passport):
    """The fields that the passport claims."""
    is_open = {field for name in passport.undecidable if name in CONVENTIONS for field in CONVENTIONS[name]}
    is_open |= {field for name, fields in CONVENTIONS.items() if name not in passport.readings for field in fields}
    return {field: value for field, value in passport.spec.to_json().items() if field not in is_open}


def assert_nothing_wrong(passport, spec):
    assert passport.verdict == "norm", passport.evidence
    expected = spec.to_json()
    assert {field: expected[field] for field in decided(passport)} == decided(passport), passport.evidence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_parameters", [True, False])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.sampled(6)
@pytest.mark.slow
def test_of_every_preset_no_field_is_wrong(name, with_parameters, dtype):
    spec = PRESETS[name]
    x, weight, bias = drawn(dtype)
    if spec.weight_offset:
        weight = weight - 1
    y, *parameters = recorded(spec, x, weight, bias)
    passport = identify_rows(x, y, *(parameters if with_parameters else ()))
    assert_nothing_wrong(passport, spec)
    assert {"centre_numerator", "centre_statistics", "groups"} <= decided(passport).keys()


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_rows_of_many_lengths_show_eps_and_its_place(placement, eps):
    spec = nk.specs.LLAMA.replace(eps=eps, eps_placement=placement)
    x, weight, bias = drawn(scales=(-7, 1))
    y, *parameters = recorded(spec, x, weight, bias)
    passport = identify_rows(x, y, *parameters)
    assert decided(passport)["eps"] == eps
    assert decided(passport)["eps_placement"] == placement


def test_rows_that_do_not_feel_eps_say_so_and_name_those_that_would():
    spec = nk.specs.LLAMA.replace(eps=1e-12)
    x, weight, bias = drawn()
    passport = identify_rows(x, *recorded(spec, x, weight, bias))
    assert "rows of a root mean square of 1e-3 show an eps of 1e-6" in passport.undecidable["eps"]


@pytest.mark.parametrize("pair", CENTRINGS)
def test_each_centring_is_told(pair):
    spec = nk.specs.TORCH_LAYER_NORM.replace(centre_numerator=pair[0], centre_statistics=pair[1])
    x, weight, bias = drawn()
    x = x + torch.linspace(-1, 1, len(x))[:, None]
    passport = identify_rows(x, *recorded(spec, x, weight, bias))
    assert_nothing_wrong(passport, spec)
    assert (decided(passport)["centre_numerator"], decided(passport)["centre_statistics"]) == pair


def test_rows_without_a_mean_leave_the_centring_open():
    x, weight, bias = drawn()
    x = x.double()
    x = x - x.mean(-1, keepdim=True)
    passport = identify_rows(x, *recorded(nk.specs.TORCH_LAYER_NORM, x, weight.double(), bias.double()))
    assert "rows with a mean tell" in passport.undecidable["centring"]


@pytest.mark.parametrize("groups", [2, 6])
def test_groups_are_told(groups):
    spec = nk.specs.TORCH_LAYER_NORM.replace(groups=groups)
    x, weight, bias = drawn()
    passport = identify_rows(x, *recorded(spec, x, weight, bias))
    assert_nothing_wrong(passport, spec)
    assert decided(passport)["groups"] == groups


def test_a_gain_before_normalizing_is_told():
    spec = nk.specs.LLAMA.replace(weight_placement="before")
    x, weight, bias = drawn()
    passport = identify_rows(x, *recorded(spec, x, weight, bias))
    assert decided(passport)["weight_placement"] == "before"


@pytest.mark.parametrize(("added", "offset"), [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (-1.0, -1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_to_the_stored_weight_is_told(added, offset, dtype):
    x, weight, _ = drawn(dtype)
    stored = weight if added >= 0 else weight + 1
    y = nk.rms_norm(x.float(), (48,), stored.float() + added, eps=1e-6).to(dtype)
    assert decided(identify_rows(x, y, stored))["weight_offset"] == offset


def test_equal_weights_do_not_tell_whether_they_act():
    x, _, _ = drawn()
    ones = torch.ones(48)
    for weight in (ones, 0 * ones):
        passport = identify_rows(x, nk.rms_norm(x, (48,), eps=1e-6), weight)
        assert "gain" in passport.undecidable
        assert_nothing_wrong(passport, nk.specs.LLAMA)


def test_a_weight_or_bias_that_does_not_act_is_told():
    x, weight, bias = drawn()
    passport = identify_rows(x, nk.layer_norm(x, (48,)), weight, bias)
    assert (decided(passport)["has_weight"], decided(passport)["has_bias"]) == (False, False)
    passport = identify_rows(x, nk.layer_norm(x, (48,), weight, bias + 0.3), weight, bias)
    assert "is not the bias that was given" in passport.undecidable["bias"]


@pytest.mark.parametrize("factor", [-1.0, 2.0, 1.3])
def test_a_factor_that_no_spec_has_is_measured(factor):
    x, weight, _ = drawn()
    passport = identify_rows(x, factor * nk.rms_norm(x, (48,), weight, eps=1e-6), weight)
    assert (passport.verdict, passport.spec) == ("norm", None)
    assert f"root mean square {factor:.6g} per unit of gain" in passport.evidence[-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["LLAMA", "TORCH_RMS_NORM", "GEMMA"])
def test_mixed_dtypes_show_where_it_rounds(name):
    spec = getattr(nk.specs, name)
    x, weight, bias = drawn(torch.bfloat16, n=96)
    weight = weight.float() - (1 if spec.weight_offset else 0)
    y, *parameters = recorded(spec, x, weight, bias)
    passport = identify_rows(x, y, *parameters)
    assert_nothing_wrong(passport, spec)
    # Where the weight is float32, a cast to its dtype is none.
    assert passport.spec.cast == spec.cast
    assert "casts" in passport.undecidable or decided(passport)["cast"] == spec.cast


def test_what_is_no_norm_is_not_called_one():
    x, weight, bias = drawn()
    assert identify_rows(x, x).verdict == "identity"
    assert identify_rows(x, x * weight + bias).verdict == "affine"
    assert identify_rows(x, nn.functional.gelu(x)).verdict == "undecidable"
    assert identify_rows(x, x.softmax(-1)).verdict == "undecidable"
    equally_long = nk.rms_norm(x, (48,), eps=0.0)
    assert "all rows are equally long" in identify_rows(equally_long, equally_long).evidence[-1]


def test_a_passport_of_rows_computes_them():
    x, weight, bias = drawn(scales=(-3, 1))
    y = nk.layer_norm(x, (48,), weight, bias)
    for parameters in ((weight, bias), ()):
        torch.testing.assert_close(identify_rows(x, y, *parameters)(x), y, rtol=1e-4, atol=1e-4)


def test_arrays_and_rows_of_several_axes_are_taken_and_broken_rows_left_out():
    x, weight, _ = drawn()
    y = nk.rms_norm(x, (48,), weight, eps=1e-3)
    y[3, 5], y[7, 0] = torch.nan, torch.inf
    arrays = x.reshape(4, -1, 48).numpy(), y.reshape(4, -1, 48).numpy(), weight.numpy()
    passport = identify_rows(*arrays)
    assert decided(passport)["eps"] == 1e-3
    assert "2 rows that are zero, or hold a NaN or an infinity, were left out" in passport.evidence


ROWS = numpy.ones((9, 4), dtype=numpy.float32)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((ROWS, ROWS[:, :3]), r"one shape \(..., n\), got \(9, 4\) and \(9, 3\)"),
        ((ROWS, None), r"one shape \(..., n\), got \(9, 4\) and None"),
        ((ROWS[:7], ROWS[:7]), "at least 8 finite rows of 2 features or more, got 7 of 4"),
        ((ROWS * numpy.nan, ROWS), "got 0 of 4"),
        ((ROWS.astype(int), ROWS), "x must be a tensor or an array of floating point, got int64"),
        (("rows", ROWS), "x must be a tensor or an array of floating point, got 'rows'"),
        ((ROWS, ROWS, ROWS[0, :3]), r"weight must have shape \(4,\) as the last axis of x, got \(3,\)"),
    ],
)
def test_bad_input_is_one_line(given, told):
    with pytest.raises(InputError, match=told) as caught:
        identify_rows(*given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_along_one_direction_show_nothing(dtype):
    x, weight, _ = drawn()
    x = x[:1] * torch.linspace(-3, 3, 100)[:, None]
    passport = identify_rows(x.to(dtype), nk.rms_norm(x, (48,), weight).to(dtype), weight.to(dtype))
    assert passport.verdict == "undecidable"
    assert "multiples of one row" in passport.evidence[-1]


# What the bits of 16-bit outputs decide


def rows_of_a_trained_model(spec, size, dtype=torch.bfloat16, mean=0.0):
    """Rows of one size that have almost no mean, as in a trained model, and one large feature that hardly varies."""
    generator = torch.Generator().manual_seed(3)
    x = size * (torch.randn(160, 192, generator=generator) + mean)
    x = x - x.mean(-1, keepdim=True) + mean * size
    x[:, 7] = 20 * size * (1 + 0.02 * torch.randn(160, generator=generator))
    x = x * (1 + 0.3 * torch.rand(160, 1, generator=generator))
    weight = torch.rand(192, generator=generator) + 0.5 - spec.weight_offset
    x, weight = x.to(dtype), weight.to(dtype)
    return x, nk.normalize(x, spec, weight), weight


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("spec", [nk.specs.LLAMA, nk.specs.GEMMA, nk.specs.OLMO2], ids=["llama", "gemma", "olmo2"])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_short_rows_show_centring_divisor_and_eps_by_their_bits(spec, eps):
    spec = spec.replace(eps=eps)
    passport = identify_rows(*rows_of_a_trained_model(spec, 0.02))
    assert_nothing_wrong(passport, spec)
    assert {"centre_numerator", "correction", "reduction", "weight_offset"} <= decided(passport).keys()
    assert (decided(passport)["eps"], decided(passport)["eps_placement"]) == (eps, "inside")
    assert "bit for bit" in passport.readings["eps"].evidence[-1]


@pytest.mark.slow
def test_long_rows_leave_eps_open_and_so_the_two_words_for_one_divisor():
    passport = identify_rows(*rows_of_a_trained_model(nk.specs.LLAMA, 5.0))
    assert_nothing_wrong(passport, nk.specs.LLAMA)
    assert {"eps", "divisor"} <= passport.undecidable.keys()
    assert passport.readings["divisor"].value == {"correction": 0}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("size", [0.02, 0.1])
def test_an_eps_that_is_not_usual_is_not_taken_for_one_that_is(size):
    spec = nk.specs.LLAMA.replace(eps=1.7e-5)
    assert_nothing_wrong(identify_rows(*rows_of_a_trained_model(spec, size)), spec)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spec", [nk.specs.LLAMA, nk.specs.GEMMA], ids=["llama", "gemma"])
def test_roundings_of_a_feature_that_hardly_varies_are_no_bias(spec, dtype):
    passport = identify_rows(*rows_of_a_trained_model(spec, 1.0, dtype))
    assert_nothing_wrong(passport, spec)
    assert "no bias, or one of zeros" in passport.undecidable["bias"]
    assert decided(passport)["weight_offset"] == spec.weight_offset


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_repeat_prove_no_more_than_once(dtype):
    x, y, weight = rows_of_a_trained_model(nk.specs.LLAMA, 1.0, dtype)
    passport = identify_rows(x[:20].repeat(30, 1), y[:20].repeat(30, 1), weight)
    assert_nothing_wrong(passport, nk.specs.LLAMA)
    assert "bias" in passport.undecidable


def test_a_gain_with_a_zero_still_shows_its_offset():
    x, _, weight = rows_of_a_trained_model(nk.specs.GEMMA, 1.0)
    weight[:3] = -1
    passport = identify_rows(x, nk.normalize(x, nk.specs.GEMMA, weight), weight)
    assert decided(passport)["weight_offset"] == 1.0


@pytest.mark.slow
def test_bits_that_no_program_gives_decide_nothing():
    x, y, weight = rows_of_a_trained_model(nk.specs.LLAMA, 0.02)
    flipped = (y.view(torch.int16) ^ (torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.1)).view(
        y.dtype
    )
    passport = identify_rows(x, flipped, weight)
    assert {"eps", "casts"} <= passport.undecidable.keys()
    assert_nothing_wrong(passport, nk.specs.LLAMA)


def test_a_feature_that_is_nearly_the_whole_row_has_no_bias():
    """As behind the blocks of Gemma 3: one feature of 640 is nearly as long as its row, in all rows but the first."""
    x, weight, _ = drawn(n=64, scales=(-2.5, -0.8))
    x[1:, 7] = 40 * x.square().mean(1).sqrt()[1:] * torch.linspace(0.9, 1.1, 511)
    weight[7] = 30.0
    passport = identify_rows(x, nk.rms_norm(x, (64,), weight, 1e-6), weight)
    assert passport.readings["bias"].undecidable is not None
    assert (passport.spec.has_bias, passport.spec.eps, passport.spec.weight_offset) == (False, 1e-6, 0.0)


@pytest.mark.parametrize("axes", [(4, 6), (3, 4, 6)])
def test_rows_of_several_axes_are_told_by_the_gain(axes):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 3, 4, 6, generator=generator) * torch.logspace(-4, 1, 64)[:, None, None, None] + 1e-3
    norm = nn.LayerNorm(axes)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3, generator=generator)
    given = norm.weight.detach(), norm.bias.detach()
    passport = identify_rows(x, norm(x).detach(), *given)
    assert_nothing_wrong(passport, nk.identify(norm, (64, 3, 4, 6)).spec)
    assert passport.spec.axes == tuple(range(-len(axes), 0))
    assert decided(passport)["eps"] == pytest.approx(1e-5, rel=1e-3)
    assert torch.equal(passport.weight, given[0])


def test_a_gain_for_each_head_is_told():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(256, 3, 16, generator=generator) * torch.logspace(-4, 1, 256)[:, None, None]
    weight = 1 + 0.3 * torch.randn(3, 16, generator=generator)
    passport = identify_rows(x, nk.reference.forward(x, nk.specs.LLAMA, weight), weight)
    assert_nothing_wrong(passport, nk.specs.LLAMA)
    assert (passport.spec.axes, passport.spec.groups, passport.weight.shape) == ((-1,), 1, (3, 16))


def test_norms_over_channels_get_no_wrong_field():
    x = torch.randn(64, 8, 4, 6, generator=torch.Generator().manual_seed(5)) + 0.3
    for norm in (nn.GroupNorm(2, 8), nn.GroupNorm(1, 8), nn.InstanceNorm2d(8, affine=True)):
        nn.init.normal_(norm.weight, 1.0, 0.3)
        y = norm(x).detach()
        assert identify_rows(x, y).spec is None
        with pytest.raises(
            InputError, match=r"must have shape \(6,\) as the last axis of x, got \(8,\); if it has a num"
        ):
            identify_rows(x, y, norm.weight.detach())
