"""Group E on real tiny models: 16-bit statistics, little room below overflow, NaN, and differences of processes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from faulty_norms import NoEps, SixteenBitStatistics
from normkit.rules.precision import different_replicas, narrow_statistics, out_of_range, wrong_observer
from normkit.rules.rule import NO_RUN, NotChecked
from watched_runs import facts as facts_of_run
from watched_runs import parameter, training

PATH = "model.layers.1.input_layernorm"
VERIFIED = "observer verified: 6 of 6 statistics within 1e-6 of float64"


def narrowed(models, path=PATH, dtype=torch.float32, scale=1.0):
    model = models.tiny("Llama").to(dtype)
    model.set_submodule(path, SixteenBitStatistics(64).to(dtype))
    model.model.embed_tokens.weight.data *= scale
    return model


# E2.


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "severity"),
    [
        ({"dtype": torch.bfloat16}, "warning"),
        # An embedding of rms 25 sums up to 64 * 25**2 = 40000, 0.7 bits below 65504.
        ({"path": "model.norm", "dtype": torch.float16, "scale": 25 / 0.02}, "error"),
        # The config tells.
        ({}, "note"),
    ],
)
def test_statistics_in_16_bits(models, inspected, finding, status, options, severity):
    dtype = options.get("dtype", torch.float32)
    assert status(inspected(models.tiny("Llama").to(dtype)), "E2") == "clean"
    found = finding(inspected(narrowed(models, **options)), "E2")
    assert (found.severity, found.sites) == (severity, (options.get("path", PATH),))
    if severity == "warning":
        assert "the squares of 64 features are summed in bfloat16" in found.evidence[0]


@pytest.mark.slow
def test_narrow_statistics_in_float32_without_a_config_or_by_intent_are_clean(models, inspected, status, facts_of):
    assert status(inspected(models.plain(SixteenBitStatistics)), "E2") == "clean"
    model = narrowed(models)
    facts = facts_of(inspected(model), model)
    assert narrow_statistics.check(facts) is not None
    narrow = {path: spec.replace(statistics_dtype="input") for path, spec in facts.intent.specs.items()}
    assert narrow_statistics.check(replace(facts, intent=replace(facts.intent, specs=narrow))) is None


# E3.


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest", "dtype", "severity"),
    [
        (20_000, torch.float16, "warning"),
        (50_000, torch.float16, "error"),
        (50_000, torch.bfloat16, None),
        (1, torch.float16, None),
    ],
)
def test_little_room_in_float16(models, inspected, largest, dtype, severity):
    model = models.tiny("Llama").to(dtype)
    model.model.embed_tokens.weight.data[:, 7] = largest
    found = next((found for found in inspected(model).findings if found.rule == "E3"), None)
    assert (None if found is None else found.severity) == severity
    if found is not None:
        assert found.sites[0] == "model.layers.0.input_layernorm"
        assert f"{math.log2(65504 / largest):.2f} bits" in found.measured


def in_a_gain(model):
    model.h[1].ln_1.weight.data[3] = math.nan


def in_a_projection(model):
    model.h[0].mlp.c_proj.bias.data[0] = math.inf


def in_an_output(model):
    model.h[0].register_forward_hook(lambda _module, _args, output: output * math.inf)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "sites", "told"),
    [
        (
            *(in_a_gain, ("h.1.ln_1", "h.1.ln_2", "h.2.ln_1", "h.2.ln_2", "ln_f")),
            {
                0: "transformer.h.1.ln_1: NaN or infinity: 1 in the gain, 80 rows of the output; it is the first, so "
                "the fault starts in its parameters",
                1: "transformer.h.1: the first block with NaN or infinity, in its output",
            },
        ),
        # It is named before the norms behind it.
        (in_a_projection, ("h.0.mlp.c_proj", "h.1.ln_1"), {1: "transformer.h.1.ln_1: the first of 5 norms that show"}),
        # No parameter holds it: it comes in with the next norm's input.
        (in_an_output, ("h.1.ln_1",), {0: "look between transformer.h.0.ln_2 and here"}),
    ],
)
def test_nan_is_told_where_it_begins(models, inspected, finding, plant, sites, told):
    model = models.tiny("GPT2", layers=3)
    plant(model.transformer)
    found = finding(inspected(model), "E3")
    assert found.severity == "error"
    assert found.sites[: len(sites)] == tuple(f"transformer.{site}" for site in sites)
    assert all(words in found.evidence[place] for place, words in told.items())
    if plant is in_a_projection:
        assert found.measured == "NaN or infinity in 1 parameter, first in transformer.h.0.mlp.c_proj.bias"


@pytest.mark.slow
def test_nan_in_a_gain_counts_by_itself(healthy, models, facts_of):
    facts = facts_of(healthy, models.tiny("GPT2"))
    gain = replace(facts.sites[2].gain, nonfinite=1)
    sites = (*facts.sites[:2], replace(facts.sites[2], gain=gain), *facts.sites[3:])
    assert out_of_range.check(replace(facts, sites=sites)).sites == ("transformer.h.1.ln_1",)


@pytest.mark.slow
def test_a_norm_that_makes_nan_itself(models, inspected):
    model = models.plain(NoEps)
    model.embedding.weight.data[5:30] = 0.0
    cause, found = [each for each in inspected(model).findings if each.severity == "error"]
    # The cause is told first, its consequence behind it.
    assert (cause.rule, found.rule) == ("A10", "E3")
    assert found.sites[0] == "blocks.0.norm_1"
    assert "so the norm itself makes them" in found.evidence[0]


@pytest.mark.slow
def test_the_headroom_above_a_massive_activation_is_a_note(models, inspected, facts_of):
    """SmolLM2 in float16: one element of 25,000 beside a median rms of 6, 1.4 bits below overflow on any text."""
    model = models.tiny("GPT2").half()
    facts = facts_of(inspected(model), model)

    def severity(rms, bits, distinct=None):
        rows = replace(facts.sites[2].input, absmax=65504 / 2**bits, rms_quantiles=(rms, rms, rms))
        site = replace(facts.sites[2], input=rows, headroom_bits=bits)
        seen = replace(facts, sites=(site,), model=replace(facts.model, distinct=distinct))
        return out_of_range.check(seen).severity

    assert [severity(6.0, 1.4), severity(600.0, 1.4), severity(6.0, 0.4)] == ["note", "warning", "error"]
    # Where one token is repeated, every row may have them.
    assert [severity(600.0, 1.4, distinct=1), severity(6.0, 0.4, distinct=1)] == ["note", "error"]


# E7 and E8.


def pooled(*parameters, observer=VERIFIED, ranks=2):
    return facts_of_run(training(ranks=ranks, observer=observer, parameters=parameters))


def gain(**changes):
    return parameter("norm.weight", "gain", site="norm", **changes)


@pytest.mark.parametrize(
    ("dtype", "spread", "is_hit"),
    [("float32", 9e-7, False), ("float32", 2e-6, True), ("bfloat16", 9e-4, False), ("bfloat16", 2e-3, True)],
)
def test_replicas_that_drift(dtype, spread, is_hit):
    outcome = different_replicas.check(pooled(parameter("w"), gain(dtype=dtype, rank_spread=spread)))
    assert (outcome is not None) is is_hit
    if is_hit:
        assert (outcome.severity, outcome.sites) == ("error", ("norm",))
        assert outcome.measured.startswith("1 parameter with other numbers in some of 2 processes")


def test_gradients_that_were_not_reduced():
    drifted, unreduced = parameter("w", rank_spread=1e-3), gain(gradient_rank_spread=0.3, rank_spread=1e-3)
    outcome = different_replicas.check(pooled(drifted, unreduced))
    assert outcome.sites == ("w", "norm")
    assert different_replicas.check(pooled(gain(gradient_rank_spread=0.3))).sites == ("norm",)
    assert outcome.measured == "gradients of 1 parameter differ between 2 processes, by up to 0.3"
    # The norm's line comes first: its gradient is the cause.
    assert outcome.evidence[0] == (
        "norm.weight (gain): its gradient differs by 0.3 before the optimizer's step, and it differs by 0.001 itself"
    )


def test_an_observer_that_failed():
    assert wrong_observer.check(pooled()) is None
    outcome = wrong_observer.check(pooled(observer="observer failed: variance 3.10, should be 3.19"))
    assert (outcome.severity, outcome.measured) == ("error", "observer failed: variance 3.10, should be 3.19")


@pytest.mark.parametrize("rule", [different_replicas, wrong_observer], ids=lambda rule: rule.id)
def test_one_process_is_not_checked(rule):
    assert rule.check(facts_of_run(None)) is NO_RUN
    assert isinstance(rule.check(pooled(gain(rank_spread=1.0), observer="", ranks=1)), NotChecked)
