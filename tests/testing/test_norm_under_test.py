"""What is tested is a copy: its parameters are found and set, its inputs made, and what it refuses is kept apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.errors import InputError, ModelError, ShapeError
from normkit.testing.norm_under_test import RefusedError, Subject

N = 16


def of(norm, spec=specs.TORCH_LAYER_NORM, shape=None, weight=None, bias=None, call=None, device=None):
    return Subject(norm, spec, shape, weight, bias, call, device, torch.float32)


def under_test(norm, spec, dtype=torch.float32, shape=None, parameter_dtype=None):
    return of(norm, spec, shape).in_dtype(spec, dtype, parameter_dtype)


@pytest.mark.parametrize(
    ("norm", "spec", "shape", "expected"),
    [
        (nn.LayerNorm(N), specs.TORCH_LAYER_NORM, None, (4, 3, N)),
        (nn.LayerNorm(N), specs.TORCH_LAYER_NORM, N, (4, 3, N)),
        (nn.LayerNorm(N), specs.TORCH_LAYER_NORM, (9, N), (9, N)),
        (nn.LayerNorm((2, N)), specs.TORCH_LAYER_NORM.replace(axes=(-2, -1)), None, (4, 3, 2, N)),
        (nn.GroupNorm(1, N), specs.POOLFORMER, None, (4, N, 4, 3)),
    ],
)
def test_shapes(norm, spec, shape, expected):
    assert of(norm, spec, shape).shape == expected


def test_parameters_by_name_by_behaviour_and_as_given():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.ones(N))

        def forward(self, x):
            return nn.functional.layer_norm(x, (N,), self.b, self.a)

    plain = of(nn.LayerNorm(N))
    assert (plain.weight_name, plain.bias_name) == ("weight", "bias")
    found = of(Swapped())
    assert (found.weight_name, found.bias_name) == ("b", "a")
    given = of(Swapped(), weight="a", bias="b")
    assert (given.weight_name, given.bias_name) == ("a", "b")
    none = of(nn.LayerNorm(N), specs.OLMO)
    assert (none.weight_name, none.bias_name) == (None, None)
    with pytest.raises(InputError, match="no parameter 'c'; it has a, b"):
        of(Swapped(), weight="c")


def test_all_parameters_get_values_also_those_that_the_spec_does_not_have():
    norm = of(nn.LayerNorm(N), specs.COHERE)
    values = norm.draw(1.0, torch.Generator().manual_seed(0))
    assert set(values) == {"weight", "bias"}
    # Some are negative, so that a gain's sign shows.
    gains = values["weight"] + 1.0
    assert bool(((gains.abs() >= 0.5) & (gains.abs() <= 1.5)).all())
    assert 0 < int((gains < 0).sum()) < N / 2
    assert float(values["bias"].min()) >= 0.5
    module = norm.in_dtype(specs.COHERE.replace(weight_offset=1.0), torch.bfloat16).module
    assert torch.equal(module.weight, values["weight"].bfloat16())


def test_a_copy_keeps_its_mode():
    assert not under_test(nn.LayerNorm(N).eval(), specs.TORCH_LAYER_NORM).module.training
    adapted = of(nn.LayerNorm(N).eval(), weight="weight", bias="bias", call=lambda norm, x: norm(x))
    assert not any(
        module.training for module in adapted.in_dtype(specs.TORCH_LAYER_NORM, torch.float32).module.modules()
    )
    assert adapted.weight_name == "norm.weight"


def test_what_is_refused():
    x = torch.ones(2, N)
    with pytest.raises(RefusedError, match=r"RuntimeError: mat1 and mat2"):
        under_test(nn.Linear(3, 3), specs.OLMO, shape=N).y(x)
    with pytest.raises(RefusedError, match="a tuple; call="):
        under_test(nn.LSTM(N, N), specs.OLMO, shape=N).y(x)
    with pytest.raises(RefusedError, match=r"shape \(2, 3\)"):
        under_test(nn.Linear(N, 3), specs.OLMO, shape=N).y(x)


def test_gradients_by_name():
    ones = torch.ones(1, 2)
    assert set(under_test(nn.Linear(2, 2, bias=False), specs.OLMO, shape=2).all_gradients(ones, ones)) == {"", "weight"}
    with pytest.raises(RefusedError, match="NotImplementedError"):
        under_test(nn.Module(), specs.OLMO, shape=2).all_gradients(ones, ones)


def test_what_cannot_be_copied():
    with pytest.raises(InputError, match="on the meta device"):
        of(nn.LayerNorm(N, device="meta"))
    norm = nn.LayerNorm(N)
    norm.last = norm(torch.ones(1, N))
    with pytest.raises(ModelError, match="a LayerNorm cannot be copied"):
        under_test(norm, specs.TORCH_LAYER_NORM)


def test_frozen_parameters_are_tested_like_others():
    norm = nn.LayerNorm(N).requires_grad_(False)
    assert under_test(norm, specs.TORCH_LAYER_NORM).module.weight.requires_grad
    assert not norm.weight.requires_grad


def test_without_parameters_a_shape_is_needed():
    with pytest.raises(ShapeError, match="give shape="):
        of(nn.Identity(), specs.OLMO)


def test_everything_has_its_dtype():
    half = under_test(nn.LayerNorm(8), specs.TORCH_LAYER_NORM, torch.float16)
    assert half.is_half
    assert half.normal(3).dtype == half.weight.dtype == half.module.weight.dtype == torch.float16
    assert half.words == "float16"
    mixed = under_test(nn.LayerNorm(8), specs.TORCH_LAYER_NORM, torch.bfloat16, parameter_dtype=torch.float32)
    assert (mixed.normal(3).dtype, mixed.weight.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(mixed.module.weight, mixed.weight)


def test_the_same_numbers_every_time():
    one, other = (under_test(nn.LayerNorm(8), specs.TORCH_LAYER_NORM) for _ in range(2))
    assert torch.equal(one.normal(2), other.normal(2))
    assert torch.equal(one.weight, other.weight)


def test_expected_is_the_program_in_sixteen_bits_and_exact_in_thirty_two():
    half = under_test(nn.RMSNorm(8, eps=1e-6), specs.LLAMA, torch.bfloat16)
    x = half.normal(4)
    assert torch.equal(half.expected(x).value, half.program(x).double())
    assert torch.equal(half.expected(x).size, half.truth(x).size)
    full = under_test(nn.RMSNorm(8, eps=1e-6), specs.LLAMA)
    assert torch.equal(full.expected(x).value, full.truth(x).value)


def test_the_input_stays_and_gradients_come_back():
    full = under_test(nn.ReLU(inplace=True), specs.OLMO, shape=(2, 4))
    x = -full.normal(2).abs()
    assert bool((full.y(x) == 0).all())
    assert bool((x < 0).all())
    dx, dweight, dbias = full.gradients(-x, torch.ones_like(x))
    assert bool((dx == 1).all())
    assert (dweight, dbias) == (None, None)


@pytest.mark.parametrize(
    ("spec", "felt"),
    [
        (specs.OLMO2, 1e-3),
        (specs.TORCH_RMS_NORM, 2**-11.5),
        (specs.OLMO2.replace(eps_placement="outside"), 1e-6),
        (specs.L2_NORM, 1e-12 / 4),
        (specs.OLMO2.replace(eps=0.0), 0.0),
    ],
)
def test_which_rows_feel_eps(spec, felt):
    assert math.isclose(under_test(nn.RMSNorm(16), spec, shape=(2, 16)).felt(), felt)


def test_samples_are_bounded_by_rows_and_by_elements():
    narrow = under_test(nn.LayerNorm(16), specs.TORCH_LAYER_NORM)
    assert narrow.row_length == 16
    assert narrow.samples(300, 1 << 20) == 100
    assert narrow.samples(1 << 16, 480) == 10
    assert narrow.samples(1, 1) == 1
