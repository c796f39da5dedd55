"""Group B on real tiny models: the 1 of a gain, and gains that were never loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from normkit.inspection.build_inspection import infer
from normkit.measurement.intent import Intent
from normkit.rules import RULES
from normkit.rules.rule import NotChecked
from watched_runs import series, training


class PlainGain(nn.Module):
    """A Gemma norm whose port takes the weight for the gain."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class DoubledGain(PlainGain):
    """One that adds the 1 twice."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (2 + self.weight)


def norms(model):
    return [(path, module) for path, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]


def shift(model, by):
    with torch.no_grad():
        for _, module in norms(model):
            module.weight += by
    return model


def ported(model, norm, offset=0.0):
    """The same model with another norm class on the same weights, plus a number."""
    for path, module in norms(model):
        model.set_submodule(path, norm(module.weight + offset))
    return model


@pytest.mark.slow
def test_a_port_that_misses_the_1(models, inspected, finding, status):
    gemma = models.train(models.tiny("Gemma", head_dim=16))
    assert status(inspected(gemma), "B1") == "clean"
    found = finding(inspected(ported(gemma, PlainGain)), "B1")
    assert found.severity == "error"
    assert found.sites[0] == "model.layers.0.input_layernorm"
    assert len(found.sites) == 7
    assert "the gain is weight, the config says 1 + weight" in found.evidence[0]


@pytest.mark.slow
def test_one_norm_that_misses_the_1(models, inspected, finding):
    gemma = models.train(models.tiny("Gemma", head_dim=16))
    gemma.model.norm = PlainGain(gemma.model.norm.weight)
    assert finding(inspected(gemma), "B1").sites == ("model.norm",)


@pytest.mark.slow
def test_a_port_that_keeps_the_1_in_the_weights(models, inspected, finding, status):
    trained = ported(models.train(models.tiny("Gemma", head_dim=16)), PlainGain, offset=1.0)
    assert finding(inspected(trained), "B1").severity == "warning"
    fresh = ported(models.tiny("Gemma", head_dim=16), PlainGain, offset=1.0)
    assert status(inspected(fresh), "B1") == "clean"


@pytest.mark.slow
def test_weights_that_lack_the_1(models, inspected, finding, status):
    llama = models.train(models.tiny("Llama"))
    assert status(inspected(llama), "B1") == "clean"
    found = finding(inspected(shift(llama, -1.0)), "B1")
    assert (found.severity, len(found.sites)) == ("error", 7)
    assert "gains scatter around 0 at 7 of 7 norms" in found.measured


@pytest.mark.slow
def test_one_gain_around_0_among_others_is_clean(models, inspected, status):
    llama = models.train(models.tiny("Llama"))
    llama.model.layers[1].input_layernorm.weight.data -= 1.0
    assert status(inspected(llama), "B1") == "clean"


@pytest.mark.slow
def test_untrained_weights_that_lack_the_1(models, inspected, finding):
    assert finding(inspected(shift(models.tiny("Llama"), -1.0)), "B1").severity == "error"


@pytest.mark.slow
def test_a_1_too_many(models, inspected, finding, status):
    gemma = models.train(models.tiny("Gemma", head_dim=16))
    assert status(inspected(gemma), "B2") == "clean"
    found = finding(inspected(ported(gemma, DoubledGain)), "B2")
    assert found.sites[0] == "model.layers.0.input_layernorm"
    assert "the gain is 2 + weight, the config says 1 + weight" in found.evidence[0]


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_weights_that_contain_the_1_already(models, inspected, finding, trained):
    gemma = models.tiny("Gemma", head_dim=16)
    found = finding(inspected(shift(models.train(gemma) if trained else gemma, 1.0)), "B2")
    assert (found.severity, len(found.sites)) == ("error", 7)


@pytest.mark.slow
def test_a_family_that_starts_at_2_is_clean(models, inspected, status):
    assert status(inspected(models.tiny("Nemotron")), "B2") == "clean"


@pytest.mark.slow
def test_a_family_that_starts_at_2_and_was_trained(models, inspected, finding, status):
    nemotron = models.train(models.tiny("Nemotron"))
    assert status(inspected(nemotron), "B2") == "clean"
    with torch.no_grad():
        for module in nemotron.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight += 1.0
    assert "weights contain the 1" in finding(inspected(nemotron), "B2").measured


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "rule", "found"), [(PlainGain, "B1", "weight"), (DoubledGain, "B2", "2 + weight")])
def test_an_intent_file_tells_the_offset_too(models, inspected, finding, status, norm, rule, found):
    class Offset(PlainGain):
        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)

    model = models.plain(lambda width: Offset(0.1 * torch.randn(width)))
    declared = infer(inspected(model), source="intent.json")
    assert status(inspected(model, intent=declared), rule) == "clean"
    model.norm = norm(model.norm.weight)
    hit = finding(inspected(model, intent=declared), rule)
    assert hit.sites == ("norm",)
    assert f"norm: the gain is {found}, intent.json says 1 + weight" in hit.evidence[0]


@pytest.mark.parametrize("rule", ["B1", "B2"])
def test_without_a_config_offsets_are_not_checked(models, inspected, status, rule):
    assert status(inspected(models.plain()), rule) == "not checked"


class NarrowGain(nn.Module):
    """A Gemma norm that adds the 1 in the weight's own dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x):
        wide = x.float()
        row = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (row * (1.0 + self.weight).float()).to(x.dtype)


