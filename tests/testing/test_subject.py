"""What is tested is a copy; its parameters are found, its shape is known, and what it refuses is kept apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.errors import InputError, ShapeError
from normkit.testing import subject
from normkit.testing.subject import RefusedError, Subject

N = 16


def of(norm, spec=specs.TORCH_LAYER_NORM, shape=None, weight=None, bias=None, call=None, device=None):
    return Subject(norm, spec, shape, weight, bias, call, device, torch.float32)


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
    module = norm.copy(torch.bfloat16, values)
    assert torch.equal(module.weight, values["weight"].bfloat16())


def test_a_copy_keeps_its_mode():
    assert not of(nn.LayerNorm(N).eval()).copy(torch.float32, {}).training
    adapted = of(nn.LayerNorm(N).eval(), weight="weight", bias="bias", call=lambda norm, x: norm(x))
    assert not adapted.copy(torch.float32, {}).training
    assert adapted.weight_name == "norm.weight"


def test_what_is_refused():
    x = torch.ones(2, N)
    with pytest.raises(RefusedError, match=r"RuntimeError: mat1 and mat2"):
        subject.call(nn.Linear(3, 3), x)
    with pytest.raises(RefusedError, match="a tuple; call="):
        subject.call(nn.LSTM(N, N), x)
    with pytest.raises(RefusedError, match=r"shape \(2, 3\)"):
        subject.call(nn.Linear(N, 3), x)


def test_gradients_by_name():
    found = subject.gradients(nn.Linear(2, 2, bias=False), torch.ones(1, 2), torch.ones(1, 2))
    assert set(found) == {"", "weight"}
    with pytest.raises(RefusedError, match="NotImplementedError"):
        subject.gradients(nn.Module(), torch.ones(1, 2), torch.ones(1, 2))


def test_what_cannot_be_copied():
    with pytest.raises(InputError, match="on the meta device"):
        of(nn.LayerNorm(N, device="meta"))
    norm = nn.LayerNorm(N)
    norm.last = norm(torch.ones(1, N))
    with pytest.raises(InputError, match="a LayerNorm cannot be copied"):
        of(norm)


def test_frozen_parameters_are_tested_like_others():
    norm = nn.LayerNorm(N).requires_grad_(False)
    module = of(norm).copy(torch.float32, {})
    assert module.weight.requires_grad
    assert not norm.weight.requires_grad


def test_without_parameters_a_shape_is_needed():
    with pytest.raises(ShapeError, match="give shape="):
        of(nn.Identity(), specs.OLMO)
