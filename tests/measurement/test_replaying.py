from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.blocks import find_blocks
from normkit.measurement.observing import observed
from normkit.measurement.placement import sweep
from normkit.measurement.replaying import Replayer, ReplayError


class Noisy(nn.Module):
    """A pre-norm block in training: dropout draws numbers, buffers count calls and remember the last input."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        self.last.copy_(x[0, 0])
        return x + nn.functional.dropout(self.linear(self.norm(x)), 0.5, training=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Noisy(), Noisy()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_and_the_random_numbers_are_left_as_they_were(dtype):
    model, x = Model().to(dtype), torch.randn(2, 5, 8, dtype=dtype)
    parameters = list(model.parameters())
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    model(x)
    expected, drawn = copy.deepcopy(model.state_dict()), torch.rand(4)
    model.load_state_dict(before)
    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)
    model.load_state_dict(before)
    torch.manual_seed(3)
    sweeps, _, _ = sweep(model, sites, find_blocks(model, called), lambda: model(x))
    # Not a replay was counted, and the run drew the numbers that it draws alone.
    assert torch.equal(torch.rand(4), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert hooks(model) == 0
    # Every replay drew the same numbers too: another dropout mask would be another branch.
    assert [one.placement for one in sweeps] == ["pre", "pre"]


@pytest.mark.slow
def test_hooks_are_gone_when_the_model_raises():
    model, x = Model(), torch.randn(2, 5, 8)
    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)

    def run():
        model(x)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        sweep(model, sites, find_blocks(model, called), run)
    assert hooks(model) == 0
    assert model.layers[0].calls == 2


def test_arguments_are_replayed_as_they_were_given():
    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4, dtype=torch.bfloat16), []

        def forward(self, positions, x, *, mask, pair, flag):
            self.seen.append((positions, x, mask, pair, flag))
            return (self.linear(x), positions)

    block = Curious()
    x = torch.ones(1, 2, 4, dtype=torch.bfloat16)
    positions, mask, pair = torch.arange(2), torch.ones(2, 2, dtype=torch.bool), (torch.ones(2), torch.ones(2).half())
    replay = Replayer().replay(
        block,
        (positions, x),
        {"mask": mask, "pair": pair, "flag": "yes"},
        scale=10.0,
        altered=None,
        factor=1.0,
        dtype=torch.float32,
    )
    seen = block.seen[0]
    assert seen[0] is positions
    assert torch.equal(seen[1], torch.full((1, 2, 4), 10.0))
    assert seen[2] is mask
    assert seen[3][0] is pair[0]
    assert seen[3][1].dtype == torch.float32
    assert seen[4] == "yes"
    assert replay.y.dtype == torch.float32
    assert block.linear.weight.dtype == torch.bfloat16


def test_a_block_that_raises_is_a_replay_error():
    replayer = Replayer()
    arguments = {"scale": 1.0, "altered": None, "factor": 1.0, "dtype": torch.float32}
    with pytest.raises(ReplayError, match="shapes cannot be multiplied"):
        replayer.replay(nn.Linear(3, 3), (torch.ones(1, 2, 4),), {}, **arguments)
    assert replayer.current is None


@pytest.mark.slow
def test_what_a_norm_took_and_gave():
    model, x = Model().eval(), torch.randn(1, 5, 8)
    seen = []

    class Reader(Replayer):
        def before_block(self, block, args, kwargs, /):
            if self.current is None:
                arguments = {"scale": 100.0, "dtype": torch.float32}
                seen.append(self.replay(block.module, args, kwargs, altered=None, factor=1.0, **arguments))
                seen.append(self.replay(block.module, args, kwargs, altered=sites[0], factor=0.0, **arguments))

    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)
    with torch.no_grad(), observed(model, sites, find_blocks(model, called)[:1], [], Reader()):
        model(x)
    plain, silenced = seen
    assert list(plain.inputs) == ["layers.0.norm"]
    assert torch.equal(plain.inputs["layers.0.norm"], 100 * x)
    assert torch.equal(plain.outputs["layers.0.norm"], nn.functional.layer_norm(100 * x, (8,)))
    # A silenced norm leaves the linear layer its bias alone, through dropout.
    branch, bias = silenced.y - 100 * x, 2 * model.layers[0].linear.bias
    assert torch.all(torch.isclose(branch, bias, atol=1e-4) | torch.isclose(branch, torch.zeros(()), atol=1e-4))


def test_what_a_norm_overwrites_was_written_down_before():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.div_(x.norm())

    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = InPlace()

        def forward(self, x):
            return x + self.norm(x.clone())

    block = Copying()
    site = SimpleNamespace(path="norm", module=block.norm, function=None, parent="norm", ordinal=0)
    replayer = Replayer()
    with observed(block, [site], [], [], replayer):
        replay = replayer.replay(
            block, (torch.ones(1, 2, 4),), {}, scale=3.0, altered=None, factor=1.0, dtype=torch.float32
        )
    assert torch.equal(replay.inputs["norm"], torch.full((1, 2, 4), 3.0))
