"""Group A on real tiny models: a wrong power, a variance that cancels, rows that are constant or zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from faulty_norms import CancellingVariance, NegativeVariance, NoEps, RsqrtSlip, WrongPower

GPT2 = "transformer.h.1.ln_2"


class InverseRoot(WrongPower):
    """Divides by the reciprocal root."""

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.affine(centred / (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt(), x)


def gpt2(models, norm=None):
    model = models.tiny("GPT2", layers=2)
    if norm is not None:
        model.set_submodule(GPT2, norm)
    return model


def of(inspection, rule):
    return next((found for found in inspection.findings if found.rule == rule), None)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "power"), [(WrongPower, -3), (InverseRoot, 2)])
def test_a_wrong_power(models, inspected, status, norm, power):
    assert status(inspected(gpt2(models)), "A5") == "clean"
    inspection = inspected(gpt2(models, norm(64)))
    found = inspection.findings[0]
    assert (found.rule, found.severity, found.sites) == ("A5", "error", (GPT2,))
    assert f"(power {power})" in found.evidence[0]
    assert [path for path, _ in inspection.unrecognised] == [GPT2]


def test_a_wrong_power_everywhere_and_without_a_config(models, inspected):
    found = of(inspected(models.plain(RsqrtSlip)), "A5")
    assert len(found.sites) == 7
    assert "leave 0.5 times as long (power -1)" in found.evidence[0]


@pytest.mark.slow
def test_what_is_no_norm_has_no_power(models, inspected, status):
    class Gate(nn.Module):
        def forward(self, x):
            return x * x.sum(-1, keepdim=True)

    model = models.plain()
    model.blocks[0].mlp.append(Gate())
    model.blocks[1].mlp.append(nn.Softmax(-1))
    assert status(inspected(model), "A5") == "clean"


@pytest.mark.slow
def test_a_variance_that_cancels(models, inspected, finding, status):
    assert status(inspected(gpt2(models)), "A9") == "clean"
    found = finding(inspected(gpt2(models, CancellingVariance(64))), "A9")
    assert (found.severity, found.sites) == ("warning", (GPT2,))
    assert "E[x^2] - E[x]^2" in found.evidence[0]


@pytest.mark.slow
def test_a_variance_that_cancels_at_what_enters_is_an_error(models, inspected):
    model = models.plain(CancellingVariance)
    model.embedding.weight.data += 1000.0
    assert of(inspected(model), "A9").severity == "error"


@pytest.mark.slow
def test_a_mean_that_takes_the_digits_of_any_variance(models, inspected, status):
    model = models.plain()
    model.embedding.weight.data += 2000.0
    found = of(inspected(model), "A9")
    assert found.severity == "warning"
    assert "mean^2 / variance of what enters is" in found.evidence[0]
    assert "13 of 24 bits" in found.evidence[0]
    rms = models.plain(lambda width: nn.RMSNorm(width, eps=1e-6))
    rms.embedding.weight.data += 2000.0
    assert status(inspected(rms), "A9") == "clean"


@pytest.mark.slow
def test_a_mean_counts_sooner_in_16_bits(models, inspected, status):
    model = models.plain()
    model.embedding.weight.data += 15.0
    assert status(inspected(model), "A9") == "clean"
    assert of(inspected(model.bfloat16()), "A9").severity == "warning"


@pytest.mark.slow
def test_constant_rows_that_come_out_nan(models, inspected, finding, status):
    assert status(inspected(gpt2(models)), "A10") == "clean"
    found = finding(inspected(gpt2(models, NegativeVariance(64, eps=1e-12))), "A10")
    assert (found.severity, found.sites) == ("warning", (GPT2,))
    assert "a row of one number leaves as NaN" in found.evidence[0]


@pytest.mark.slow
def test_zero_rows_are_an_error_where_they_enter(models, inspected):
    bare = models.plain(NoEps)
    assert of(inspected(bare), "A10").severity == "note"
    bare.embedding.weight.data[5:30] = 0.0
    found = of(inspected(bare), "A10")
    assert found.severity == "error"
    assert "of 80 rows that entered are zeros" in found.evidence[0]


def test_zero_rows_with_an_eps_are_clean(models, inspected, status):
    model = models.plain()
    model.embedding.weight.data[5:30] = 0.0
    inspection = inspected(model)
    assert inspection.sites[0].input.zero_rows > 0
    assert status(inspection, "A10") == "clean"


@pytest.mark.slow
def test_no_eps_where_the_config_has_one_is_a_warning(models, inspected):
    model = models.tiny("Llama", layers=2)
    model.model.norm = NoEps(64)
    assert of(inspected(model), "A10").severity == "warning"


def test_a_bare_function_counts_by_its_eps(models, inspected):
    class Bare(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.projection = nn.Linear(width, width)

        def forward(self, x):
            return self.projection(torch.nn.functional.rms_norm(x, x.shape[-1:], eps=0.0))

    assert "blocks.0.norm_1:rms_norm" in of(inspected(models.plain(Bare)), "A10").sites
