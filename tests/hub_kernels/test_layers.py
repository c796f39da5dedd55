"""Layers put in place by the real `kernels` package compute what the class they replace computes."""

from __future__ import annotations

import copy

import pytest
import torch
from kernels import Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from normkit import functional
from normkit.hub_kernels import mapping

N = 256


@pytest.fixture
def exchanged(monkeypatch):
    """Let `kernels` exchange the forward of a module, and take the class's mark back afterwards."""

    def exchange(module, layer="RMSNorm"):
        for name in ("kernel_layer_name", "kernel_condition"):
            monkeypatch.setattr(type(module), name, None, raising=False)
        replace_kernel_forward_from_hub(type(module), layer)
        with use_kernel_mapping(mapping(), inherit_mapping=False):
            return kernelize(module, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)

    return exchange


@pytest.fixture
def calls(monkeypatch):
    """The specs that normkit is asked for."""
    asked = []
    normalize = functional.normalize

    def noted(x, spec, *rest, **options):
        asked.append(spec)
        return normalize(x, spec, *rest, **options)

    monkeypatch.setattr(functional, "normalize", noted)
    return asked


def drawn(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5)
    return module


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "layer", "cast"),
    [
        (LlamaRMSNorm, "RMSNorm", "early"),
        (Olmo2RMSNorm, "RMSNorm", "late"),
        (T5LayerNorm, "RMSNorm", "weight"),
        (GemmaRMSNorm, "RMSNormZeroCentered", "late"),
        (CohereLayerNorm, "LayerNorm", "late"),
        (nn.LayerNorm, "LayerNorm", "late"),
    ],
)
def test_each_class_keeps_its_own_conventions(exchanged, calls, make, layer, cast, dtype):
    original = drawn(make(N)).to(dtype)
    module = exchanged(copy.deepcopy(original), layer)
    x = torch.randn(64, N).to(dtype)
    y, expected = module(x), original(x)
    assert [spec.cast for spec in calls] == [cast]
    assert y.dtype == expected.dtype
    if dtype == torch.float32:
        # Both round a handful of times at values up to 6.
        torch.testing.assert_close(y, expected, rtol=2e-6, atol=2e-6)
    else:
        # A float32 kernel flips about one bfloat16 in 10,000; another cast order flips one in five.
        assert float((y != expected).double().mean()) < 1e-3


def test_gradients_reach_the_input_and_the_weight(exchanged, calls):
    original = drawn(LlamaRMSNorm(N))
    module = exchanged(copy.deepcopy(original))
    results, values, upstream = [], torch.randn(8, N), torch.randn(8, N)
    for norm in (original, module):
        x = values.clone().requires_grad_()
        norm(x).backward(upstream)
        results.append((x.grad, norm.weight.grad))
    assert len(calls) == 1
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_settings_are_those_of_the_module_and_a_refused_input_leaves_nothing_behind(exchanged, calls):
    module = exchanged(nn.Sequential(nn.LayerNorm(N, eps=1e-3), nn.LayerNorm(N, eps=1e-12))[0], "LayerNorm")
    module(torch.randn(2, N))
    assert calls[0].eps == 1e-3
    module = exchanged(nn.LayerNorm(N), "LayerNorm")
    with pytest.raises(RuntimeError, match="Given normalized_shape"):
        module(torch.randn(2, N + 1))
    assert len(calls) == 1
    module(torch.randn(2, N))
    assert len(calls) == 2


def test_what_no_spec_describes_keeps_its_own_forward(exchanged, calls):
    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(N))

        def forward(self, x):
            return torch.tanh(self.weight * x)

    module = exchanged(Clipped())
    x = torch.randn(2, N)
    assert torch.equal(module(x), torch.tanh(x))
    assert calls == []


@pytest.mark.slow
def test_under_torch_compile(exchanged):
    module = exchanged(drawn(LlamaRMSNorm(N)))
    x = torch.randn(4, N)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))


def test_the_state_dict_stays(exchanged):
    original = LlamaRMSNorm(N)
    names = list(original.state_dict())
    module = exchanged(original)
    module(torch.randn(2, N))
    assert list(module.state_dict()) == names
    assert torch.equal(copy.deepcopy(module)(torch.ones(1, N)), module(torch.ones(1, N)))


@pytest.mark.slow
def test_settings_that_change_later_are_followed(exchanged, calls):
    original = drawn(nn.Sequential(nn.LayerNorm(N))[0])
    module = exchanged(copy.deepcopy(original), "LayerNorm")
    x = torch.randn(8, N)
    module(x)
    for norm in (original, module):
        norm.eps = 0.5
    torch.testing.assert_close(module(x), original(x), rtol=2e-6, atol=2e-6)
    for norm in (original, module):
        norm.bias = None
    torch.testing.assert_close(module(x), original(x), rtol=2e-6, atol=2e-6)
    assert [(spec.eps, spec.has_bias) for spec in calls] == [(1e-5, True), (0.5, True), (0.5, False)]


def test_what_differs_in_training_keeps_its_own_forward(exchanged):
    class Doubled(nn.LayerNorm):
        def forward(self, input):
            return (2 if self.training else 1) * super().forward(input)

    module = exchanged(Doubled(N).eval(), "LayerNorm")
    x = torch.randn(8, N)
    expected = torch.layer_norm(x, (N,))
    torch.testing.assert_close(module(x), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(module.train()(x), 2 * expected, rtol=2e-6, atol=2e-6)


class FixedLength(nn.Module):
    """Right at one width only: it divides by that."""

    def forward(self, hidden_states):
        return hidden_states * torch.rsqrt(hidden_states.square().sum(-1, keepdim=True) / N + 1e-6)


def test_each_width_is_identified(exchanged):
    module = exchanged(FixedLength())
    for n in (N, N // 2, N):
        x = torch.randn(4, n)
        torch.testing.assert_close(module(x), FixedLength()(x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 16, 16, 16), (2, 16, 5, 7)])
def test_channels_first_is_not_taken_for_the_last_axis(exchanged, shape):
    class ChannelsFirst(nn.LayerNorm):
        def forward(self, input):
            return super().forward(input.movedim(1, -1)).movedim(-1, 1)

    original = drawn(ChannelsFirst(16))
    module = exchanged(copy.deepcopy(original), "LayerNorm")
    x = torch.randn(shape)
    torch.testing.assert_close(module(x), original(x), rtol=2e-6, atol=2e-6)


def test_axes_that_share_statistics_are_seen_in_the_input_that_has_them(exchanged):
    class OverTime(nn.Module):
        def forward(self, hidden_states):
            axes = tuple(range(1, hidden_states.dim()))
            return hidden_states * torch.rsqrt(hidden_states.square().mean(axes, keepdim=True) + 1e-6)

    module = exchanged(OverTime())
    for shape in ((4, N), (4, 5, N), (4, 1, N)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), OverTime()(x), rtol=2e-6, atol=2e-6)


def test_the_input_is_taken_by_the_name_that_the_class_gives_it(exchanged):
    x = torch.randn(2, N)
    module = exchanged(LlamaRMSNorm(N))
    assert torch.equal(module(hidden_states=x), module(x))
    module = exchanged(nn.LayerNorm(N), "LayerNorm")
    assert torch.equal(module(input=x), module(x))
