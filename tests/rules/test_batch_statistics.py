"""Group C on small networks: what batch norms take their statistics from, and the output in both modes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from helpers import finding_of
from normkit.rules.batch_statistics import other_output
from watched_runs import facts

CHANNELS = 8


def network(**options: float) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for entering in (3, CHANNELS, CHANNELS, CHANNELS):
        layers += [nn.Conv2d(entering, CHANNELS, 3), nn.BatchNorm2d(CHANNELS, **options), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 2))


def images(seed: int, count: int = 16) -> Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def gathered(model: nn.Module, steps: int = 60, size: float = 1.0) -> nn.Module:
    """With the statistics of its data, as training leaves them; in evaluation mode."""
    with torch.no_grad():
        for step in range(steps):
            model.train()(size * images(step))
    return model.eval()


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return gathered(network()).state_dict()


def healthy(state: dict[str, Tensor], **options: float) -> nn.Sequential:
    model = network(**options).eval()
    model.load_state_dict(state)
    return model


def inspected(model: nn.Module, count: int = 16, **options: object) -> nk.Inspection:
    return nk.inspect(model, (images(99, count),), **options)


# C13.


def test_the_output_in_both_modes(state):
    model = healthy(state)
    found = inspected(model)
    assert [each.rule for each in found.findings] == []
    assert found.modes.samples == 16
    # An offset that is small beside a pixel's deviation is large beside that of their mean.
    model[10].running_mean += 0.3 * model[10].running_var.sqrt() * model[14].weight[0].detach().sign()
    found = inspected(model)
    assert finding_of(found, "C9").severity == "note"
    finding = finding_of(found, "C13")
    # The place was not said: which of the batch norms is off more than sampling explains.
    assert (finding.severity, finding.sites) == ("warning", ("10",))
    assert finding.evidence[1].startswith("10: the data's statistics move the median channel by")
    assert "the model: in training mode the output of 16 samples is off by" in finding.evidence[0]
    assert finding_of(inspected(model, 4), "C13").severity == "note"
    # Half as far is a note where it is far beyond what halves of the batch do, as after an epoch of sorted data.
    for change, sampling, severity in ((0.5, 0.1, "note"), (0.5, 0.2, None), (0.39, 0.05, None), (0.9, 0.1, "warning")):
        modes = replace(found.modes, change=change, sampling=sampling)
        hit = other_output.check(replace(facts(None), batch_norms=found.batch_norms, modes=modes))
        assert (hit and hit.severity) == severity
    # Statistics that do not fit are an error where they give another output altogether.
    model[10].running_mean += 3 * model[10].running_var.sqrt() * model[14].weight[0].detach().sign()
    finding = finding_of(inspected(model), "C9")
    assert (finding.severity, finding.sites) == ("error", ("10",))
    assert "the model's output moves by" in finding.evidence[0]


def test_the_output_needs_statistics_and_samples(state):
    def status(found: nk.Inspection) -> str:
        return next(check.status for check in found.checks if check.rule == "C13")

    assert status(inspected(network())) == "not checked"
    assert status(inspected(healthy(state), 2)) == "not checked"


# C14.


def test_an_eps_that_the_intent_file_does_not_say(state, tmp_path):
    path, model = tmp_path / "intent.json", healthy(state)
    inspected(model, intent=path)
    assert finding_of(inspected(model, intent=path), "C14") is None
    for place in (1, 4, 7, 10):
        model[place].eps = 1e-3
    # Nobody says what is meant, and at these variances it does not matter.
    assert finding_of(inspected(model), "C14") is None
    found = finding_of(inspected(model, intent=path), "C14")
    assert (found.severity, found.sites) == ("warning", ("1", "4", "7", "10"))
    assert "eps 0.001, intent.json says 1e-05" in found.evidence[0]


def test_one_eps_that_the_other_batch_norms_do_not_have(state):
    model = healthy(state)
    model[4].eps = 0.1
    found = finding_of(inspected(model), "C14")
    assert (found.severity, found.sites) == ("error", ("4",))
    assert "3 of 3 other batch norms have 1e-05" in found.evidence[0]


def test_an_eps_that_decides(state):
    model = healthy(state)
    for place in (1, 4, 7, 10):
        model[place].eps = 0.1
    found = finding_of(inspected(model), "C14")
    assert found.severity == "note"
    assert "of the median channel's variance + eps" in found.evidence[0]


@pytest.mark.slow
def test_an_eps_that_the_config_does_not_say():
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2)
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(config).eval()
    x = {"pixel_values": torch.randn(2, 3, 32, 32)}
    assert finding_of(nk.inspect(model, x), "C14") is None
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    for path in norms:
        model.get_submodule(path).eps = 1e-3
    found = finding_of(nk.inspect(model, x), "C14")
    # A running variance of 1 hardly feels it.
    assert (found.severity, len(found.sites)) == ("note", len(norms))
    assert "the config says 1e-05" in found.evidence[0]


# C15.


class Biased(nn.BatchNorm1d):
    """As in flax: what it gathers is divided by N."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.running_var -= self.momentum * (x.var(0) - x.var(0, correction=0))
        return y


