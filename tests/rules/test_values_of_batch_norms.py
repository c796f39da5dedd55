"""What the rules of gains, biases and missing norms say of batch norms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import normkit as nk
from helpers import finding_of

WIDE = 24


def images(seed: int) -> torch.Tensor:
    return torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def wide() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer
        for place in range(5)
        for layer in (nn.Conv2d(WIDE if place else 3, WIDE, 3, padding=1), nn.BatchNorm2d(WIDE), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDE, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        x = images(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x.mean((1, 2, 3)) > 0).long()).backward()
        optimizer.step()
    return model.eval()


def changed(name: str, change):
    """Changes one vector of the second batch norm."""

    def plant(model: nn.Module) -> None:
        part = getattr(model[4], name)
        with torch.no_grad():
            part.copy_(change(part, getattr(model[7], name)))

    return plant


def spiked(part: torch.Tensor, _other: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(WIDE) == 3, 100 * part, part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "rule", "words", "declared"),
    [
        (
            lambda model: model[4].reset_parameters() or changed("running_mean", lambda _, other: -other)(model),
            ("B6", "error"),
            "4: all 24 gains are exactly 1 and all 24 biases are exactly 0",
            None,
        ),
        (
            changed("bias", lambda part, _: 0 * part),
            ("B6", "warning"),
            "4: all 24 biases are exactly 0, not those of 4 others",
            "",
        ),
        (changed("weight", spiked), ("B10", "error"), "4: one gain of", "its gain is"),
        (
            changed("weight", lambda _, other: other),
            ("B14", "error"),
            "7: its 24 gains are a copy of those of 4",
            "its gain is the one of 7",
        ),
        (
            changed("running_mean", lambda _, other: other),
            ("B14", "error"),
            "7: its 24 running means are a copy of those of 4",
            "its running mean is the one of 7",
        ),
        (
            changed("weight", lambda part, _: -part),
            ("B14", "warning"),
            "4: 100 % of its gains are negative",
            "its gain has the opposite sign",
        ),
        (
            changed("running_var", lambda part, _: part.flip(0)),
            None,
            "",
            "its running variance has its entries in another",
        ),
        (changed("running_var", lambda part, _: 4 * part), None, "", "its running variance is 4 times the one"),
    ],
    ids=["never loaded", "bias lost", "spike", "copied gain", "copied means", "negated", "permuted", "scaled"],
)
def test_values_of_batch_norms(wide, plant, rule, words, declared, tmp_path):
    path, model = tmp_path / "intent.json", copy.deepcopy(wide)
    assert nk.inspect(model, images(99), intent=path).findings == ()
    plant(model)
    found = {each.rule: each for each in nk.inspect(model, images(99)).findings}
    if rule is not None:
        assert found[rule[0]].severity == rule[1]
        assert found[rule[0]].evidence[0].startswith(words)
    if declared:
        found = finding_of(nk.inspect(model, images(99), intent=path), "B14")
        assert f"4: {declared}" in found.evidence[0]


def test_a_batch_norm_that_was_folded_and_still_acts(wide):
    model = copy.deepcopy(wide)
    with torch.no_grad():
        model[4].weight.mul_(torch.linspace(0.5, 2, WIDE))
        factor = model[4].weight / (model[4].running_var + model[4].eps).sqrt()
        model[3].weight.mul_(factor[:, None, None, None])
        model[3].bias.mul_(factor)
    found = finding_of(nk.inspect(model, images(99)), "C9")
    assert (found.severity, found.sites[0]) == ("error", "4")
    assert "folded into the weights before it, and still acts" in found.evidence[0]


def test_a_variance_without_a_root(wide):
    model = copy.deepcopy(wide)
    model[4].running_var[3] *= -1
    found = finding_of(nk.inspect(model, images(99)), "E3")
    assert (found.severity, found.sites) == ("error", ("4",))
    assert found.evidence == ("4.running_var: negative, NaN or infinity: 1 of its entries",)


def test_statistics_that_no_moving_average_gave(wide):
    model = copy.deepcopy(wide)
    # An average over all batches leaves nothing of the start, whatever the momentum and the count say.
    model[4].running_var.copy_(torch.full((WIDE,), 0.1))
    model[4].num_batches_tracked.fill_(2)
    norms = {norm.path: norm for norm in nk.inspect(model, images(99)).batch_norms}
    assert math.isnan(norms["4"].start_share)
    assert norms["1"].start_share < 0.2


def test_a_batch_norm_that_was_lost(wide, tmp_path):
    path, model = tmp_path / "intent.json", copy.deepcopy(wide)
    nk.inspect(model, images(99), intent=path)
    model[4] = nn.Identity()
    found = finding_of(nk.inspect(model, images(99), intent=path), "D3")
    assert (found.severity, found.sites) == ("error", ("4",))
    assert found.evidence == ("4: intent.json declares a batch norm, none runs here",)
    # As folding leaves them.
    for place in (1, 7, 10, 13):
        model[place] = nn.Identity()
    assert finding_of(nk.inspect(model, images(99), intent=path), "D3") is None


@pytest.mark.slow
@pytest.mark.parametrize("other", [nn.Identity(), nn.InstanceNorm2d(8)], ids=["nothing", "instance norm"])
def test_a_batch_norm_of_the_configs_class_that_was_lost(other):
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2)
    model = transformers.ResNetForImageClassification(config).eval()
    model.resnet.embedder.embedder.normalization = other
    found = finding_of(nk.inspect(model, {"pixel_values": torch.randn(2, 3, 32, 32)}), "D3")
    assert (found.severity, found.sites) == ("error", ("resnet.embedder.embedder.normalization",))


@pytest.mark.slow
def test_of_two_batch_norms_with_one_mean_the_data_has_that_of_the_owner(wide):
    model = copy.deepcopy(wide)
    with torch.no_grad():
        model[7].running_mean.copy_(model[4].running_mean)
    found = finding_of(nk.inspect(model, images(99)), "B14")
    # The copy is downstream: what enters the owner is as it was.
    assert found.sites == ("7",)
    assert found.measured == "1 norm with a copy of another norm's statistics"
