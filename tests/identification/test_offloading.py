"""Parameters that are set for each call, by accelerate or from other processes: a report is that of the whole model."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import distributed_runs
import normkit as nk
from forks import Fork
from normkit.identification import offloading
from normkit.identification.finder import likeness


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


def test_norms_of_one_code_are_alike_where_they_are_offloaded() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6), nn.RMSNorm(6))
    plain = [likeness(norm) for norm in model]

    cpu_offload(model, torch.device("cpu"))

    assert [likeness(norm) for norm in model] == plain
    assert plain[0] == plain[1] != plain[2]


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


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """Its gains are not 1: what is not gathered shows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model.to(dtype).eval()


def fully_sharded(model: LlamaForCausalLM) -> nn.Module:
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_columns(model: LlamaForCausalLM) -> nn.Module:
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in model.model.layers:
        parallelize_module(block, mesh, rows | {name: ColwiseParallel() for name in columns})
    return model


def inspected_in_parts(make: Callable[[], nn.Module], part: Callable[[Any], nn.Module], given: Any) -> None:
    """The report of a model in parts is that of the whole, and the model is left as it was."""
    expected = nk.inspect(make(), given, name="it").to_json()
    model = part(make())
    before = dict(model.named_parameters())
    assert nk.inspect(model, given, name="it").to_json() == expected
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with torch.no_grad():
        model(**given) if isinstance(given, dict) else model(given)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", [fully_sharded, by_columns])
def test_a_model_in_one_part_of_one_is_inspected_as_it_is(part: Any, tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inspected_in_parts(lambda: llama(torch.bfloat16), part, {"input_ids": torch.arange(24).reshape(2, 12)})
    finally:
        distributed.destroy_process_group()


def in_two_processes() -> None:
    """Fully sharded, by columns and rows, and by sequences, each in one dtype or two."""
    ids = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        for part in (fully_sharded, by_columns):
            inspected_in_parts(partial(llama, dtype), part, {"input_ids": ids})
    own = distributed_runs
    for sequence in (False, True):
        inspected_in_parts(own.Model, lambda _model, by=sequence: own._columns(sequence=by), own.rows(0))
    inspected_in_parts(own.Model, lambda _model: own._sharded(), own.rows(0))


IN_TWO = """
import sys
from datetime import timedelta
from torch import distributed
rank, port = map(int, sys.argv[1:])
address = f"tcp://127.0.0.1:{port}"
distributed.init_process_group("gloo", address, timedelta(seconds=60), rank=rank, world_size=2)
from identification import test_offloading
test_offloading.in_two_processes()
distributed.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_inspect_their_parts_as_one_inspects_the_whole() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    both = [Fork(IN_TWO, rank, port) for rank in (0, 1)]
    told = [process.communicate(240)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
