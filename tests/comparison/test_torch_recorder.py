"""What is recorded of a torch model: its norms, whatever calls them, and nothing else."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from distributed_runs import Model, rows
from forks import Fork
from normkit.comparison.recording import Recording
from normkit.comparison.torch_recorder import recorded
from normkit.errors import InputError
from tiny_models import tiny

IDS = torch.arange(32).reshape(2, 16)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny("llama", dtype=torch.float32)[0]


def test_rows_of_all_norms_are_kept_and_no_activation(llama: nn.Module) -> None:
    recording = recorded(llama, IDS, rows=20)
    assert sorted(recording.norms) == sorted(name for name, _ in llama.named_modules() if name.endswith("norm"))
    for name, norm in recording.norms.items():
        assert norm.input.shape == norm.output.shape == (20, norm.weight.shape[0])
        torch.testing.assert_close(llama.get_submodule(name)(norm.input), norm.output, rtol=0, atol=1e-6)
    assert recording.tokens == (tuple(range(16)), (16, 17, 18, 19))
    with torch.no_grad():
        assert torch.equal(recording.outputs, llama(IDS).logits.flatten(0, 1)[:20])
    assert not llama._forward_pre_hooks
    assert not any(module._forward_hooks for module in llama.modules())


def test_a_compiled_model_is_recorded_alike(llama: nn.Module) -> None:
    torch._dynamo.reset()
    compiled, plain = recorded(torch.compile(llama, backend="eager"), IDS), recorded(llama, IDS)
    assert list(compiled.norms) == list(plain.norms)
    for name, norm in plain.norms.items():
        assert torch.equal(compiled.norms[name].output, norm.output)


def test_nothing_is_written_where_nothing_was_recorded_or_the_block_raised(llama, tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match="no norm of it was called"), nk.record(llama, path):
        pass
    with pytest.raises(IndexError), nk.record(llama, path):
        llama(torch.arange(4)[None] + 10**6)
    with pytest.raises(InputError, match="rows must be at least 1, got 0"), nk.record(llama, path, rows=0):
        pass
    assert list(tmp_path.iterdir()) == []


class Fused(nn.Module):
    """As vLLM's: adds the residual in place, and returns the normalized rows and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return nk.rms_norm(x, (8,), self.weight, 1e-6)
        residual += x
        x.copy_(nk.rms_norm(residual, (8,), self.weight, 1e-6))
        return x, residual


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = Fused()

    def forward(self, x: Tensor) -> Tensor:
        residual, x = x.clone(), self.norm(x)
        for layer in self.layers:
            x, residual = self.norm(layer(x), residual)
        return x


def test_a_fused_norm_is_recorded_with_its_residual_though_it_overwrites_its_input() -> None:
    torch.manual_seed(0)
    recording = recorded(Stack(), torch.randn(16, 8))
    norm = recording.norms["norm"]
    assert (norm.calls, recording.order) == ((16, 16, 16), ("norm",) * 3)
    torch.testing.assert_close(nk.rms_norm(norm.normalized, (8,), norm.weight, 1e-6), norm.output)
    assert not norm.residual[:16].any()
    assert norm.residual[16:].all()
    (entry,) = recording.book.entries
    assert str(entry.passport.spec).startswith("y = weight * x / ")


class Odd(nn.Module):
    """Norms as functions, in a tuple, with names of their own, over two axes; a gate and modules that are no norms."""

    def __init__(self) -> None:
        super().__init__()
        self.tupled, self.named, self.gate, self.scale = Tupled(), Named(), Gated(), Scale()
        self.plane, self.outer = nn.LayerNorm((2, 4)), nn.Sequential(nn.LayerNorm(8), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (8,)) + F.rms_norm(F.layer_norm(x, (8,)), (8,), torch.ones(8))
        x = self.scale(self.named(self.tupled(x)[0]))
        return self.outer(self.gate(self.plane(x.unflatten(-1, (2, 4))).flatten(-2), x))


class Tupled(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Gated(Named):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x * gate.sigmoid())


class Scale(Named):
    def forward(self, x: Tensor) -> Tensor:
        return self.g * x


def test_norms_are_found_whatever_calls_them() -> None:
    recording = recorded(Odd(), torch.randn(16, 8))
    expected = [":layer_norm", ":layer_norm#2", ":rms_norm", "tupled", "named", "plane", "gate", "outer"]
    assert list(recording.norms) == expected
    assert recording.norms["named"].weight is not None
    assert recording.norms[":rms_norm"].weight is not None
    assert recording.norms["plane"].input.shape == (16, 2, 4)
    assert recording.norms["plane"].weight.shape == (8,)
    assert all(norm.residual is None for norm in recording.norms.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_rows_with_a_massive_activation_is_found(dtype: torch.dtype) -> None:
    x = torch.randn(16, 64).to(dtype)
    x[:, 5] = 3e4
    model = nn.Sequential(nn.Identity(), nn.RMSNorm(64, eps=1e-6)).to(dtype)
    assert list(recorded(model, x).norms) == ["1"]


class Heads(nn.Module):
    """Norms of queries, heads before or behind tokens."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.first = nn.Embedding(50, 24), nn.RMSNorm(8), first

    def forward(self, tokens: Tensor, **_: Tensor) -> Tensor:
        x = self.embed(tokens).unflatten(-1, (3, 8))
        return self.norm(x.transpose(1, 2)).transpose(1, 2) if self.first else self.norm(x)


def test_rows_stand_in_the_order_of_tokens_that_count() -> None:
    torch.manual_seed(0)
    last, first = Heads(False), Heads(True)
    first.load_state_dict(last.state_dict())
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    batch = {"input_ids": IDS, "attention_mask": mask}
    here, there = recorded(last, batch, rows=20), recorded(first, batch, rows=20)
    assert here.tokens == there.tokens == (tuple(range(5, 16)), tuple(range(16, 25)))
    rows = last.embed(torch.arange(5, 25)).reshape(60, 8)
    assert torch.equal(here.norms["norm"].input, rows)
    assert torch.equal(there.norms["norm"].input, rows)


# Tensor parallel, of whole sequences and of parts; and parameters in parts, where each process has rows of its own.
IN_TWO = """
import sys
from datetime import timedelta
import torch
from torch import distributed
import normkit as nk
from distributed_runs import _columns, _sharded, rows
rank, port, folder = sys.argv[1:]
address = f"tcp://127.0.0.1:{port}"
distributed.init_process_group("gloo", address, timedelta(seconds=60), rank=int(rank), world_size=2)
models = {"tp": _columns(sequence=False), "sp": _columns(sequence=True), "fsdp": _sharded()}
for name, model in models.items():
    with torch.no_grad(), nk.record(model, f"{folder}/{name}.safetensors"):
        model(rows(int(rank) if name == "fsdp" else 0))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_what_is_spread_over_processes_is_gathered(tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    both = [Fork(IN_TWO, rank, port, tmp_path) for rank in (0, 1)]
    told = [process.communicate(120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    expected = recorded(Model(), rows(0))
    for name in ("tp", "sp", "fsdp"):
        found = Recording.read(tmp_path / f"{name}.safetensors")
        assert found.order == expected.order
        for path, norm in expected.norms.items():
            for part in ("input", "output", "weight"):
                torch.testing.assert_close(getattr(found.norms[path], part), getattr(norm, part), rtol=1e-9, atol=1e-9)
