"""Group C on real tiny models: time, batch, padding, and batch norms in a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from faulty_norms import OverAxes
from helpers import finding_of
from normkit.identification.passport import Passport, Reading
from normkit.identification.sites import OtherNorm
from normkit.rules.coupling import leaked_future, small_batches
from normkit.rules.rule import Hit, NotChecked
from watched_runs import series, training

WIDTH = 64


class SoFar(nn.Module):
    """Statistics over this token and those before it."""

    def forward(self, x):
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return x / (x.square().mean(-1, keepdim=True).cumsum(1) / counts + 1e-5).sqrt()


def over_time(_width):
    return OverAxes(1)


class BatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Encoder(nn.Module):
    """Attention in both directions that heeds a mask, behind norms."""

    def __init__(self, norm=nn.LayerNorm, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(99, WIDTH)
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(layers))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        for norm, projection in zip(self.norms, self.projections, strict=True):
            query, key, value = projection(norm(x))[:, None].chunk(3, -1)
            x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, 0]
        return x


# C4.


@pytest.mark.parametrize("norm", [over_time, lambda _: OverAxes(1, 2)])
def test_statistics_over_time_leak_the_future(models, inspected, norm):
    model = models.plain()
    model.blocks[1].norm_2 = norm(WIDTH)
    found = finding_of(inspected(model), "C4")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm_2",))
    assert "in evaluation mode" in found.evidence[0]


def test_every_leaking_norm_is_named_once(models, inspected, finding):
    found = finding(inspected(models.plain(over_time)), "C4")
    assert len(found.sites) == 5
    assert found.measured == "5 norms that let later tokens affect earlier ones"


def test_the_past_and_a_model_that_looks_both_ways_leak_no_future(models, inspected):
    assert finding_of(inspected(models.plain(lambda _: SoFar())), "C4") is None
    assert finding_of(inspected(Encoder(over_time).eval()), "C4") is None


@pytest.mark.slow
def test_rows_of_several_tokens_leak_in_a_run_whose_labels_are_the_next_input(models, inspected, facts_of):
    def judged(norm, *shares):
        run, model = training(*([series("labels next", shares)] if shares else [])), models.plain(norm)
        facts, passport = facts_of(inspected(model), model), nk.identify(norm(WIDTH), (2, 5, WIDTH))
        passports = {site.path: passport for site in facts.sites}
        return leaked_future.check(replace(facts, passports=passports, leaks=None, training=run))

    found = judged(over_time, 1.0, 1.0, 0.97)
    assert (found.severity, len(found.sites)) == ("error", 5)
    assert found.measured == "5 norms with several tokens in a row, in a model of the next token"
    assert judged(nn.RMSNorm, 1.0) is None
    # Labels of an encoder are its inputs, or classes.
    assert judged(over_time, 0.03) is None
    assert "no labels of a cross-entropy" in judged(over_time).reason


def test_without_token_ids_leaks_are_not_checked():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    checks = {check.rule: check for check in nk.inspect(model, {"input": torch.randn(2, 5, 8)}).checks}
    assert {checks[rule].status for rule in ("C4", "C6")} == {"not checked"}
    assert "token ids" in checks["C4"].reason


# C5.


@pytest.mark.slow
def test_samples_that_are_coupled(models, inspected, finding):
    model = models.plain()
    assert finding_of(inspected(model), "C5") is None
    model.blocks[1].norm_1 = OverAxes(0, 2)
    found = finding(inspected(model), "C5")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm_1",))
    assert found.measured == "1 norm that couples the samples of a batch"
    # A batch norm couples them in training, by design.
    found = finding(inspected(models.plain(BatchNorm)), "C5")
    assert (found.severity, len(found.sites)) == ("note", 5)
    assert "in training mode" in found.measured


# C6.


def padded(model):
    ids = torch.randint(3, 99, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    return nk.inspect(model, {"input_ids": ids, "attention_mask": mask})


def test_padding_that_enters_statistics(finding, status):
    assert status(padded(Encoder().eval()), "C6") == "clean"
    model = Encoder().eval()
    model.norms[1] = OverAxes(1)
    found = finding(padded(model), "C6")
    assert (found.severity, found.sites) == ("error", ("norms.1",))


@pytest.mark.slow
@pytest.mark.parametrize(("is_padded", "severity"), [(True, "warning"), (False, "note")])
def test_padding_that_enters_a_batch_norm_in_training(inspected, is_padded, severity):
    found = finding_of((padded if is_padded else inspected)(Encoder(BatchNorm).eval()), "C6")
    assert found.severity == severity
    assert "in training mode" in found.measured


class Sound(nn.Module):
    """A front end with a norm over time, as that of Wav2Vec2: each channel of each sample by itself."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 8, 4, stride=4), norm

    def forward(self, input_values):
        return self.norm(self.conv(input_values[:, None]))


