"""What is a norm is found by what it does, on inputs that its parameters suit; what is none is not."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import specs
from normkit.conversion.candidates import Search
from normkit.conversion.swapping import convert
from normkit.identification import finder
from normkit.identification.tracing import trace


class Square(nn.Module):
    """An RMSNorm with a name that says nothing, and a parameter that does not either."""

    def __init__(self, *sizes: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(sizes))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Square(24)

    def forward(self, x):
        return self.inner(x)


class Gated(Square):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * F.silu(gate))


class Adaptive(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n, elementwise_affine=False)
        self.scale = nn.Linear(n, n)

    def forward(self, x, condition):
        return self.norm(x) * (1 + self.scale(condition))


class Fixed(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("gain", torch.linspace(0.5, 1.5, n))

    def forward(self, x):
        return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class ByDimensions(nn.Module):
    """Over the channels of an image, over the features of a sequence."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        if x.dim() == 3:
            return F.layer_norm(x, x.shape[-1:], self.weight)
        return F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight).permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """As `nn.LayerNorm` between two permutations; its output lies in memory with the channels last."""

    def __init__(self, n, shape=()):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(n, *shape))
        self.beta = nn.Parameter(torch.zeros(n, *shape))

    def forward(self, x):
        rows = x.movedim(1, -1)
        gamma, beta = self.gamma.flatten(), self.beta.flatten()
        return F.layer_norm(rows, gamma.shape, gamma, beta, 1e-6).movedim(-1, 1)


class Dense(ChannelNorm):
    def forward(self, x):
        return super().forward(x).contiguous()


class Summed(Square):
    """A norm of the sum of its two inputs."""

    def forward(self, x, residual):
        return super().forward(x + residual)


def find(module, paths=("a",), calls=None):
    return Search(calls or {}).find(module, paths)


FOUND = {
    "LayerNorm": (nn.LayerNorm(24), specs.TORCH_LAYER_NORM, ("weight", "bias", "input")),
    "LayerNorm without bias": (nn.LayerNorm(24, bias=False), specs.MODERNBERT, ("weight", None, "input")),
    "LayerNorm without parameters": (
        nn.LayerNorm(24, elementwise_affine=False),
        specs.OLMO,
        (None, None, "input"),
    ),
    "LayerNorm over two axes": (
        nn.LayerNorm((3, 8)),
        specs.TORCH_LAYER_NORM.replace(axes=(-2, -1)),
        ("weight", "bias", "input"),
    ),
    "RMSNorm": (nn.RMSNorm(24, eps=1e-6), specs.OLMO2, ("weight", None, "x")),
    "RMSNorm with eps=None": (nn.RMSNorm(24), specs.TORCH_RMS_NORM, ("weight", None, "x")),
    "GroupNorm": (
        nn.GroupNorm(3, 24),
        specs.TORCH_LAYER_NORM.replace(axes="all_but_batch", groups=3),
        ("weight", "bias", "input"),
    ),
    "unnamed": (Square(24), specs.LLAMA, ("g", None, "x")),
    "a head each": (Square(4, 24), specs.LLAMA, ("g", None, "x")),
    "one that wraps another": (Wrapped(), specs.LLAMA, ("inner.g", None, "x")),
    "channels first": (ChannelNorm(24), specs.CONVNEXT, ("gamma", "beta", "x")),
    "channels first, (n, 1, 1)": (ChannelNorm(24, (1, 1)), specs.CONVNEXT, ("gamma", "beta", "x")),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FOUND)
def test_norms_are_found_by_what_they_do(name):
    module, spec, names = FOUND[name]
    formula = find(module).formula
    assert formula is not None
    assert (formula.weight, formula.bias, formula.input) == names
    assert formula.spec == spec


@pytest.mark.slow
def test_the_layout_of_the_output_is_found():
    assert find(Dense(24)).formula.keeps_layout
    assert not find(ChannelNorm(24)).formula.keeps_layout


