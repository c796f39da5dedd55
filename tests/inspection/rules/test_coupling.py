"""Group C on real tiny models: axes, heads, time, batch, padding, and batch norms in a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RMSNorm

import normkit as nk
from normkit.identification.passport import Passport, Reading
from normkit.identification.sites import OtherNorm
from normkit.inspection.baseline import infer
from normkit.inspection.intent import Intent
from normkit.inspection.rules import RULES
from normkit.inspection.rules.rule import Hit, NotChecked
from normkit.inspection.training import Training

WIDTH = 64


class OverTokens(nn.Module):
    """A LayerNorm along axis 1 of (batch, token, feature)."""

    def __init__(self, _width):
        super().__init__()

    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()


class OverSample(OverTokens):
    """One set of statistics for all tokens and features of a sample."""

    def forward(self, x):
        return x / (x.square().mean((1, 2), keepdim=True) + 1e-5).sqrt()


class SoFar(OverTokens):
    """Statistics over this token and those before it."""

    def forward(self, x):
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return x / (x.square().mean(-1, keepdim=True).cumsum(1) / counts + 1e-5).sqrt()


class OverBatch(OverTokens):
    """Statistics over samples, in evaluation too."""

    def forward(self, x):
        return x / (x.square().mean((0, 2), keepdim=True) + 1e-5).sqrt()


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


def rule(identifier):
    return next(rule for rule in RULES if rule.id == identifier)


# C1.


@pytest.mark.parametrize(("norm", "axes"), [(OverTokens, "along axis 1"), (OverSample, "along axes -2, -1")])
def test_a_norm_over_tokens_among_norms_over_features(models, inspected, norm, axes):
    model = models.plain()
    assert not [found for found in inspected(model).findings if found.rule == "C1"]
    model.blocks[1].norm_2 = norm(WIDTH)
    found = next(found for found in inspected(model).findings if found.rule == "C1")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm_2",))
    assert found.evidence[0].startswith(f"blocks.1.norm_2: its rows are {axes}; those of 6 other norms are along")


def test_groups_of_features_against_the_config(models, inspected):
    class Groups(nn.Module):
        def forward(self, x):
            return F.rms_norm(x.unflatten(-1, (2, 32)), (32,)).flatten(-2)

    model = models.tiny("Llama")
    model.model.layers[1].input_layernorm = Groups()
    found = next(found for found in inspected(model).findings if found.rule == "C1")
    assert found.sites == ("model.layers.1.input_layernorm",)
    assert found.evidence[0].endswith("its rows are along axis -1, in 2 groups, declared are along axis -1")


def test_other_axes_than_those_of_the_baseline(models, inspected):
    model = models.plain(OverTokens)
    first = inspected(model)
    held = inspected(model, intent=infer(first))
    assert "C1" not in [found.rule for found in held.findings]
    declared = infer(inspected(models.plain()))
    found = next(found for found in inspected(model, intent=declared).findings if found.rule == "C1")
    assert len(found.sites) == 7


# C2.


def test_rows_that_no_spec_describes(models, inspected, finding, status):
    class OverHeads(nn.Module):
        """Of (batch, token, head, feature), over the heads."""

        def forward(self, x):
            return x / (x.square().mean(2, keepdim=True) + 1e-6).sqrt()

    model = models.tiny("Qwen3", head_dim=16)
    assert status(inspected(model), "C1") == "clean"
    model.model.layers[1].self_attn.q_norm = OverHeads()
    found = finding(inspected(model), "C1")
    assert found.sites == ("model.layers.1.self_attn.q_norm",)
    assert "along axis 2; the config says along axis -1" in found.evidence[0]


class HeadByHead(Olmo2Attention):
    """Olmo 2 whose query and key norms take each head by itself."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm = (Reshaped(self.head_dim, config.rms_norm_eps) for _ in range(2))