@pytest.mark.parametrize("zeros", [0, 4, 40])
@pytest.mark.parametrize("norm", [nn.GroupNorm(8, 8), nn.InstanceNorm1d(8), nn.BatchNorm1d(8)])
def test_zeros_at_the_ends_of_sounds(norm, zeros):
    torch.manual_seed(0)
    sounds = torch.randn(4, 80)
    sounds[1:3, 80 - zeros :] = 0
    if isinstance(norm, nn.BatchNorm1d):
        norm.running_mean += 0.1
    # Four zeros of 80 may be chance.
    inspection = nk.inspect(Sound(norm).eval(), {"input_values": sounds})
    found = finding_of(inspection, "C17" if isinstance(norm, nn.BatchNorm1d) else "C6")
    assert (found and found.severity) == (None if zeros < 40 else "warning" if found.rule == "C6" else "note")
    if zeros == 40:
        # Half of the frames of two of four sounds: 25 %, the limit of C17.
        assert found.sites == ("norm",)


# C7.


def batch_norm(name, axes):
    reading = Reading(value={"axes": axes, "mode": "training"})
    passport = Passport(verdict="batch", spec=None, readings={"batch": reading}, shape=(2, 64, 16))
    return OtherNorm(path="norm", reason=f"{name}: batch norm: changing one sample moves the others", passport=passport)


@pytest.fixture
def c7(healthy, models, facts_of):
    """The rule's answer for a batch norm in a run of some processes with so many rows a call."""
    facts = facts_of(healthy, models.tiny("GPT2"))

    def answer(name="BatchNorm1d", axes=(0, 2), ranks=1, rows=4096, watched=True, tokens=0):
        entering = replace(facts.sites[0].input, rows=rows)
        site = replace(facts.sites[0], calls=1, input=entering)
        others = (batch_norm(name, list(axes)),)
        run = training(steps=1, ranks=ranks, tokens=tokens) if watched else None
        return small_batches.check(replace(facts, sites=(site,), others=others, training=run))

    return answer


@pytest.mark.slow
def test_batch_norms_in_a_run_of_several_processes(c7):
    assert c7(ranks=1) is None
    assert c7("SyncBatchNorm", ranks=4) is None
    found = c7(ranks=4)
    assert isinstance(found, Hit)
    assert (found.severity, found.sites) == ("warning", ("norm",))
    assert found.measured == "1 batch norm not synchronised over 4 processes"
    assert isinstance(c7(watched=False), NotChecked)


def test_batch_statistics_of_few_rows(c7):
    assert c7(rows=256) is None
    found = c7(rows=8)
    assert "a variance of 8 rows has a relative noise of 50 %" in found.evidence[0]
    # Over samples alone there are at most as many as were fed in a step.
    assert c7(axes=(0,), rows=8) is None
    assert c7(axes=(0,), tokens=16) is None
    # Images have no tokens: the shape of one tells its pixels.
    assert c7(axes=(0, 2), rows=0, tokens=32) is None
    assert c7(axes=(0, 2), rows=0, tokens=2).measured == "1 batch norm with batch statistics of 32 rows"
    assert c7(axes=(0,), tokens=2).measured == "1 batch norm with batch statistics of 2 rows"
    # An instance norm in training mode has no batch.
    assert c7(axes=(2,), rows=8, ranks=4) is None


def test_without_batch_norms_there_is_nothing_to_synchronise(healthy, models, facts_of):
    assert small_batches.check(facts_of(healthy, models.tiny("GPT2"))) is None