class Unbiased(nn.BatchNorm1d):
    """Normalizes by the unbiased variance."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * ((len(x) - 1) / len(x)) ** 0.5 if self.training else y


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Biased, "the running variance gathers the sum of squares over N"),
        (Unbiased, "in training it divides by the root of the sum of squares over N - 1"),
    ],
)
def test_variances_over_another_count(make, words):
    def model(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), kind(6), nn.Linear(6, 2)).eval()

    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    assert finding_of(nk.inspect(model(nn.BatchNorm1d), (x,)), "C15") is None
    found = finding_of(nk.inspect(model(make), (x,)), "C15")
    # sqrt(16 / 15) is 3.3 % more than 1, and sqrt(64 / 63) 0.8 %.
    assert (found.severity, found.sites) == ("warning", ("1",))
    assert found.evidence == (f"1: {words}; with 16 numbers a channel that is 3.28 % of the deviation",)
    assert finding_of(nk.inspect(model(make), (x.repeat(4, 1) + 1e-3 * torch.randn(64, 6),)), "C15").severity == "note"


# C16.


@pytest.mark.parametrize(("rate", "severity"), [(0.0, None), (0.1, "note"), (0.5, "warning")])
def test_dropout_in_front_of_a_batch_norm(rate, severity):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(rate), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(64, 2)).eval()
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    found = finding_of(nk.inspect(model, (x,)), "C16")
    assert (found and found.severity) == severity
    if severity == "warning":
        assert found.sites == ("4",)
        # For rows of independent ReLUs of normal numbers (0.5 / (1 - p) - 0.159) / 0.341, 2.5 at p = 0.5.
        assert "the variance that enters is 2." in found.evidence[0]
        assert found.evidence[0].endswith("times as large in training mode, behind 2")


# C17.


class Frames(nn.Module):
    """Sounds of several lengths, with a batch norm over all frames, or over those that count."""

    def __init__(self, *, is_masked: bool) -> None:
        super().__init__()
        self.up, self.norm, self.is_masked = nn.Linear(4, 6), nn.BatchNorm1d(6), is_masked

    def forward(self, input_features: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.up(input_features)
        if not self.is_masked:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        kept = attention_mask.bool()
        y = x.clone()
        y[kept] = self.norm(x[kept])
        return y


@pytest.mark.parametrize(("length", "severity"), [(20, None), (19, "note"), (8, "warning")])
def test_padding_in_the_statistics(length, severity):
    torch.manual_seed(0)
    mask = (torch.arange(20) < torch.tensor([[20], [length]])).long()
    x = {"input_features": torch.randn(2, 20, 4) * mask[..., None], "attention_mask": mask}
    found = finding_of(nk.inspect(Frames(is_masked=False).eval(), x), "C17")
    assert (found and found.severity) == severity
    if severity == "warning":
        # 12 of 40 frames.
        assert found.evidence == ("norm: 30 % of the rows that enter are padding, and in training all of them count",)
        assert finding_of(nk.inspect(Frames(is_masked=True).eval(), x), "C17") is None
        # The mask tells nothing of samples that come twice, wherever it stands; and frozen statistics take in no batch.
        frozen = Frames(is_masked=False).eval()
        frozen.norm.momentum = 0.0
        x = {"attention_mask": mask[1:].expand(2, -1), "input_features": x["input_features"]}
        assert nk.inspect(frozen, x).batch_norms[0].repeated == 0
        assert finding_of(nk.inspect(frozen, x), "C17") is None


@pytest.mark.parametrize(("times", "severity"), [(1, None), (2, "warning")])
def test_samples_that_come_twice(state, times, severity):
    x = images(99).repeat(times, 1, 1, 1)
    found = finding_of(nk.inspect(healthy(state), (x,)), "C17")
    assert (found and found.severity) == severity
    if found:
        assert found.evidence == ("the batches: 50 % of the samples are equal to an earlier one of their batch",)
