"""Group E on real tiny models: 16-bit statistics, little room below overflow, NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from normkit.rules.precision import RULES

NARROW, RANGE = RULES


class NarrowNorm(nn.Module):
    """An RMSNorm that never leaves its input's dtype."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def narrowed(model, path="model.layers.1.input_layernorm"):
    model.set_submodule(path, NarrowNorm().to(model.dtype))
    return model


@pytest.mark.slow
def test_statistics_in_bfloat16(models, inspected, finding, status):
    assert status(inspected(models.tiny("Llama").bfloat16()), "E2") == "clean"
    found = finding(inspected(narrowed(models.tiny("Llama").bfloat16())), "E2")
    assert (found.severity, found.sites) == ("warning", ("model.layers.1.input_layernorm",))
    assert "the squares of 64 features are summed in bfloat16" in found.evidence[0]


@pytest.mark.slow
def test_a_sum_of_squares_near_overflow(models, inspected, finding):
    model = narrowed(models.tiny("Llama"), "model.norm").half()
    # An embedding of rms 25 sums up to 64 * 25**2 = 40000, 0.7 bits below 65504.
    model.model.embed_tokens.weight.data *= 25 / 0.02
    found = finding(inspected(model), "E2")
    assert (found.severity, found.sites) == ("error", ("model.norm",))


@pytest.mark.slow
def test_in_float32_narrow_statistics_are_a_note_where_the_config_tells(models, inspected, status):
    inspection = inspected(narrowed(models.tiny("Llama")))
    assert status(inspection, "E2") == "finding"
    assert [found.severity for found in inspection.findings] == ["note"]
    assert status(inspected(models.plain(NarrowNorm)), "E2") == "clean"


@pytest.mark.slow
def test_narrow_statistics_by_intent_are_clean_in_float32(models, inspected, facts_of):
    model = narrowed(models.tiny("Llama"))
    facts = facts_of(inspected(model), model)
    assert NARROW.check(facts) is not None
    narrow = {path: spec.replace(statistics_dtype="input") for path, spec in facts.intent.specs.items()}
    assert NARROW.check(replace(facts, intent=replace(facts.intent, specs=narrow))) is None


@pytest.mark.slow
@pytest.mark.parametrize(("largest", "severity"), [(20_000, "warning"), (50_000, "error")])
def test_little_room_in_float16(models, inspected, finding, status, largest, severity):
    model = models.tiny("Llama").half()
    assert status(inspected(model), "E3") == "clean"
    model.model.embed_tokens.weight.data[:, 7] = largest
    found = finding(inspected(model), "E3")
    assert (found.severity, found.sites[0]) == (severity, "model.layers.0.input_layernorm")
    assert f"{math.log2(65504 / largest):.2f} bits" in found.measured


@pytest.mark.slow
def test_the_same_numbers_have_room_in_bfloat16(models, inspected, status):
    model = models.tiny("Llama").bfloat16()
    model.model.embed_tokens.weight.data[:, 7] = 50_000
    assert status(inspected(model), "E3") == "clean"


@pytest.mark.slow
def test_nan_in_a_gain_names_the_first_mover(models, inspected, finding):
    model = models.tiny("GPT2")
    model.transformer.h[1].ln_1.weight.data[3] = math.nan
    found = finding(inspected(model), "E3")
    assert found.severity == "error"
    assert [path.removeprefix("transformer.") for path in found.sites] == [
        "h.1.ln_1",
        "h.1.ln_2",
        "h.2.ln_1",
        "h.2.ln_2",
        "ln_f",
    ]
    assert found.evidence[0].startswith("transformer.h.1.ln_1: NaN or infinity: 1 in the gain, 80 rows of the output")
    assert "the fault starts in its parameters" in found.evidence[0]
    assert found.evidence[1] == "transformer.h.1: the first block with NaN or infinity, which leave it"


@pytest.mark.slow
def test_nan_in_a_gain_counts_by_itself(models, inspected, facts_of):
    model = models.tiny("GPT2")
    facts = facts_of(inspected(model), model)
    gain = replace(facts.sites[2].gain, nonfinite=1)
    sites = (*facts.sites[:2], replace(facts.sites[2], gain=gain), *facts.sites[3:])
    assert RANGE.check(replace(facts, sites=sites)).sites == ("transformer.h.1.ln_1",)


@pytest.mark.slow
def test_infinity_in_a_projection_is_named_before_the_norms_behind_it(models, inspected, finding):
    model = models.tiny("GPT2")
    model.transformer.h[0].mlp.c_proj.bias.data[0] = math.inf
    found = finding(inspected(model), "E3")
    assert found.sites[:2] == ("transformer.h.0.mlp.c_proj", "transformer.h.1.ln_1")
    assert found.measured == "NaN or infinity in 1 parameter, first in transformer.h.0.mlp.c_proj.bias"
    assert found.evidence[1].startswith("transformer.h.1.ln_1: the first of 5 norms that show it")


@pytest.mark.slow
def test_infinity_that_no_parameter_holds_comes_in_with_the_next_norms_input(models, inspected, finding):
    model = models.tiny("GPT2")
    model.transformer.h[0].register_forward_hook(lambda _module, _args, output: output * math.inf)
    found = finding(inspected(model), "E3")
    assert found.sites[0] == "transformer.h.1.ln_1"
    assert "look between transformer.h.0.ln_2 and here" in found.evidence[0]


@pytest.mark.slow
def test_a_norm_that_makes_nan_itself(models, inspected):
    class NoEps(NarrowNorm):
        def forward(self, x):
            return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.weight

    model = models.plain(NoEps)
    model.embedding.weight.data[5:30] = 0.0
    cause, found = [each for each in inspected(model).findings if each.severity == "error"]
    # The cause is told first, what it leads to behind it.
    assert (cause.rule, found.rule) == ("A10", "E3")
    assert found.sites[0] == "blocks.0.norm_1"
    assert "so the norm itself makes them" in found.evidence[0]


@pytest.mark.slow
def test_the_headroom_above_a_massive_activation_is_a_note(models, inspected, facts_of):
    """SmolLM2 in float16: one element of 25,000 beside a median rms of 6, 1.4 bits below overflow on any text."""
    model = models.tiny("GPT2").half()
    facts = facts_of(inspected(model), model)
    severities = []
    for rms, bits in ((6.0, 1.4), (600.0, 1.4), (6.0, 0.4)):
        rows = replace(facts.sites[2].input, absmax=65504 / 2**bits, rms_quantiles=(rms, rms, rms))
        sites = (*facts.sites[:2], replace(facts.sites[2], input=rows, headroom_bits=bits), *facts.sites[3:])
        severities.append(RANGE.check(replace(facts, sites=sites)).severity)
    assert severities == ["note", "warning", "error"]
    repeated = replace(facts, sites=sites, model=replace(facts.model, distinct=1))
    assert RANGE.check(repeated).severity == "error"
    little = replace(sites[2], headroom_bits=1.4)
    assert RANGE.check(replace(repeated, sites=(little,))).severity == "note"
