"""Modules whose parameters accelerate reads for each call: their values, their places, and calls with values kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor, nn

import normkit as nk
from normkit.identification import offloading


class Tied(nn.Module):
    """Two norms and three maps, of which the last has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Linear(6, 6, bias=False), nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.RMSNorm(6, eps=1e-6))
        self.head = nn.Linear(6, 6, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5, 0.5)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        return self.head(x + self.inner(self.norm(x)))


def test_parameters_are_read_where_they_lie_and_tied_ones_once(tmp_path: Path) -> None:
    model = Tied()
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}

    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))

    assert all(parameter.is_meta for parameter in model.parameters())
    assert offloading.device_of(model) == torch.device("cpu")
    found = {name: read() for name, _, read in offloading.parameters(model)}
    # accelerate's own copies of a tied parameter are two files.
    assert found.keys() - {"head.weight"} == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_in_memory_a_module_has_values_and_its_calls_read_nothing() -> None:
    model, x = Tied().eval(), torch.randn(2, 5, 6)
    cpu_offload(model, torch.device("cpu"))

    with offloading.in_memory(model.inner):
        assert not any(parameter.is_meta for parameter in model.inner.parameters())
        assert offloading.stored(model).keys() == {"table.weight", "norm.weight", "norm.bias", "head.weight"}
        # The gain of the last norm.
        model.inner[3].weight = nn.Parameter(torch.zeros(6))
        assert not model.inner(x).any()
        with offloading.in_memory(model):
            assert not model.inner(x).any()

    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.inner(x).all()


@pytest.mark.slow
def test_a_model_that_is_offloaded_with_its_norms_is_inspected_as_in_memory() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(2, 5, 6)
    in_memory = nk.inspect(model, x).to_json()

    cpu_offload(model, torch.device("cpu"))

    offloaded = nk.inspect(model, x).to_json()
    assert all(parameter.is_meta for parameter in model.parameters())
    # Its state dict on the CPU has a copy of what is tied.
    assert offloaded["model"]["parameters"] == in_memory["model"]["parameters"] + 36
    offloaded["model"]["parameters"] -= 36
    assert json.dumps(offloaded, sort_keys=True) == json.dumps(in_memory, sort_keys=True)