def of(inspection, rule):
    return next((found for found in inspection.findings if found.rule == rule), None)


@pytest.mark.slow
def test_a_1_that_is_added_in_16_bits(models, inspected, status):
    gemma = models.train(models.tiny("Gemma", layers=2, head_dim=16)).bfloat16()
    assert status(inspected(gemma), "B3") == "clean"
    gemma.model.norm = NarrowGain(gemma.model.norm.weight)
    found = of(inspected(gemma), "B3")
    assert (found.severity, found.sites) == ("warning", ("model.norm",))
    assert "1 is added in bfloat16, which changes" in found.evidence[0]


@pytest.mark.slow
def test_a_1_that_would_round_in_16_bits_is_a_note(models, inspected):
    gemma = models.train(models.tiny("Gemma", layers=2, head_dim=16))
    gemma.model.norm = NarrowGain(gemma.model.norm.weight)
    found = of(inspected(gemma), "B3")
    assert (found.severity, found.measured.partition("; ")[2]) == ("note", "in 16 bits it would round")


@pytest.mark.slow
def test_a_family_that_adds_in_the_weights_dtype_is_clean(models, inspected, status):
    nemotron = models.tiny("Nemotron", layers=2)
    with torch.no_grad():
        for module in nemotron.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.zero_()
    inspection = inspected(models.train(nemotron).bfloat16())
    assert inspection.sites[0].spec.offset_dtype == "parameter"
    assert status(inspection, "B3") == "clean"


def reset(model, *paths):
    with torch.no_grad():
        for path in paths:
            module = model.get_submodule(path)
            module.weight.fill_(1.0)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
    return model


@pytest.mark.slow
def test_one_norm_that_was_never_loaded(models, inspected, finding, status):
    trained = models.train(models.tiny("GPT2"))
    assert status(inspected(trained), "B6") == "clean"
    found = finding(inspected(reset(trained, "transformer.h.1.ln_2")), "B6")
    assert (found.severity, found.sites) == ("error", ("transformer.h.1.ln_2",))
    assert "all 64 gains are exactly 1 and all 64 biases are exactly 0" in found.evidence[0]


