"""What was found in other people's code (docs/wild/reports), named by normkit with the right field.

Each find is their formula, written out; the tests that are exhaustive ask their code, where it is installed.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers
from torch import nn
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite

import normkit as nk

pytestmark = pytest.mark.slow


def installed(module):
    """A module of a peer, or a skip."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # What a peer raises while it is imported is its own.
        pytest.skip(f"{module}: {error}")


class Graphs(nn.Module):
    """A norm of PyTorch Geometric over graphs of one size, (graphs, nodes, features), without `batch` or with it."""

    def __init__(self, norm, batched):
        super().__init__()
        self.norm, self.batched = norm, batched

    def forward(self, x):
        if not self.batched:
            return torch.stack([self.norm(graph) for graph in x])
        return self.norm(x.flatten(0, 1), torch.arange(len(x)).repeat_interleave(x.shape[1])).view_as(x)


class GraphLayerNorm(nn.Module):
    """PyTorch Geometric 2.8.1, nn/norm/layer_norm.py:83 to 106, in graph mode."""

    def __init__(self, n):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x, batch=None):
        if batch is None:
            x = x - x.mean()
            return x / (x.std(unbiased=False) + 1e-5) * self.weight + self.bias
        graphs = x.view(int(batch[-1]) + 1, -1, x.shape[-1])
        graphs = graphs - graphs.mean((-2, -1), keepdim=True)
        graphs = graphs / (graphs.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt()
        return graphs.view_as(x) * self.weight + self.bias


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("theirs", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_pyg_layer_norm_has_two_places_of_eps(theirs, batched):
    norm = (installed("torch_geometric.nn").LayerNorm if theirs else GraphLayerNorm)(16)
    spec = nk.identify(Graphs(norm, batched), (2, 6, 16)).spec
    assert (spec.eps, spec.eps_placement) == (1e-5, "inside" if batched else "outside")
    assert spec.axes == (-2, -1)


class Format(nn.Module):
    """A module that is given its input in one memory format."""

    def __init__(self, module, memory_format):
        super().__init__()
        self.module, self.memory_format = module, memory_format

    def forward(self, x):
        return self.module(x.contiguous(memory_format=self.memory_format))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_torchs_group_norm_cancels_in_channels_last(memory_format):
    passport = nk.identify(Format(nn.GroupNorm(4, 16), memory_format), (2, 16, 32, 32))
    assert passport.spec.groups == 4
    assert passport.readings["conditioning"].value["cancels"] is (memory_format is torch.channels_last)


class OnePass(nn.Module):
    """labml-nn 0.5.1, normalization/layer_norm/__init__.py:114 to 128."""

    def __init__(self, n):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        mean = x.mean(dim=[-1], keepdim=True)
        variance = (x**2).mean(dim=[-1], keepdim=True) - mean**2
        return self.gain * (x - mean) / torch.sqrt(variance + 1e-5) + self.bias


@pytest.mark.parametrize("theirs", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_labmls_layer_norm_cancels(theirs):
    norm = (installed("labml_nn.normalization.layer_norm").LayerNorm if theirs else OnePass)(64)
    passport = nk.identify(norm, 64)
    assert passport.spec.eps_placement == "inside"
    assert passport.readings["conditioning"].value["cancels"]
    assert passport.spec.statistics_dtype == "input"


class UnitOffset(nn.Module):
    """LitGPT 0.5.13, model.py:1308 to 1325, with `add_unit_offset`."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1 + self.weight).float()).to(x.dtype)


@pytest.mark.parametrize("theirs", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_litgpts_offset_is_added_in_the_weights_dtype_and_starts_at_two(theirs):
    norm = installed("litgpt.model").RMSNorm(64, add_unit_offset=True) if theirs else UnitOffset(64)
    spec = nk.identify(norm, 64).spec
    assert spec.offset_dtype == "parameter"
    assert (norm.weight + spec.weight_offset).unique().item() == 2


class Uncentred(nn.Module):
    """keras 3.15.1, ops/nn.py:3171, with `rms_scaling`."""

    def __init__(self, n):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * self.gamma


@pytest.mark.parametrize("theirs", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_rms_scaling_of_keras_keeps_the_mean_that_it_divides_without(theirs, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    norm = Uncentred(64)
    if theirs:
        keras = installed("keras")
        with pytest.warns(UserWarning, match="incorrectly"):
            norm = keras.layers.LayerNormalization(epsilon=1e-5, rms_scaling=True)
        norm.build((None, 64))
    spec = nk.identify(norm, 64).spec
    assert (spec.centre_statistics, spec.centre_numerator) == (True, False)


@pytest.mark.parametrize("name", ["q_a_layernorm", "kv_a_layernorm"])
def test_latent_norms_of_transformers_have_another_eps_than_their_configuration(name):
    config = transformers.Glm4MoeLiteConfig(hidden_size=64, q_lora_rank=32, kv_lora_rank=16, num_attention_heads=4)
    attention = modeling_glm4_moe_lite.Glm4MoeLiteAttention(config, layer_idx=0)
    norm = getattr(attention, name)
    assert (config.rms_norm_eps, nk.identify(norm, len(norm.weight)).spec.eps) == (1e-5, 1e-6)


class SumsOfTheInputsDtype(nn.Module):
    """Liger 0.8.5, ops/group_norm.py:67 to 95: as on a GPU, squares and sums are of the input's dtype."""

    def __init__(self, groups, n):
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        rows = x.flatten(2).unflatten(1, (self.groups, -1)).flatten(2)
        total, squares = rows.sum(-1, keepdim=True).float(), (rows * rows).sum(-1, keepdim=True).float()
        mean = total / rows.shape[-1]
        rstd = torch.rsqrt(squares / rows.shape[-1] - mean * mean + 1e-6)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        y = ((rows.float() - mean) * rstd).view_as(x) * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)


def test_ligers_group_norm_cancels_and_overflows():
    passport = nk.identify(SumsOfTheInputsDtype(2, 8), (2, 8, 4, 4))
    assert passport.spec.groups == 2
    assert passport.readings["conditioning"].value["cancels"]
    assert passport.spec.statistics_dtype == "input"


def test_group_normalization_of_onnx_cancels_where_its_function_is_run():
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        norm (float[n,c,h,w] X, float[c] scale, float[c] bias) => (float[n,c,h,w] Y)
        { Y = GroupNormalization <num_groups = 4> (X, scale, bias) }
    """)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def norm(x, weight, bias):
        given = {"X": x, "scale": weight, "bias": bias}
        return torch.tensor(session.run(None, {name: tensor.detach().numpy() for name, tensor in given.items()})[0])

    passport = nk.identify(norm, (2, 16, 8, 8), weight=torch.ones(16), bias=torch.zeros(16))
    assert (passport.spec.groups, passport.spec.eps_placement) == (4, "inside")
    assert passport.readings["conditioning"].value["cancels"]