LEFT = {
    "batch": (nn.BatchNorm2d(24), r"^batch: "),
    "optional gate": (Gated(24), r"^its forward also takes gate; give example inputs$"),
    "sum": (Summed(24), r"it cannot be called with one tensor"),
    "fixed gain": (Fixed(24), r"^its gain is fixed"),
    "two layouts": (ByDimensions(24), r"^on inputs of two layouts it computes two things; give example inputs$"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_swapped_has_its_reason(name):
    module, reason = LEFT[name]
    found = find(module)
    assert found.formula is None
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(24, 24),
        nn.Embedding(24, 24),
        nn.GELU(),
        nn.Softmax(-1),
        nn.Dropout(0.5),
        nn.Identity(),
        nn.Conv2d(24, 24, 1, groups=24),
        nn.PReLU(24),
        nn.ModuleList([nn.LayerNorm(24)]),
        nn.Sequential(nn.LayerNorm(24)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_norm_is_none(module):
    found = find(module)
    assert found.formula is None
    assert found.reason is None


def called(model, *inputs):
    return {call.path: call for call in trace(model, lambda: model(*inputs)).modules}


@pytest.mark.slow
def test_a_call_settles_what_inputs_a_norm_takes():
    model = nn.ModuleDict({"a": Gated(24)})
    with torch.no_grad():
        alone = called(nn.Sequential(model["a"]), torch.randn(2, 5, 24))
    assert find(model["a"], ("0",), alone).formula.spec == specs.LLAMA
    images = called(nn.Sequential(module := ByDimensions(24)), torch.randn(2, 24, 3, 5))
    assert find(module, ("0",), images).formula.spec == specs.MODERNBERT.replace(axes=(1,))


def test_a_norm_called_with_two_tensors_is_gated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Gated(24)

        def forward(self, x):
            return self.norm(x, x.sin())

    report = convert(Model(), torch.randn(2, 5, 24))
    assert report.swapped == ()
    assert [left.reason for left in report.left_alone] == ["it is called with 2 tensors: gated or adaptive"]


@pytest.mark.slow
def test_a_norm_in_a_norm_is_part_of_it():
    class Gained(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.RMSNorm(24, eps=1e-6, elementwise_affine=False)
            self.scale = nn.Parameter(torch.rand(24) + 0.5)

        def forward(self, x):
            return self.inner(x) * self.scale

    report = convert(nn.Sequential(Gained()))
    assert [norm.path for norm in report.swapped] == ["0"]
    assert report.left_alone == ()


class Beside(nn.Module):
    def __init__(self, beside):
        super().__init__()
        self.norm, self.beside = nn.LayerNorm(24), beside

    def forward(self, x):
        return self.beside(self.norm(x))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "path"),
    [
        (Wrapped(), "0.inner"),
        (Beside(nn.Dropout(0.5)), "0.norm"),
        (Beside(nn.GELU()), "0.norm"),
        (Adaptive(24), "0.norm"),
    ],
)
def test_what_wraps_a_norm_or_holds_more_gives_its_norm(module, path):
    report = convert(nn.ModuleList([module]))
    assert [norm.path for norm in report.swapped] == [path]
    assert report.left_alone == ()


@pytest.mark.slow
def test_like_modules_are_identified_once(monkeypatch):
    seen, examine = [], finder.examine
    monkeypatch.setattr(finder, "examine", lambda *given, **named: (seen.append(given), examine(*given, **named))[1])
    model = nn.Sequential(*(Square(24) for _ in range(4)), Square(16), Square(24, eps=1e-3))
    report = convert(model)
    assert [norm.spec.eps for norm in report.swapped] == [1e-6] * 5 + [1e-3]
    assert len(seen) == 3


@pytest.mark.slow
def test_one_that_only_looks_alike_is_identified_itself():
    class Hidden(Square):
        def __init__(self, n, eps):
            super().__init__(n)
            self.hidden = [eps]

        def forward(self, x):
            self.eps, kept = self.hidden[0], self.eps
            try:
                return super().forward(x)
            finally:
                self.eps = kept

    report = convert(nn.Sequential(Hidden(24, 1e-6), Hidden(24, 1e-2)))
    assert [norm.spec.eps for norm in report.swapped] == [1e-6, 1e-2]
