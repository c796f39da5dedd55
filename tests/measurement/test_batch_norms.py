"""Running statistics and those of the data, against what the norm itself makes of both."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from normkit.measurement.batch_norms import DataStatistics, batch_norms
from normkit.measurement.facts import BatchNorm
from normkit.measurement.hooks import observed
from normkit.measurement.structure import survey


class LastAxis(nn.Module):
    """A batch norm of rows whose features are the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class OfKeras(nn.BatchNorm1d):
    """Its momentum is the share that is kept."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        y = nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        self.running_mean += (1 - self.momentum) * (x.mean(0) - self.running_mean)
        self.running_var += (1 - self.momentum) * (x.var(0) - self.running_var)
        return y


def measured(norm: nn.Module, *batches: Tensor) -> BatchNorm:
    """The facts of one norm with those batches as its data."""
    model = nn.Sequential(norm).eval()
    with torch.no_grad():
        structure = survey(model, lambda: model(batches[0]))
        data = DataStatistics(model, structure.others)
        with observed(model, data.sites, (), (), data):
            for x in batches:
                model(x)
    (found,) = batch_norms(model, structure.others, data)
    return found


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "x", "axis"),
    [
        (nn.BatchNorm1d, drawn(40, 5), 1),
        (nn.BatchNorm2d, drawn(6, 5, 7, 7), 1),
        (nn.BatchNorm3d, drawn(6, 5, 2, 3, 4), 1),
        (LastAxis, drawn(6, 9, 5), 2),
        (lambda width: nn.InstanceNorm2d(width, track_running_stats=True), drawn(6, 5, 7, 7), 1),
    ],
)
def test_the_change_is_that_of_the_norms_own_outputs(make, x, axis):
    norm = make(5)
    holder = norm.inner if isinstance(norm, LastAxis) else norm
    holder.running_mean.copy_(torch.linspace(-2, 2, 5))
    holder.running_var.copy_(torch.tensor([0.1, 0.5, 1.0, 4.0, 30.0]))
    # Two calls: their samples count together, and so the norm has them in one call. A sample of an instance norm has a
    # variance of its own: then samples that are alike are enough.
    is_of_samples = isinstance(norm, nn.InstanceNorm2d)
    x = x[:1].expand_as(x) if is_of_samples else x
    found = measured(norm, x[:4], x[4:])
    with torch.no_grad():
        running, ours = norm.eval()(x).double(), norm.train()(x).double()
    over = [place for place in range(x.dim()) if place != axis]
    # Float64 sums of float32 numbers against float32 outputs of size 3.
    change = (running - ours).square().mean(over).sqrt() / torch.maximum(running.std(over), ours.std(over))
    assert found.largest_change == pytest.approx(float(change.max()), rel=2e-2)
    assert found.change == pytest.approx(float(change.median()), rel=2e-2)
    assert found.channel == int(change.argmax())
    assert (found.samples, found.rows) == (len(x), x.numel() // 5)
    # The smaller of the two calls.
    assert found.call_rows == (x[0, 0].numel() if is_of_samples else min(x[:4].numel(), x[4:].numel()) // 5)


def test_sampling_is_what_half_of_the_samples_say_of_the_other():
    norm = nn.BatchNorm2d(8)
    # As many numbers as the other, of few samples that differ: their mean is known to 1 / sqrt(8).
    apart = drawn(8, 8, 1, 1).expand(8, 8, 6, 6)
    assert measured(norm, apart).sampling == pytest.approx(1 / math.sqrt(8), rel=0.5)
    assert measured(norm, drawn(8, 8, 6, 6)).sampling < 0.1
    assert math.isnan(measured(norm, drawn(1, 8, 6, 6)).sampling)


@pytest.mark.parametrize(
    ("norm", "share"),
    [
        (nn.BatchNorm1d(4), 0.1),
        (nn.BatchNorm2d(4, momentum=0.99), 0.99),
        (OfKeras(4, momentum=0.99), 0.01),
        (nn.BatchNorm1d(4, momentum=0.0), 0.0),
        (LastAxis(4), 0.1),
    ],
)
def test_the_share_that_a_batch_replaces_is_observed(norm, share):
    x = {nn.BatchNorm2d: drawn(8, 4, 3, 3), LastAxis: drawn(8, 3, 4)}.get(type(norm), drawn(8, 4))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    # A running mean in float32 is known to seven digits.
    assert measured(norm, x).share == pytest.approx(share, abs=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_a_cumulative_average_has_no_share():
    assert math.isnan(measured(nn.BatchNorm1d(4, momentum=None), drawn(8, 4)).share)


@pytest.mark.parametrize(
    ("norm", "x", "correction"),
    [
        (nn.BatchNorm1d(4), drawn(8, 4), 1),
        (nn.BatchNorm2d(4), drawn(8, 4, 3, 3), 1),
        (nn.InstanceNorm2d(4, track_running_stats=True), drawn(8, 4, 3, 3), 1),
        (OfKeras(4, momentum=0.99), drawn(8, 4), 1),
        (LastAxis(4), drawn(8, 3, 4), 1),
        (nn.BatchNorm1d(4, momentum=0.0), drawn(8, 4), math.nan),
    ],
)
def test_the_divisor_of_the_variance_that_is_gathered(norm, x, correction):
    found = measured(norm, x)
    assert found.correction == pytest.approx(correction, nan_ok=True)
    assert found.own_correction == 0


def test_padding_by_masks_of_other_lengths():
    x = drawn(2, 3, 8)
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm).eval()
    structure = survey(model, lambda: model(x))
    for length, share in ((8, 0.25), (16, 0.25), (4, 0.25)):
        data = DataStatistics(model, structure.others)
        # Half of the second sample is padding, whatever the stride between mask and rows.
        data.batch({"x": x, "padding_mask": torch.arange(length) < torch.tensor([[length], [length // 2]])})
        with observed(model, data.sites, (), (), data):
            model(x)
        assert batch_norms(model, structure.others, data)[0].padding == share


def test_what_the_norm_holds():
    norm = nn.BatchNorm1d(4, eps=1e-3)
    found = measured(norm, drawn(8, 4))
    assert (found.channels, found.batches, found.is_gathered, found.is_moved) == (4, 0, False, False)
    assert found.eps == pytest.approx(1e-3, rel=1e-2)
    with torch.no_grad():
        norm.weight[1:3] = 0
        norm.running_var[0] = 1e-5
    norm.weight.requires_grad_(False)
    norm(drawn(8, 4))
    found = measured(norm, drawn(8, 4))
    assert (found.zero_gains, found.is_gathered, found.is_moved, found.is_trained) == (2, True, True, True)
    norm.bias.requires_grad_(False)
    assert not measured(norm, drawn(8, 4)).is_trained


def test_the_share_of_the_start():
    norm = nn.BatchNorm1d(4)
    assert math.isnan(measured(norm, drawn(8, 4)).start_share)
    norm.train()
    for _ in range(10):
        norm(drawn(8, 4))
    found = measured(norm, drawn(8, 4))
    assert found.start_share == pytest.approx(0.9**10 / float(norm.running_var.median()), rel=1e-4)


def test_norms_without_running_statistics_are_left_out():
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    structure = survey(model, lambda: model(drawn(8, 4)))
    assert batch_norms(model, structure.others) == ()