class Reshaped(Olmo2RMSNorm):
    def forward(self, x):
        return super().forward(x.unflatten(-1, (-1, self.weight.numel()))).flatten(-2)


class Heads(nn.Module):
    """One head of attention after another, with a norm of each query, or of all together."""

    def __init__(self, together):
        super().__init__()
        self.together = together
        self.norm, self.query_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH if together else WIDTH // 4)
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        query, key, value = self.projection(self.norm(x)).chunk(3, -1)
        query = self.query_norm(query) if self.together else query
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (query, key, value))
        query = query if self.together else self.query_norm(query)
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def headed(models, together):
    model = models.plain()
    model.blocks = nn.ModuleList(Heads(together) for _ in range(3))
    return model


@pytest.mark.parametrize("family", ["Olmo2", "Qwen3", "GPT2"])
def test_query_norms_of_stock_classes_are_as_declared(models, inspected, status, family):
    options = {"head_dim": 16} if family == "Qwen3" else {}
    assert status(inspected(models.tiny(family, **options)), "C2") == "clean"


def test_heads_taken_one_by_one_where_the_config_mixes_them(models, inspected):
    model = models.tiny("Olmo2")
    model.model.layers[1].self_attn = HeadByHead(model.config, 1).eval()
    inspection = inspected(model)
    found = next(found for found in inspection.findings if found.rule == "C2")
    assert found.severity == "error"
    assert found.sites == ("model.layers.1.self_attn.q_norm", "model.layers.1.self_attn.k_norm")
    assert "a row holds 16 features, declared are 64, 4 times that" in found.evidence[0]


