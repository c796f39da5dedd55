"""Group A on real tiny models: eps, its place, and the divisor of the variance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.inspection.build_inspection import infer
from normkit.rules.formula import RULES
from normkit.rules.rule import NotChecked

WRONG_EPS, EPS_OUTSIDE, UNBIASED = RULES


class OutsideNorm(nn.Module):
    """A LayerNorm that adds eps to the standard deviation."""

    def __init__(self, width: int, eps: float = 1e-6, correction: int = 0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps, self.correction = eps, correction

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / (x.std(-1, keepdim=True, correction=self.correction) + self.eps) + self.bias


class UnbiasedNorm(OutsideNorm):
    """A LayerNorm that divides by n - 1."""

    def forward(self, x):
        variance = x.var(-1, keepdim=True)
        return self.weight * (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt() + self.bias


def set_eps(model, path, eps):
    model.get_submodule(path).eps = eps
    return model


@pytest.mark.slow
def test_one_norm_with_another_eps_is_named(models, inspected, finding, status):
    assert status(inspected(models.tiny("GPT2")), "A1") == "clean"
    found = finding(inspected(set_eps(models.tiny("GPT2"), "transformer.h.1.ln_2", 1e-2)), "A1")
    assert found.severity == "error"
    assert found.sites == ("transformer.h.1.ln_2",)
    assert "eps is 0.01, the config says 1e-05" in found.evidence[0]
    assert "shortens the output to" in found.evidence[0]


@pytest.mark.slow
@pytest.mark.parametrize(("effect", "severity"), [(5e-4, "note"), (5e-3, "warning"), (5e-2, "error")])
def test_severity_follows_the_effect_at_the_observed_scale(models, inspected, healthy, finding, effect, severity):
    path = "transformer.ln_f"
    model = models.tiny("GPT2")
    entering = healthy.sites[-1].input
    # The rows that feel it most are those of the 5 % quantile: 1 / sqrt(1 + e / v) = 1 - effect.
    variance = entering.rms_quantiles[0] ** 2 * (1 - entering.mean_energy)
    eps = 1e-5 + (variance + 1e-5) * ((1 - effect) ** -2 - 1)
    found = finding(inspected(set_eps(model, path, eps)), "A1")
    assert (found.severity, found.sites) == (severity, (path,))


@pytest.mark.slow
def test_a_smaller_eps_lengthens(models, inspected, finding):
    found = finding(
        inspected(set_eps(models.tiny("GPT2", layer_norm_epsilon=1e-3), "transformer.h.0.ln_1", 1e-9)), "A1"
    )
    assert "lengthens the output to" in found.evidence[0]


@pytest.mark.slow
def test_many_norms_are_one_finding_with_the_worst_lines(models, inspected, finding):
    model = models.tiny("GPT2", layers=4)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-2
    inspection = inspected(model)
    found = finding(inspection, "A1")
    assert found.sites == tuple(site.path for site in inspection.sites)
    assert found.evidence[0].startswith("transformer.h.0.")
    assert found.evidence[-1] == "and 3 more norms"


@pytest.mark.slow
def test_the_worst_norm_is_told_first(models, inspected, finding):
    model = set_eps(set_eps(models.tiny("GPT2"), "transformer.h.0.ln_1", 2e-5), "transformer.h.2.ln_2", 1e-3)
    found = finding(inspected(model), "A1")
    assert found.sites == ("transformer.h.0.ln_1", "transformer.h.2.ln_2")
    assert found.evidence[0].startswith("transformer.h.2.ln_2:")


@pytest.mark.slow
def test_without_a_config_only_what_enters_counts(models, inspected, finding):
    inspection = inspected(models.plain())
    check = next(check for check in inspection.checks if check.rule == "A1")
    assert check.status == "not checked"
    assert "no config or intent file" in check.reason
    small = models.plain(lambda width: nn.LayerNorm(width, eps=1e-2), scale=0.15)
    found = finding(inspected(small), "A1")
    assert (found.severity, found.sites[0]) == ("warning", "blocks.0.norm_1")
    smaller = models.plain(lambda width: nn.LayerNorm(width, eps=1e-2), scale=0.01)
    assert finding(inspected(smaller), "A1").severity == "error"


@pytest.mark.slow
def test_the_configs_own_eps_may_shorten_an_untrained_model(models, inspected, status, finding):
    untrained = inspected(models.tiny("GPT2", layer_norm_epsilon=0.1))
    assert status(untrained, "A1") == "finding"
    assert untrained.findings[0].severity == "note"
    assert finding(inspected(models.train(models.tiny("GPT2", layer_norm_epsilon=0.1))), "A1").severity == "warning"


def test_tokens_with_a_zero_embedding_are_no_short_rows(models, inspected, facts_of):
    model = models.plain()
    model.embedding.weight.data[5:30] = 0.0
    inspection = inspected(model)
    assert inspection.sites[0].input.zero_rows > 0
    assert isinstance(WRONG_EPS.check(facts_of(inspection, model)), NotChecked)


@pytest.mark.slow
def test_eps_outside_the_root(models, inspected, finding, status):
    model = models.tiny("GPT2")
    model.transformer.h[1].ln_1 = OutsideNorm(64)
    found = finding(inspected(model), "A2")
    assert (found.severity, found.sites) == ("warning", ("transformer.h.1.ln_1",))
    assert status(inspected(models.tiny("GPT2")), "A2") == "clean"


@pytest.mark.slow
def test_eps_outside_the_root_that_shortens_is_an_error(models, inspected, finding):
    model = models.tiny("GPT2")
    model.transformer.h[0].ln_1 = OutsideNorm(64, eps=1e-3)
    found = finding(inspected(model), "A2")
    assert (found.severity, found.sites) == ("error", ("transformer.h.0.ln_1",))


@pytest.mark.slow
def test_eps_outside_the_root_without_a_config(models, inspected, finding, status):
    assert finding(inspected(models.plain(OutsideNorm)), "A2").severity == "warning"
    assert status(inspected(models.plain()), "A2") == "clean"


@pytest.mark.slow
def test_eps_outside_the_root_by_intent_is_clean(models, inspected, facts_of):
    model = models.tiny("GPT2")
    model.transformer.ln_f = OutsideNorm(64)
    facts = facts_of(inspected(model), model)
    assert EPS_OUTSIDE.check(facts) is not None
    outside = dict(facts.intent.specs) | {"transformer.ln_f": specs.ANNOTATED_TRANSFORMER}
    assert EPS_OUTSIDE.check(replace(facts, intent=replace(facts.intent, specs=outside))) is None


@pytest.mark.slow
def test_unbiased_variance(models, inspected, finding, status):
    model = models.tiny("GPT2")
    model.transformer.h[2].ln_2 = UnbiasedNorm(64)
    found = finding(inspected(model), "A4")
    assert (found.severity, found.sites) == ("warning", ("transformer.h.2.ln_2",))
    assert "n = 64 the output's length is 0.791 % off" in found.evidence[0]
    assert status(inspected(models.tiny("GPT2")), "A4") == "clean"


@pytest.mark.slow
def test_unbiased_variance_without_a_config(models, inspected, finding, status):
    assert finding(inspected(models.plain(UnbiasedNorm)), "A4").severity == "warning"
    assert status(inspected(models.plain()), "A4") == "clean"


@pytest.mark.slow
def test_unbiased_variance_by_intent_is_clean_and_its_absence_is_not(models, inspected, facts_of):
    model = models.tiny("GPT2")
    model.transformer.ln_f = UnbiasedNorm(64)
    facts = facts_of(inspected(model), model)
    unbiased = {path: spec.replace(correction=1) for path, spec in facts.intent.specs.items()}
    hit = UNBIASED.check(replace(facts, intent=replace(facts.intent, specs=unbiased)))
    assert "transformer.ln_f" not in hit.sites
    assert len(hit.sites) == len(facts.sites) - 1
    assert "divided by n;" in hit.evidence[0]


@pytest.mark.slow
def test_an_intent_file_is_named_where_it_says_what_is_meant(models, inspected, finding, status):
    model = models.plain()
    declared = infer(inspected(model), source="intent.json")
    assert status(inspected(model, intent=declared), "A1") == "clean"
    found = finding(inspected(set_eps(model, "norm", 1e-2), intent=declared), "A1")
    assert found.measured.startswith("1 norm with another eps than is meant")
    assert "norm: eps is 0.01, intent.json says 1e-05" in found.evidence[0]
