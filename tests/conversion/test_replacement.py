"""A module's class changes and nothing else does; going back is going back to the class."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normkit
from normkit import layers, specs
from normkit.conversion.replacement import Formula, is_converted, is_normkit, restore, swap
from normkit.conversion.swapping import convert
from normkit.errors import UseError

LLAMA = Formula(specs.LLAMA, "weight", None, "hidden_states")
LAYER = Formula(specs.TORCH_LAYER_NORM, "weight", "bias", "input")
RMS = Formula(specs.TORCH_RMS_NORM, "weight", None, "x")


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = LlamaRMSNorm(8)

    def forward(self, x, gate=None):
        return self.inner(x) if gate is None else self.inner(x) * gate


def llama():
    module = LlamaRMSNorm(8)
    nn.init.normal_(module.weight)
    return module


@pytest.mark.parametrize(
    ("module", "formula", "ours"),
    [(nn.LayerNorm(8), LAYER, layers.LayerNorm), (nn.RMSNorm(8, eps=1e-3), RMS, layers.RMSNorm)],
)
def test_torchs_norms_become_normkits(module, formula, ours):
    x, original = torch.randn(3, 8), type(module)
    expected = module(x)
    swap(module, formula)
    assert type(module) is ours
    torch.testing.assert_close(module(x), expected)
    restore(module)
    assert type(module) is original
    assert not is_converted(module)
    assert torch.equal(module(x), expected)


def test_another_class_keeps_all_but_its_forward():
    module = llama()
    before, names = dict(vars(module)), [name for name, _ in module.named_parameters()]
    swap(module, LLAMA)
    assert isinstance(module, LlamaRMSNorm)
    assert "LlamaRMSNorm" in type(module).__name__
    assert [name for name, _ in module.named_parameters()] == names
    assert module.variance_epsilon == 1e-6
    assert str(specs.LLAMA) in repr(module)
    x = torch.randn(3, 8)
    expected = normkit.normalize(x, specs.LLAMA, module.weight)
    assert torch.equal(module(x), expected)
    assert torch.equal(module(hidden_states=x), expected)
    with pytest.raises(TypeError, match="unexpected keyword argument 'states'"):
        module(states=x)
    restore(module)
    assert type(module) is LlamaRMSNorm
    assert vars(module) == before


def test_a_call_with_more_than_one_argument_goes_to_the_class():
    module = Gated()
    x, gate = torch.randn(2, 3, 8)
    expected = module(x, gate)
    swap(module, Formula(specs.LLAMA, "inner.weight", None, "x"))
    assert torch.equal(module(x, gate), expected)
    assert torch.equal(module(x, gate=gate), expected)
    assert torch.equal(module(x), normkit.normalize(x, specs.LLAMA, module.inner.weight))


def test_a_parameter_of_other_shape_is_laid_along_the_channels():
    class ChannelNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Parameter(torch.randn(4, 1, 1))

        def forward(self, x):
            return self.g * x

    module, x = ChannelNorm(), torch.randn(2, 4, 3, 5)
    spec = specs.CONVNEXT.replace(has_bias=False)
    swap(module, Formula(spec, "g", None, "x", keeps_layout=True))
    y = module(x)
    assert torch.equal(y, normkit.normalize(x, spec, module.g.flatten()))
    assert y.is_contiguous()
    last = x.to(memory_format=torch.channels_last)
    assert module(last).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(module(last), y)
    restore(module)
    swap(module, Formula(spec, "g", None, "x"))
    assert not module(x).is_contiguous()


@pytest.mark.parametrize(("module", "formula"), [(llama(), LLAMA), (nn.LayerNorm(8), LAYER)])
def test_copies_and_pickles_are_converted_and_can_go_back(module, formula):
    original, x = type(module), torch.randn(3, 8)
    swap(module, formula)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)]
    for twin in twins:
        assert type(twin) is type(module)
        assert twin.weight is not module.weight
        assert torch.equal(twin(x), module(x))
        restore(twin)
        assert type(twin) is original
        assert is_converted(module)


@pytest.mark.parametrize(("module", "formula"), [(llama(), LLAMA), (nn.LayerNorm(8), LAYER)])
def test_what_was_wrapped_around_the_class_stays(module, formula):
    original = type(module)
    swap(module, formula)
    parametrizations.weight_norm(module, dim=None)
    assert type(module).__name__ == f"Parametrized{type(module).__bases__[0].__name__}"
    x = torch.randn(3, 8)
    expected = module(x)
    restore(module)
    assert type(module).__bases__ == (original,)
    assert type(module).__name__ == f"Parametrized{original.__name__}"
    assert not is_normkit(module)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.slow
def test_compile_takes_the_whole_graph():
    module, x = llama(), torch.randn(3, 8, requires_grad=True)
    swap(module, LLAMA)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    y, expected = compiled(x), module(x)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    wanted = [x, module.weight]
    for mine, other in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("tool", ["script", "trace", "fx", "fx of the norm alone"])
@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm, LlamaRMSNorm, Gemma3RMSNorm])
def test_what_writes_a_model_down_writes_what_it_writes_without_normkit(cls, tool):
    """Scripting ended at the annotations, fx at the checks of arguments, and a trace had no gradients."""
    module, x = nn.Sequential(nn.Linear(8, 8), random_gain(cls(8))), torch.randn(3, 8)
    written = {
        "script": torch.jit.script,
        "trace": lambda model: torch.jit.trace(model, x),
        "fx": torch.fx.symbolic_trace,
        "fx of the norm alone": lambda model: nn.Sequential(model[0], torch.fx.symbolic_trace(model[1])),
    }[tool]
    expected = answers(written(module), x)
    assert len(convert(module).swapped) == 1
    assert is_normkit(module[1])
    for answer, wanted in zip(answers(written(module), x), expected, strict=True):
        assert torch.equal(answer, wanted)
    # The model itself is as it was.
    assert is_normkit(module[1])


def random_gain(module):
    nn.init.normal_(module.weight)
    return module


def answers(model, x):
    """The output, and the gradients of all parameters."""
    y = model(x)
    return y, *torch.autograd.grad(y.square().sum(), tuple(model.parameters()))


@pytest.mark.slow
def test_what_was_compiled_before_sees_the_change():
    module, x = llama(), torch.randn(3, 8)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    plain = compiled(x)
    # A formula that is not the module's, so that one sees which of them was computed.
    formula = Formula(specs.LLAMA.replace(eps=10.0), "weight", None, "hidden_states")
    swap(module, formula)
    assert torch.equal(compiled(x), normkit.normalize(x, formula.spec, module.weight))
    restore(module)
    assert torch.equal(compiled(x), plain)


def test_what_is_normkits_is_known():
    assert is_normkit(layers.LayerNorm(4))
    assert is_normkit(layers.Norm(specs.GEMMA, 4))
    assert not is_normkit(nn.LayerNorm(4))
    assert not is_converted(layers.LayerNorm(4))


def test_a_class_that_cannot_be_changed_is_refused():
    class Slotted(nn.Module):
        __slots__ = ("extra",)

        def __setattr__(self, name, value):
            if name == "__class__":
                raise TypeError("object layout differs")
            super().__setattr__(name, value)

    with pytest.raises(UseError, match=r"the class Slotted cannot be changed \(object layout differs\)"):
        swap(Slotted(), LLAMA)


class HandWritten(nn.Module):
    """As most people write it: under autocast some of its operations are float32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.slow
def test_under_autocast_a_norm_of_single_operations_keeps_its_own_forward():
    model = nn.Sequential(HandWritten())
    x = torch.randn(64, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    report = convert(model)
    assert report.counts["swapped"] == 1
    how = report.swapped[0].computed_by
    # Without vector instructions PyTorch's operations may round as the kernel does: then the kernel computes there too.
    assert how in ("kernel", "kernel; under autocast its own forward")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)
    assert type(model[0]).__name__ == "NormkitHandWritten"
    assert ("own forward" in str(report)) is how.endswith("own forward")