def test_a_norm_over_all_of_a_sample_is_none_of_heads(models, inspected, facts_of):
    facts = facts_of(inspected(models.plain()), models.plain())
    over_all = replace(facts.sites[0], role="unknown", spec=facts.sites[0].spec.replace(axes="all_but_batch"))
    features = {over_all.path: over_all.input.features // 4}
    rule = next(rule for rule in RULES if rule.id == "C2")
    of_heads = replace(facts, sites=(replace(facts.sites[0], role="unknown"),))
    intent = Intent(source="Stock", specs={}, features=features)
    assert rule.check(replace(of_heads, intent=intent)).severity == "error"
    assert rule.check(replace(facts, sites=(over_all,), intent=intent)) is None


def test_heads_against_a_baseline(models, inspected, finding, status):
    together, apart = headed(models, together=True), headed(models, together=False)
    assert status(inspected(together), "C2") == "not checked"
    declared = infer(inspected(apart))
    assert {norm.features for path, norm in declared.norms.items() if "query" in path} == {16}
    assert status(inspected(apart, intent=declared), "C2") == "clean"
    found = finding(inspected(together, intent=declared), "C2")
    assert found.sites == tuple(f"blocks.{index}.query_norm" for index in range(3))
    assert "a row holds 4 heads of 16 features, declared is one" in found.evidence[0]


# C4.


@pytest.mark.parametrize("norm", [OverTokens, OverSample])
def test_statistics_over_time_leak_the_future(models, inspected, norm):
    model = models.plain()
    model.blocks[1].norm_2 = norm(WIDTH)
    found = next(found for found in inspected(model).findings if found.rule == "C4")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm_2",))
    assert "in evaluation mode" in found.evidence[0]


def test_every_leaking_norm_is_named_once(models, inspected, finding):
    found = finding(inspected(models.plain(OverTokens)), "C4")
    assert len(found.sites) == 7
    assert found.measured == "7 norms that let earlier tokens know of later ones"


def test_statistics_of_the_past_do_not_leak(models, inspected):
    assert "C4" not in [found.rule for found in inspected(models.plain(SoFar)).findings]


def test_a_model_that_looks_both_ways_has_no_future_to_leak(inspected):
    assert "C4" not in [found.rule for found in inspected(Encoder(OverTokens).eval()).findings]


def test_without_token_ids_leaks_are_not_checked():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    checks = {check.rule: check for check in nk.inspect(model, {"input": torch.randn(2, 5, 8)}).checks}
    assert {checks[rule].status for rule in ("C4", "C6")} == {"not checked"}
    assert "token ids" in checks["C4"].reason


# C5.


def test_samples_that_are_coupled_in_evaluation(models, inspected, finding):
    model = models.plain()
    model.blocks[2].norm_1 = OverBatch(WIDTH)
    found = finding(inspected(model), "C5")
    assert (found.severity, found.sites) == ("error", ("blocks.2.norm_1",))
    assert found.measured == "1 norm that couples the samples of a batch"


def test_a_batch_norm_couples_samples_in_training_by_design(models, inspected, finding):
    inspection = inspected(models.plain(BatchNorm))
    found = finding(inspection, "C5")
    assert (found.severity, len(found.sites)) == ("note", 7)
    assert "in training mode" in found.measured
    assert "C5" not in [found.rule for found in inspected(models.plain()).findings]


def test_running_statistics_that_do_not_fit(models, inspected, finding):
    model = models.train(models.plain())
    model.norm = BatchNorm(WIDTH)
    model.norm.inner.running_var.fill_(100.0)
    found = finding(inspected(model.eval()), "C5")
    assert (found.severity, found.sites) == ("warning", ("norm",))
    assert "of what the running ones give" in found.evidence[0]


# C6.


def padded(model):
    ids = torch.randint(3, 99, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    return nk.inspect(model, {"input_ids": ids, "attention_mask": mask})


def test_padding_that_enters_statistics(finding, status):
    assert status(padded(Encoder().eval()), "C6") == "clean"
    model = Encoder().eval()
    model.norms[1] = OverTokens(WIDTH)
    found = finding(padded(model), "C6")
    assert (found.severity, found.sites) == ("error", ("norms.1",))


def test_padding_that_enters_a_batch_norm_in_training(inspected):
    severities = {}
    for name, run in (("padded", padded), ("whole", inspected)):
        found = next(found for found in run(Encoder(BatchNorm).eval()).findings if found.rule == "C6")
        severities[name] = found.severity
        assert "in training mode" in found.measured
    assert severities == {"padded": "warning", "whole": "note"}


# C7.


def run_of(ranks):
    return Training(
        steps=1,
        every=1,
        reports=1,
        reason="asked",
        reason_step=0,
        ranks=ranks,
        observer="",
        remarks=(),
        optimizers=(),
        series=(),
        parameters=(),
        vocabulary=0,
    )


def batch_norm(name, axes):
    reading = Reading(value={"axes": axes, "mode": "training"})
    passport = Passport(verdict="batch", spec=None, readings={"batch": reading}, shape=(2, 64, 16))
    return OtherNorm(path="norm", reason=f"{name}: batch norm: changing one sample moves the others", passport=passport)


@pytest.fixture
def c7(healthy, models, facts_of):
    """The rule's answer for a batch norm in a run of some processes with so many rows a call."""
    facts = facts_of(healthy, models.tiny("GPT2"))

    def answer(name="BatchNorm1d", axes=(0, 2), ranks=1, rows=4096, watched=True):
        entering = replace(facts.sites[0].input, rows=rows)
        site = replace(facts.sites[0], calls=1, input=entering)
        others = (batch_norm(name, list(axes)),)
        training = run_of(ranks) if watched else None
        return rule("C7").check(replace(facts, sites=(site,), others=others, training=training))

    return answer


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
    # Over samples alone: nobody knows how many there are.
    assert c7(axes=(0,), rows=8) is None
    # An instance norm in training mode has no batch.
    assert c7(axes=(2,), rows=8, ranks=4) is None


def test_without_batch_norms_there_is_nothing_to_synchronise(healthy, models, facts_of):
    assert rule("C7").check(facts_of(healthy, models.tiny("GPT2"))) is None
