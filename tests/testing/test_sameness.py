"""`assert_same`: it passes what rounding explains, and its error says what differs and where that begins."""

from __future__ import annotations

import copy
import socket

import pytest
import torch
from torch import distributed, nn

from forks import Fork
from normkit.errors import InputError
from normkit.testing import DifferenceError, assert_same
from tiny_models import tiny

IDS = {"input_ids": torch.arange(64).reshape(4, 16)}


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", dtype=torch.float32)[0]


def failed(port, reference, batch=None, **arguments):
    with pytest.raises(DifferenceError) as raised:
        assert_same(port, reference, batch, **arguments)
    return raised.value


def test_another_eps_of_one_norm_is_named_where_no_row_feels_it():
    error = failed(nn.LayerNorm(8, eps=1e-4), nn.LayerNorm(8, eps=1e-5), shape=8)
    assert str(error).splitlines()[0] == "port compared with reference: different"
    assert "eps 0.0001 instead of 1e-05, inside the root both" in str(error)
    assert error.comparison.conventions.changed
    assert_same(nn.LayerNorm(8), nn.LayerNorm(8), shape=8)


def test_what_stays_undecided_does_not_pass():
    gain = {"norm.weight": torch.randn(64)}
    assert "undecided" in str(failed({"norm.weight": gain["norm.weight"] + 1}, gain))
    assert_same(gain, gain)


@pytest.mark.slow
def test_the_same_model_in_another_precision_passes(llama):
    assert_same(llama, llama, IDS)
    assert_same(copy.deepcopy(llama).double(), llama, IDS)


@pytest.mark.slow
def test_a_fault_between_norms_is_placed_between_them(llama):
    port = copy.deepcopy(llama)
    port.model.layers[1].self_attn.q_proj.weight.data *= 1.01
    lines = str(failed(port, llama, IDS)).splitlines()
    assert "later ones do not: queries, keys, positions" in lines[1]
    assert "appears in attention: what leaves model.layers.1.input_layernorm agrees" in lines[2]


@pytest.mark.slow
def test_a_changed_gain_is_the_cause(llama):
    port = copy.deepcopy(llama)
    port.model.norm.weight.data *= 1.5
    assert "model.norm.weight: reference times 1.50." in str(failed(port, llama, IDS))


def test_what_cannot_be_compared_is_no_difference():
    with pytest.raises(InputError):
        assert_same(nn.Linear(4, 4), nn.Linear(4, 4), None)


class QueriesAndKeys(nn.Module):
    """Attention whose queries and keys are normalized over all heads together, as OLMo's are.

    With a rank, two processes have half of the heads each: they gather a row before it is normalized, or after.
    """

    def __init__(self, rank=None, *, gathers=True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(32, eps=1e-6), nn.RMSNorm(32, eps=1e-6)
        for parameter in self.parameters():
            low, high = (0.5, 1.5) if parameter.dim() == 1 else (-0.5, 0.5)
            nn.init.uniform_(parameter, low, high, generator=generator)
        self.rank, self.gathers = rank, gathers
        if rank is not None and not gathers:
            for norm in (self.q_norm, self.k_norm):
                norm.weight, norm.normalized_shape = nn.Parameter(norm.weight.detach().chunk(2)[rank].clone()), (16,)

    def forward(self, x):
        q, k = self.rows(self.q(x), self.q_norm), self.rows(self.k(x), self.k_norm)
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (q, k, self.v(x)))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def rows(self, x, norm):
        if self.rank is None:
            return norm(x)
        own = x.chunk(2, -1)[self.rank].contiguous()
        return norm(gathered(own)) if self.gathers else gathered(norm(own))


def gathered(own):
    parts = [torch.empty_like(own) for _ in range(2)]
    distributed.all_gather(parts, own)
    return torch.cat(parts, -1)


def sharded(rank):
    """In each of two processes: a norm of whole rows passes; one of each process's own part fails and is named."""
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))
    assert_same(QueriesAndKeys(rank), QueriesAndKeys(), {"x": x})
    error = failed(QueriesAndKeys(rank, gathers=False), QueriesAndKeys(), {"x": x})
    assert error.comparison.causes[0].places == ("q_norm", "k_norm")
    assert "2 of 2 norms do not compute what the reference's do: features 16 instead of 32" in str(error)


IN_TWO = """
import sys
from datetime import timedelta
from torch import distributed
rank, port = map(int, sys.argv[1:])
address = f"tcp://127.0.0.1:{port}"
distributed.init_process_group("gloo", address, timedelta(seconds=60), rank=rank, world_size=2)
from testing import test_sameness
test_sameness.sharded(rank)
distributed.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_query_and_key_norms_of_each_process_s_own_part_are_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    both = [Fork(IN_TWO, rank, port) for rank in (0, 1)]
    told = [process.communicate(240)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told


class InParts(nn.RMSNorm):
    """What two processes do, in one: each half of a row is normalized alone."""

    def forward(self, x):
        halves = [nn.functional.rms_norm(each, (16,), None, self.eps) for each in x.chunk(2, -1)]
        return torch.cat(halves, -1) * self.weight


@pytest.mark.slow
def test_a_norm_of_each_half_of_a_row_is_named():
    port = QueriesAndKeys()
    for name in ("q_norm", "k_norm"):
        norm = InParts(32, eps=1e-6)
        norm.load_state_dict(getattr(port, name).state_dict())
        setattr(port, name, norm)
    error = failed(port, QueriesAndKeys(), {"x": torch.randn(2, 64, 32)})
    assert error.comparison.causes[0].places == ("q_norm", "k_norm")
    assert "2 groups" in str(error)
