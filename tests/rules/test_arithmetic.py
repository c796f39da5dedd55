"""Group A on real tiny models: a wrong divisor or power, a variance that cancels, rows that are constant or zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from faulty_norms import CancellingVariance, NegativeVariance, NoEps, RsqrtSlip, UnbiasedVariance, WrongPower
from helpers import finding_of
from imagined_runs import calm
from normkit.rules.arithmetic import wrong_divisor, wrong_input_gradient

GPT2 = "transformer.h.1.ln_2"


class InverseRoot(WrongPower):
    """Divides by the reciprocal root."""

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.affine(centred / (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt(), x)


class Bare(nn.Module):
    """A function without eps, and no module."""

    def __init__(self, width):
        super().__init__()
        self.projection = nn.Linear(width, width)

    def forward(self, x):
        return self.projection(torch.nn.functional.rms_norm(x, x.shape[-1:], eps=0.0))


def gpt2(models, norm=None):
    model = models.tiny("GPT2", layers=2)
    if norm is not None:
        model.set_submodule(GPT2, norm)
    return model


def plain(models, norm=nn.LayerNorm, added=0.0, zeros=False):
    """A model without a config; a number is added to its embedding, or some tokens have rows of zeros."""
    model = models.plain(norm)
    model.embedding.weight.data += added
    if zeros:
        model.embedding.weight.data[5:30] = 0.0
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "norm", "severity", "words"),
    [
        ("A4", UnbiasedVariance, "warning", "n = 64 the output's length is 0.791 % off"),
        ("A5", WrongPower, "error", "(power -3)"),
        ("A5", InverseRoot, "error", "(power 2)"),
        ("A9", CancellingVariance, "warning", "E[x^2] - E[x]^2"),
        ("A10", lambda width: NegativeVariance(width, eps=1e-12), "warning", "a row of one number gives NaN"),
    ],
)
def test_one_norm_of_another_kind(models, inspected, finding, status, rule, norm, severity, words):
    assert status(inspected(gpt2(models)), rule) == "clean"
    inspection = inspected(gpt2(models, norm(64)))
    found = finding(inspection, rule)
    assert (found.severity, found.sites) == (severity, (GPT2,))
    assert words in found.evidence[0]
    if rule == "A5":
        assert inspection.findings[0] == found
        assert [path for path, _ in inspection.unrecognised] == [GPT2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "norm", "options", "severity", "words"),
    [
        ("A4", UnbiasedVariance, {}, "warning", "n = 64"),
        ("A4", nn.LayerNorm, {}, None, ""),
        ("A5", RsqrtSlip, {}, "error", "outputs 0.5 times as long (power -1)"),
        ("A9", CancellingVariance, {"added": 1000.0}, "error", "E[x^2] - E[x]^2"),
        # A mean takes the digits of any variance, sooner in 16 bits; an RMSNorm subtracts none.
        ("A9", nn.LayerNorm, {"added": 2000.0}, "warning", "13 of 24 bits"),
        ("A9", nn.LayerNorm, {"added": 15.0}, None, ""),
        ("A9", lambda width: nn.RMSNorm(width, eps=1e-6), {"added": 2000.0}, None, ""),
        ("A10", NoEps, {}, "note", "a row of zeros gives NaN"),
        ("A10", NoEps, {"zeros": True}, "error", "of 80 rows that entered are zeros"),
        ("A10", nn.LayerNorm, {"zeros": True}, None, ""),
    ],
)
def test_all_norms_of_a_model_without_a_config(models, inspected, rule, norm, options, severity, words):
    inspection = inspected(plain(models, norm, **options))
    found = finding_of(inspection, rule)
    assert (None if found is None else found.severity) == severity
    assert found is None or words in found.evidence[0]
    assert found is None or "A9" in rule or len(found.sites) == 5
    assert not options.get("zeros") or inspection.sites[0].input.zero_rows > 0


class Detached(nn.RMSNorm):
    """Right outputs, and statistics without a gradient."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6).detach()


@pytest.mark.slow
def test_statistics_without_a_gradient(models, inspected):
    found = finding_of(inspected(plain(models, Detached)), "A13")
    assert (found.severity, len(found.sites)) == ("warning", 5)
    assert "the gradient of its input is off by 89." in found.evidence[0]
    assert finding_of(inspected(plain(models)), "A13") is None


def test_a_wrong_gradient_is_an_error_where_the_model_trains(healthy, models, facts_of):
    model = models.tiny("GPT2")
    facts = facts_of(healthy, model)
    assert wrong_input_gradient.check(facts) is None
    facts = replace(facts, sites=(replace(facts.sites[0], input_gradient_error=0.5), *facts.sites[1:]))
    assert wrong_input_gradient.check(facts).severity == "warning"
    found = wrong_input_gradient.check(replace(facts, training=calm(healthy)))
    assert (found.severity, found.sites) == ("error", (facts.sites[0].path,))
    assert found.measured == "off by up to 50 % at 1 norm"


@pytest.mark.slow
def test_a_divisor_by_intent_is_clean_and_its_absence_is_not(models, inspected, facts_of):
    model = models.tiny("GPT2")
    model.transformer.ln_f = UnbiasedVariance(64)
    facts = facts_of(inspected(model), model)
    unbiased = {path: spec.replace(correction=1) for path, spec in facts.intent.specs.items()}
    hit = wrong_divisor.check(replace(facts, intent=replace(facts.intent, specs=unbiased)))
    assert "transformer.ln_f" not in hit.sites
    assert len(hit.sites) == len(facts.sites) - 1
    assert "divided by n;" in hit.evidence[0]


@pytest.mark.slow
def test_a_module_that_is_no_norm_has_no_power(models, inspected, status):
    class Gate(nn.Module):
        def forward(self, x):
            return x * x.sum(-1, keepdim=True)

    model = models.plain()
    model.blocks[0].mlp.append(Gate())
    model.blocks[1].mlp.append(nn.Softmax(-1))
    assert status(inspected(model), "A5") == "clean"


@pytest.mark.slow
def test_a_mean_counts_sooner_in_16_bits(models, inspected):
    assert finding_of(inspected(plain(models, added=15.0).bfloat16()), "A9").severity == "warning"


@pytest.mark.slow
def test_no_eps_where_the_config_has_one_is_a_warning(models, inspected):
    model = models.tiny("Llama", layers=2)
    model.model.norm = NoEps(64)
    assert finding_of(inspected(model), "A10").severity == "warning"


def test_a_function_counts_by_its_eps(models, inspected):
    assert "blocks.0.norm_1:rms_norm" in finding_of(inspected(models.plain(Bare)), "A10").sites
