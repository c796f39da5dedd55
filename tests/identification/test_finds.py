"""What was found in other people's code (docs/wild/reports), named by normkit with the right field.

Each find is their formula, written out; the tests that are exhaustive ask their code, where it is installed.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import normkit as nk


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


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_torchs_group_norm_cancels_in_channels_last(memory_format):
    passport = nk.identify(Format(nn.GroupNorm(4, 16), memory_format), (2, 16, 32, 32))
    assert passport.spec.groups == 4
    assert passport.readings["conditioning"].value["cancels"] is (memory_format is torch.channels_last)