@pytest.mark.slow
def test_a_run_with_fresh_weights_had_nothing_to_load(models, inspected, facts_of):
    model = reset(models.train(models.tiny("GPT2")), "transformer.h.1.ln_2")
    inspection = inspected(model)
    never_loaded = next(rule for rule in RULES if rule.id == "B6")

    def outcome(start):
        begun = [series("gain mean", [start, 1.1], site.path) for site in inspection.sites]
        return never_loaded.check(replace(facts_of(inspection, model), training=training(*begun)))

    assert isinstance(outcome(1.0), NotChecked)
    assert outcome(1.05).sites == ("transformer.h.1.ln_2",)


@pytest.mark.slow
def test_a_gain_that_is_made_in_another_way_is_another_rules(models, inspected, finding):
    class Longer(nn.LayerNorm):
        """A Nemotron norm whose gain and bias are multiplied by two numbers: they are no entries of parameters."""

        def forward(self, x):
            gain, bias = 1.01 * (1 + self.weight), 1.02 * self.bias
            return nn.functional.layer_norm(x, self.normalized_shape, gain, bias, self.eps)

    model = models.train(models.tiny("Nemotron"))
    stock = model.model.norm
    model.model.norm = Longer(64, eps=stock.eps)
    model.model.norm.load_state_dict(stock.state_dict())
    found = finding(inspected(model), "E5")
    assert (found.severity, found.sites) == ("warning", ("model.norm",))
    assert "its gain is no such" in found.evidence[0]


def shaped_as_trained(models, shift=0.0, only=""):
    """Gains as Gemma 3 has them: of any size, log-normal from norm to norm, their small entries near 0."""
    model = models.tiny("Gemma3Text", layers=4, head_dim=16)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for index, (path, module) in enumerate(model.named_modules()):
            if type(module).__name__ == "Gemma3RMSNorm":
                rows = torch.rand(module.weight.shape, generator=generator) + 0.02
                module.weight.copy_(rows * (1.5 + 3 * (index % 5)) - 1)
                if only in path:
                    module.weight.add_(shift)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "only", "rule", "sites"),
    [(1.0, "", "B2", 25), (-1.0, "", "B1", 25), (1.0, "self_attn", "B2", 8), (-1.0, "self_attn", "B1", 8)],
)
def test_trained_1_plus_weights_that_lie_1_off(models, inspected, shift, only, rule, sites):
    found = {found.rule: found for found in inspected(shaped_as_trained(models, shift, only)).findings}[rule]
    assert found.severity == "error"
    assert len(found.sites) == sites
    assert all(only in path for path in found.sites)


@pytest.mark.slow
def test_trained_1_plus_weights_of_any_size_are_clean(models, inspected):
    assert not {"B1", "B2"} & {found.rule for found in inspected(shaped_as_trained(models)).findings}


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


def test_a_bias_alone_at_its_start_is_clean(models, inspected, status):
    trained = models.train(models.tiny("GPT2"))
    trained.transformer.ln_f.bias.data.zero_()
    assert status(inspected(trained), "B6") == "clean"


@pytest.mark.slow
def test_untrained_or_mostly_untrained_models_are_clean(models, inspected, status):
    assert status(inspected(models.tiny("GPT2")), "B6") == "clean"
    paths = [
        f"model.layers.{index}.{name}" for index in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    assert status(inspected(reset(models.train(models.tiny("Llama")), *paths)), "B6") == "clean"


@pytest.mark.slow
def test_norms_without_parameters_do_not_count(models, inspected, status):
    olmo = models.tiny("Olmo")
    assert all(site.gain is None for site in inspected(olmo).sites)
    assert status(inspected(olmo), "B6") == "clean"


def test_gains_that_start_at_two_are_not_trained(models, inspected, facts_of):
    model = models.plain()
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.LayerNorm) and path != "norm":
                module.weight.fill_(2)
    facts = facts_of(inspected(model), model)
    rule = next(rule for rule in RULES if rule.id == "B6")
    assert rule.check(facts).sites == ("norm",)
    starts = {site.path: 2.0 for site in facts.sites if site.path != "norm"}
    assert rule.check(replace(facts, intent=Intent(source="Stock", specs={}, initial_gains=starts))) is None
