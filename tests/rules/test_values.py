"""The values of gains: never loaded, held against an intent file, and against each other where there is none."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from helpers import finding_of
from normkit import demo
from normkit.inspection.result import infer
from normkit.measurement.intent import Intent
from normkit.rules.rule import NotChecked
from normkit.rules.values import never_loaded
from watched_runs import series, training

LATER, EARLIER = "transformer.h.1.ln_1", "transformer.h.0.ln_2"
HALF_OF_LLAMA = [f"model.layers.{i}.{name}_layernorm" for i in (0, 1) for name in ("input", "post_attention")]


# B6.


def reset(model, *paths):
    with torch.no_grad():
        for path in paths:
            module = model.get_submodule(path)
            module.weight.fill_(1.0)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
    return model


@pytest.mark.slow
def test_one_norm_that_was_never_loaded(models, inspected, finding, facts_of):
    model = reset(models.train(models.tiny("GPT2")), "transformer.h.1.ln_2")
    inspection = inspected(model)
    found = finding(inspection, "B6")
    assert (found.severity, found.sites) == ("error", ("transformer.h.1.ln_2",))
    assert "all 64 gains are exactly 1 and all 64 biases are exactly 0" in found.evidence[0]

    def in_a_run(start):
        begun = [series("gain mean", [start, 1.1], site.path) for site in inspection.sites]
        return never_loaded.check(replace(facts_of(inspection, model), training=training(*begun)))

    # A run with fresh weights had nothing to load.
    assert isinstance(in_a_run(1.0), NotChecked)
    assert in_a_run(1.05).sites == ("transformer.h.1.ln_2",)


@pytest.mark.slow
def test_in_16_bit_a_gain_can_stay_at_1(models, inspected, finding):
    trained = models.train(models.tiny("Llama")).bfloat16()
    assert finding(inspected(reset(trained, "model.norm")), "B6").severity == "error"
    # Where updates round away, trained gains too have half of their entries where they started.
    with torch.no_grad():
        trained.model.layers[0].input_layernorm.weight[:40] = 1
    assert finding(inspected(trained), "B6").severity == "warning"


def test_all_norms_at_their_start_behind_trained_matrices_are_a_note(models, inspected):
    inspection = inspected(models.shape(models.tiny("GPT2", layers=2)))
    (found,) = [each for each in inspection.findings if each.rule == "B6"]
    assert (found.severity, len(found.sites)) == ("note", 5)
    assert "never loaded, unless gains and biases were folded" in found.measured


@pytest.mark.slow
def test_a_bias_alone_that_was_never_loaded(models, inspected, finding):
    trained = models.train(models.tiny("GPT2"))
    trained.transformer.ln_f.bias.data.zero_()
    found = finding(inspected(trained), "B6")
    assert (found.severity, found.sites) == ("warning", ("transformer.ln_f",))
    assert found.evidence == ("transformer.ln_f: all 64 biases are exactly 0, not those of 4 others",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        (lambda norm: (norm.bias.clone(), norm.weight.clone()), "error", "they are exchanged"),
        (
            lambda norm: (16 * norm.weight, norm.bias),
            "warning",
            "times the largest median of 3 other norms of its role",
        ),
    ],
    ids=["exchanged", "multiplied"],
)
def test_gains_unlike_all_others(models, inspected, finding, change, severity, words):
    trained = models.train(models.tiny("GPT2"))
    norm = trained.get_submodule(LATER)
    with torch.no_grad():
        gain, bias = change(norm)
        norm.weight.copy_(gain)
        norm.bias.copy_(bias)
    found = finding(inspected(trained), "B14")
    assert (found.severity, found.sites) == (severity, (LATER,))
    assert words in found.evidence[0]


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
def test_weight_and_bias_exchanged_at_every_norm(inspected, is_shuffled):
    model = AutoModelForCausalLM.from_pretrained(demo.directory("layernorm"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
            order = torch.randperm(norm.bias.numel(), generator=generator) if is_shuffled else slice(None)
            gain, bias = norm.bias[order].clone(), norm.weight[order].clone()
            norm.weight.copy_(gain)
            norm.bias.copy_(bias)
    findings = inspected(model).findings
    assert (findings[0].rule, findings[0].severity, len(findings[0].sites)) == ("B14", "error", 13)
    assert "at 13 of 13 norms: weight and bias are exchanged" in findings[0].measured
    assert "B1" not in {found.rule for found in findings}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.train(m.tiny("GPT2")),
        lambda m: m.tiny("GPT2"),
        lambda m: reset(m.train(m.tiny("Llama")), *HALF_OF_LLAMA),
        # Its norms have no parameters.
        lambda m: m.tiny("Olmo"),
    ],
)
def test_trained_and_untrained_models_are_clean(models, inspected, status, make):
    assert status(inspected(make(models)), "B6") == "clean"


def test_gains_that_start_at_two_are_not_trained(models, inspected, facts_of):
    model = models.plain()
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.LayerNorm) and path != "norm":
                module.weight.fill_(2)
    facts = facts_of(inspected(model), model)
    assert never_loaded.check(facts).sites == ("norm",)
    starts = {site.path: 2.0 for site in facts.sites if site.path != "norm"}
    intent = Intent(source="Stock", specs={}, initial_gains=starts)
    assert never_loaded.check(replace(facts, intent=intent)) is None


# B14.


@pytest.fixture(scope="module")
def trained():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_embd": 64, "n_layer": 3, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.fixture
def model(trained):
    return copy.deepcopy(trained)


@pytest.fixture
def declared(model, inspected):
    return infer(inspected(model), source="intent.json")


def weight(model, path):
    return model.get_submodule(path).weight.data


def permuted(model):
    weight(model, LATER).copy_(weight(model, LATER).flip(0))


def copied(model):
    weight(model, LATER).copy_(weight(model, EARLIER))


def swapped(model):
    kept = weight(model, EARLIER).clone()
    weight(model, EARLIER).copy_(weight(model, LATER))
    weight(model, LATER).copy_(kept)


def another(model):
    weight(model, LATER)[3] += 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (permuted, "its gain has its entries in another order"),
        (lambda model: weight(model, LATER).mul_(2), "its gain is 2 times the one that is meant"),
        (lambda model: weight(model, LATER).neg_(), "its gain has the opposite sign"),
        (lambda model: weight(model, LATER).add_(1), "its gain is the one that is meant plus 1"),
        (copied, f"its gain is the one of {EARLIER}"),
        (another, "(some entries differ)"),
        (lambda model: model.get_submodule(LATER).bias.data.mul_(3), "its bias is 3 times the one that is meant"),
        (swapped, f"its gain is the one of {LATER}, which has this one's: the two are swapped"),
    ],
)
def test_a_parameter_that_was_changed_is_named_with_what_happened(model, inspected, declared, change, words):
    change(model)
    found = finding_of(inspected(model, intent=declared), "B14")
    sites = (EARLIER, LATER) if change is swapped else (LATER,)
    assert (found.severity, found.sites) == ("warning" if change is another else "error", sites)
    assert found.measured.endswith("of norms with other values than intent.json")
    assert found.evidence[0].startswith(f"{sites[0]}: its ")
    assert words in found.evidence[0]


class OnePerCentMore(nn.LayerNorm):
    def forward(self, x):
        return 1.01 * super().forward(x)


@pytest.mark.slow
def test_an_output_that_is_multiplied_is_another_rules(model, inspected, declared, status):
    assert status(inspected(model, intent=declared), "B14") == "clean"
    model.get_submodule(LATER).__class__ = OnePerCentMore
    found = inspected(model, intent=declared)
    assert finding_of(found, "B14") is None
    assert [(each.rule, each.sites) for each in found.findings if each.severity != "note"] == [("E5", (LATER,))]


@pytest.mark.slow
def test_a_later_checkpoint_is_a_note_and_rounding_no_change(model, inspected, declared):
    assert finding_of(inspected(copy.deepcopy(model).bfloat16(), intent=declared), "B14") is None
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.data += 0.01 * torch.randn(64)
            module.bias.data += 0.01 * torch.randn(64)
    found = finding_of(inspected(model, intent=declared), "B14")
    assert found.severity == "note"
    assert found.measured == "14 of 14 parameters of norms have moved, as in a later checkpoint"


@pytest.mark.slow
def test_without_a_reference_a_gain_that_two_norms_have_is_named(model, inspected, finding):
    check = next(check for check in inspected(model).checks if check.rule == "B14")
    assert (check.status, check.reason) == (
        "not checked",
        "no reference for the values of gains: normkit compare MODEL REFERENCE compares them",
    )
    copied(model)
    found = finding(inspected(model), "B14")
    assert found.sites == (EARLIER, LATER)
    assert found.evidence == (f"{LATER}: its 64 gains are a copy of those of {EARLIER}",)


@pytest.mark.slow
def test_gains_that_are_one_parameter_are_another_rules(models, inspected):
    plain = models.train(models.plain())
    plain.blocks[1].norm_2.weight = plain.blocks[1].norm_1.weight
    assert finding_of(inspected(plain), "B14") is None
    # Fresh gains are all alike.
    assert finding_of(inspected(models.plain()), "B14") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda gain: -gain, "of its gains are negative, 0 % of the median other norm's: its sign was flipped"),
        (lambda gain: 2 * (gain / 2 * 8).round() / 8, "distinct values, those of the others 64: they were quantized"),
    ],
)
def test_a_gain_unlike_all_others_is_a_warning(models, inspected, change, words):
    model = models.train(models.tiny("Llama", layers=2))
    norm = model.model.layers[1].input_layernorm
    norm.weight.data = change(norm.weight.data)
    found = finding_of(inspected(model), "B14")
    assert (found.severity, found.sites) == ("warning", ("model.layers.1.input_layernorm",))
    assert words in found.evidence[0]
