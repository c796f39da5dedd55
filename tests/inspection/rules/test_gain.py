"""Group B on real tiny models: the 1 of a gain, and gains that were never loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn


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


def test_a_port_that_misses_the_1(models, inspected, finding, status):
    gemma = models.train(models.tiny("Gemma", head_dim=16))
    assert status(inspected(gemma), "B1") == "clean"
    found = finding(inspected(ported(gemma, PlainGain)), "B1")
    assert found.severity == "error"
    assert found.sites[0] == "model.layers.0.input_layernorm"
    assert len(found.sites) == 7
    assert "that of GemmaForCausalLM is 1 + weight" in found.evidence[0]


def test_one_norm_that_misses_the_1(models, inspected, finding):
    gemma = models.train(models.tiny("Gemma", head_dim=16))
    gemma.model.norm = PlainGain(gemma.model.norm.weight)
    assert finding(inspected(gemma), "B1").sites == ("model.norm",)


def test_a_port_that_keeps_the_1_in_the_weights(models, inspected, finding, status):
    trained = ported(models.train(models.tiny("Gemma", head_dim=16)), PlainGain, offset=1.0)
    assert finding(inspected(trained), "B1").severity == "warning"
    fresh = ported(models.tiny("Gemma", head_dim=16), PlainGain, offset=1.0)
    assert status(inspected(fresh), "B1") == "clean"


def test_weights_that_lack_the_1(models, inspected, finding, status):
    llama = models.train(models.tiny("Llama"))
    assert status(inspected(llama), "B1") == "clean"
    found = finding(inspected(shift(llama, -1.0)), "B1")
    assert (found.severity, len(found.sites)) == ("error", 7)
    assert "gains scatter around 0 at 7 of 7 norms" in found.measured


def test_one_gain_around_0_among_others_is_clean(models, inspected, status):
    llama = models.train(models.tiny("Llama"))
    llama.model.layers[1].input_layernorm.weight.data -= 1.0
    assert status(inspected(llama), "B1") == "clean"


def test_untrained_weights_that_lack_the_1(models, inspected, finding):
    assert finding(inspected(shift(models.tiny("Llama"), -1.0)), "B1").severity == "error"


def test_a_1_too_many(models, inspected, finding, status):
    gemma = models.train(models.tiny("Gemma", head_dim=16))
    assert status(inspected(gemma), "B2") == "clean"
    found = finding(inspected(ported(gemma, DoubledGain)), "B2")
    assert found.sites[0] == "model.layers.0.input_layernorm"
    assert "2 is added to the weight, GemmaForCausalLM adds 1" in found.evidence[0]


@pytest.mark.parametrize("trained", [True, False])
def test_weights_that_contain_the_1_already(models, inspected, finding, trained):
    gemma = models.tiny("Gemma", head_dim=16)
    found = finding(inspected(shift(models.train(gemma) if trained else gemma, 1.0)), "B2")
    assert (found.severity, len(found.sites)) == ("error", 7)


def test_a_family_that_starts_at_2_is_clean(models, inspected, status):
    assert status(inspected(models.tiny("Nemotron")), "B2") == "clean"


@pytest.mark.parametrize("rule", ["B1", "B2"])
def test_without_a_config_offsets_are_not_checked(models, inspected, status, rule):
    assert status(inspected(models.plain()), rule) == "not checked"


def reset(model, *paths):
    with torch.no_grad():
        for path in paths:
            module = model.get_submodule(path)
            module.weight.fill_(1.0)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
    return model


def test_one_norm_that_was_never_loaded(models, inspected, finding, status):
    trained = models.train(models.tiny("GPT2"))
    assert status(inspected(trained), "B6") == "clean"
    found = finding(inspected(reset(trained, "transformer.h.1.ln_2")), "B6")
    assert (found.severity, found.sites) == ("error", ("transformer.h.1.ln_2",))
    assert "all 64 gains are exactly 1 and all 64 biases are exactly 0" in found.evidence[0]


def test_in_16_bit_a_gain_can_stay_at_1(models, inspected, finding):
    trained = models.train(models.tiny("Llama")).bfloat16()
    assert finding(inspected(reset(trained, "model.norm")), "B6").severity == "warning"


def test_a_bias_alone_at_its_start_is_clean(models, inspected, status):
    trained = models.train(models.tiny("GPT2"))
    trained.transformer.ln_f.bias.data.zero_()
    assert status(inspected(trained), "B6") == "clean"


def test_untrained_or_mostly_untrained_models_are_clean(models, inspected, status):
    assert status(inspected(models.tiny("GPT2")), "B6") == "clean"
    paths = [
        f"model.layers.{index}.{name}" for index in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    assert status(inspected(reset(models.train(models.tiny("Llama")), *paths)), "B6") == "clean"


def test_norms_without_parameters_do_not_count(models, inspected, status):
    olmo = models.tiny("Olmo")
    assert all(site.gain is None for site in inspected(olmo).sites)
    assert status(inspected(olmo), "B6") == "clean"
