"""Batch norms: which axes share statistics, in which mode, with which conventions; and what the eval mode computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.identification.behaviour import identify


def test_a_constant_that_nearly_cancels():
    module = nn.BatchNorm1d(8).eval()
    with torch.no_grad():
        module.running_mean.copy_(torch.linspace(0.5, 1.5, 8))
        # bias - mean / sqrt(var + eps) * weight is 1e-8 here, and 3e-8 of that is rounding.
        module.bias.copy_(module.running_mean / (1 + module.eps) ** 0.5 + 1e-8)
    for shape in ((4, 8), (4, 8, 5)):
        assert identify(module, shape).verdict == "batch"


def trained(module, shape):
    """With running statistics, gain and bias that are not those of the start."""
    module.train()
    for _ in range(3):
        module(3 * torch.randn(shape) + 1)
    if module.affine:
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, 2, module.num_features))
            module.bias.copy_(torch.linspace(-1, 1, module.num_features))
    return module.eval()


@pytest.mark.parametrize(
    ("module", "shape", "axes"),
    [
        (nn.BatchNorm1d(6), (4, 6), [0]),
        (nn.BatchNorm1d(6, eps=1e-3), (4, 6, 5), [0, 2]),
        (nn.BatchNorm2d(3), (2, 3, 8, 8), [0, 2, 3]),
        (nn.BatchNorm2d(3, affine=False), (2, 3, 8, 8), [0, 2, 3]),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 6, 6), [2, 3]),
        (nn.InstanceNorm1d(4, track_running_stats=True), (2, 4, 9), [2]),
    ],
)
def test_running_statistics(module, shape, axes):
    trained(module, shape)
    passport = identify(module, shape)
    assert (passport.verdict, passport.spec) == ("batch", None)
    assert passport.readings["batch"].value == {
        "axes": axes,
        "mode": "training",
        "centred": True,
        "eps": module.eps,
        "eps_placement": "inside",
        "correction": 0,
    }
    x = torch.randn(5, *shape[1:])
    assert torch.allclose(passport(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("norm", "shape", "axes"),
    [
        (nn.BatchNorm1d(6, track_running_stats=False), (4, 6), [0]),
        (nn.BatchNorm2d(3, track_running_stats=False), (2, 3, 4, 4), [0, 2, 3]),
        (lambda x: (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt(), (2, 3, 6), [0, 1, 2]),
    ],
)
def test_samples_that_are_coupled_in_eval_mode_too(norm, shape, axes):
    passport = identify(norm, shape)
    assert passport.verdict == "batch"
    value = passport.readings["batch"].value
    assert (value["axes"], value["mode"], value["centred"], value["eps"]) == (axes, "always", True, 1e-5)
    assert "changing one sample moves the others" in passport.evidence[0]


@pytest.mark.slow
def test_other_conventions_of_batch_statistics():
    def rms(x):
        return x / (x.square().mean((0, 2), keepdim=True).sqrt() + 1e-3)

    value = identify(rms, (2, 3, 6)).readings["batch"].value
    assert (value["centred"], value["eps"], value["eps_placement"]) == (False, 1e-3, "outside")
    unbiased = identify(lambda x: (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt(), 6).readings["batch"].value
    assert unbiased["correction"] == 1


def test_statistics_that_no_formula_explains():
    def by_range(x):
        centred = x - x.mean(0)
        # Of two samples, this is a batch norm: more are looked at than are given.
        return centred / centred.abs().amax(0)

    passport = identify(by_range, 6)
    assert passport.verdict == "batch"
    assert passport.readings["batch"].value == {"axes": [0], "mode": "always"}
    assert any("no formula" in line for line in passport.evidence)


@pytest.mark.parametrize(
    ("norm", "shape", "verdict"),
    [
        (nn.InstanceNorm2d(4), (2, 4, 6, 6), "norm"),
        (nn.InstanceNorm2d(4, affine=True), (2, 4, 6, 6), "norm"),
        (nn.InstanceNorm1d(4), (2, 4, 9), "norm"),
        # A block that holds a batch norm is none; nor is a map that draws random numbers in training mode.
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (2, 6), "linear"),
        (nn.Dropout(0.5), (2, 6), "identity"),
    ],
)
def test_what_is_no_batch_norm(norm, shape, verdict):
    assert identify(norm, shape).verdict == verdict


@pytest.mark.parametrize("affine", [False, True])
def test_instance_norms_are_specs(affine):
    module = nn.InstanceNorm2d(4, affine=affine)
    passport = identify(module, (2, 4, 6, 6))
    assert (passport.spec.has_weight, passport.spec.has_bias, passport.spec.eps) == (affine, affine, 1e-5)
    x = torch.randn(3, 4, 5, 7)
    assert torch.allclose(passport(x), module(x), atol=1e-5)


def test_the_module_keeps_its_statistics():
    module = nn.BatchNorm1d(6).train()
    identify(module, (4, 6))
    assert int(module.num_batches_tracked) == 0
    assert bool((module.running_mean == 0).all())
    assert module.training
