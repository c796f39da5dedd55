"""Batch norms in a run: what entered them in the newest measured step, against the running statistics before it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from helpers import finding_of
from normkit.watching.answers import NORM

CHANNELS = 6

# Each test trains a network.
pytestmark = pytest.mark.slow


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(CHANNELS, 2)).train()


def images(seed: int, count: int) -> Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def run(
    model: nn.Module,
    count: int = 16,
    steps: int = 41,
    size: float = 1.0,
    parts: int = 1,
    drift: float = 1.0,
    copies: int = 1,
) -> nk.Inspection:
    """Train with a measurement every 20 steps; the last step is one. The first weight is multiplied by `drift`."""
    optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.05)
    with nk.watch(model, optimizer, every=20, say=lambda _: None) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            if step == 1:
                model[0].weight.data *= drift
            for x in images(step, count // copies).repeat(copies, 1, 1, 1).chunk(parts):
                loss = nn.functional.cross_entropy(model(size * x), (x.mean((1, 2, 3)) > 0).long())
                loss.backward()
            watch.step(loss)
            optimizer.step()
        return watch.inspection()


def test_statistics_are_those_of_the_newest_measured_step():
    model = network()
    # The step before the last leaves the statistics and weights that the last one meets.
    before = copy.deepcopy(model)
    run(before, steps=40)
    found = run(model)
    (norm,) = found.batch_norms
    x = before[0](images(40, 16)).detach().double()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    running, deviation = before[1].running_mean.double(), (before[1].running_var.double() + 1e-5).sqrt()
    assert (norm.samples, norm.call_samples, norm.rows) == (16, 16, 16 * 10 * 10)
    # Sums of float32 convolutions.
    assert norm.shift == pytest.approx(float(((mean - running) / deviation)[norm.channel]), rel=1e-4, abs=1e-5)
    assert norm.stretch == pytest.approx(float(((variance + 1e-5).sqrt() / deviation)[norm.channel]), rel=1e-4)
    assert [each.rule for each in found.findings if each.rule in ("C7", "C9")] == []
    assert not model[1]._forward_pre_hooks
    replies = {each.question: (each.verdict, each.detail) for each in found.training.answers}
    assert replies[NORM] == ("no", "1 batch norm: no fault in statistics, gains and biases.")


def test_calls_of_a_step_count_together():
    (norm,) = run(network(), parts=2).batch_norms
    assert (norm.samples, norm.call_samples, norm.rows) == (16, 8, 1600)


def test_batches_of_two_samples():
    found = finding_of(run(network(), count=2, steps=3), "C7")
    assert (found.severity, found.sites) == ("warning", ("1",))
    # 200 pixels are enough by their number.
    assert found.evidence == ("1: normalizes by 2 samples at a time",)
    assert finding_of(run(network(), count=4, steps=3), "C7") is None


def test_frozen_statistics_of_other_data():
    model = network()
    run(model)
    model[1].eval().requires_grad_(False)
    assert finding_of(run(model), "C9") is None
    found = finding_of(run(model, size=4.0), "C9")
    assert (found.severity, found.sites) == ("warning", ("1",))
    # Weights in front of fixed statistics that move are how such a run goes on: the statistics fitted when it began.
    model = network()
    run(model)
    model[1].eval().requires_grad_(False)
    found = finding_of(run(model, drift=4.0), "C9")
    assert (found.severity, found.sites) == ("note", ("1",))
    assert "when the run began: the weights moved since" in found.evidence[0]


def test_dropout_in_front():
    for place, severity in ((1, "warning"), (4, None)):
        model = network()
        model.insert(place, nn.Dropout(0.5))
        found = run(model, steps=2)
        hit = finding_of(found, "C16")
        assert (hit and hit.severity) == severity
        told = next(check for check in found.checks if check.rule == "C16")
        assert told.status == ("finding" if severity else "not checked")
    assert "no module of dropout" in told.reason


def test_padding_and_copies_in_the_statistics():
    def frames(length):
        model = nn.Sequential(
            nn.Conv1d(4, CHANNELS, 3), nn.BatchNorm1d(CHANNELS), nn.AdaptiveAvgPool1d(1), nn.Flatten()
        )
        x = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(0))
        x[..., length:] = 0
        with nk.watch(model, every=1, say=lambda _: None) as watch:
            for _ in range(2):
                loss = model(x).square().mean()
                loss.backward()
                watch.step(loss)
            return finding_of(watch.inspection(), "C17")

    assert frames(32) is None
    assert (frames(8).severity, frames(8).sites) == ("warning", ("1",))
    found = finding_of(run(network(), steps=2, copies=16), "C17")
    assert found.evidence == ("the batches: 93.8 % of the samples are equal to an earlier one of their batch",)
