"""Group B on real tiny models: the 1 of a gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import normkit as nk
from faulty_norms import OffsetInSixteenBits, OffsetMissed, OffsetTwice
from helpers import finding_of
from media_models import other_model
from normkit.inspection.result import infer
from normkit.rules.gain import missing_offset
from watched_runs import series, training


class Offset(OffsetMissed):
    """A Gemma norm as it is meant."""

    def forward(self, x):
        return self.rms(x) * (1 + self.weight.float())


def gemma(models, trained=True, **options):
    model = models.tiny("Gemma", head_dim=16, **options)
    return models.train(model) if trained else model


def norms(model):
    kinds = ("RMSNorm", "LayerNorm", "LayerNorm1P")
    return [(path, module) for path, module in model.named_modules() if type(module).__name__.endswith(kinds)]


def shift(model, by):
    with torch.no_grad():
        for _, module in norms(model):
            module.weight += by
    return model


def with_weight(norm, weight):
    made = norm(weight.numel())
    made.weight.data = weight.detach().clone()
    return made


def ported(model, norm, offset=0.0):
    """The same model with another norm class on the same weights, plus a number."""
    for path, module in norms(model):
        model.set_submodule(path, with_weight(norm, module.weight + offset))
    return model


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "rule", "severity", "words"),
    [
        (lambda m: ported(gemma(m), OffsetMissed), "B1", "error", "the gain is weight, the config says 1 + weight"),
        # The weights contain the 1.
        (lambda m: ported(gemma(m), OffsetMissed, offset=1.0), "B1", "warning", "the gain is weight"),
        (lambda m: shift(m.train(m.tiny("Llama")), -1.0), "B1", "error", "of the gain is negative"),
        (lambda m: shift(m.tiny("Llama"), -1.0), "B1", "error", ""),
        (lambda m: ported(gemma(m), OffsetTwice), "B2", "error", "the gain is 2 + weight, the config says 1 + weight"),
        (lambda m: shift(gemma(m), 1.0), "B2", "error", "1 + weight goes from"),
        (lambda m: shift(gemma(m, trained=False), 1.0), "B2", "error", "1 + weight goes from"),
        (lambda m: shift(m.train(m.tiny("Nemotron")), 1.0), "B2", "error", "1 + weight goes from"),
    ],
)
def test_all_norms_with_a_wrong_offset(models, inspected, finding, make, rule, severity, words):
    inspection = inspected(make(models))
    found = finding(inspection, rule)
    assert (found.severity, found.sites) == (severity, tuple(site.path for site in inspection.sites))
    assert words in found.evidence[0]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (lambda m: gemma(m), ("B1", "B2")),
        (lambda m: m.train(m.tiny("Llama")), ("B1", "B2")),
        # The weights were converted along with the code.
        (lambda m: ported(gemma(m, trained=False), OffsetMissed, offset=1.0), ("B1",)),
        # A family that starts at 2.
        (lambda m: m.tiny("Nemotron"), ("B2",)),
        (lambda m: m.train(m.tiny("Nemotron")), ("B2",)),
    ],
)
def test_right_offsets_are_clean(models, inspected, status, make, rules):
    inspection = inspected(make(models))
    assert {status(inspection, rule) for rule in rules} == {"clean"}


@pytest.mark.slow
def test_one_norm_with_a_wrong_offset(models, inspected, finding, status):
    model = gemma(models)
    model.model.norm = with_weight(OffsetMissed, model.model.norm.weight)
    assert finding(inspected(model), "B1").sites == ("model.norm",)
    # One gain around 0 among others is clean.
    llama = models.train(models.tiny("Llama"))
    llama.model.layers[1].input_layernorm.weight.data -= 1.0
    assert status(inspected(llama), "B1") == "clean"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("norm", "rule", "found"), [(OffsetMissed, "B1", "weight"), (OffsetTwice, "B2", "2 + weight")])
def test_an_intent_file_tells_the_offset_too(models, inspected, finding, status, norm, rule, found):
    assert status(inspected(models.plain()), rule) == "not checked"
    model = models.plain(lambda width: with_weight(Offset, 0.1 * torch.randn(width)))
    declared = infer(inspected(model), source="intent.json")
    assert status(inspected(model, intent=declared), rule) == "clean"
    model.norm = with_weight(norm, model.norm.weight)
    hit = finding(inspected(model, intent=declared), rule)
    assert hit.sites == ("norm",)
    assert f"norm: the gain is {found}, intent.json says 1 + weight" in hit.evidence[0]


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


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "only", "rule", "sites"),
    [
        (1.0, "", "B2", 25),
        (-1.0, "", "B1", 25),
        (1.0, "self_attn", "B2", 8),
        (-1.0, "self_attn", "B1", 8),
        (0.0, "", "", 0),
    ],
)
def test_trained_1_plus_weights_that_are_1_off(models, inspected, shift, only, rule, sites):
    offsets = {found.rule: found for found in inspected(shaped_as_trained(models, shift, only)).findings}
    assert {"B1", "B2"} & offsets.keys() == ({rule} if rule else set())
    if rule:
        assert (offsets[rule].severity, len(offsets[rule].sites)) == ("error", sites)
        assert all(only in path for path in offsets[rule].sites)


def test_in_a_run_only_the_gains_that_began_off_count_as_off_and_all_gains_count_as_norms(models, inspected, facts_of):
    model = models.shape(models.tiny("Llama", layers=2))
    with torch.no_grad():
        for _, norm in norms(model):
            norm.weight.normal_(0.0, 0.02)
    inspection = inspected(model)
    paths = [site.path for site in inspection.sites]

    def found(*from_zero):
        begun = [series("gain mean", [0.0 if path in from_zero else 1.0, 0.0], path) for path in paths]
        return missing_offset.check(replace(facts_of(inspection, model), training=training(*begun)))

    assert found(*paths).sites == tuple(paths)
    # Its gain is around 0 because it started there: it has the code of the others.
    assert found(paths[1]) is None


# B3.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_1_that_is_added_in_16_bits(models, inspected, status, dtype):
    model = gemma(models, layers=2).to(dtype)
    assert status(inspected(model), "B3") == "clean"
    model.model.norm = with_weight(OffsetInSixteenBits, model.model.norm.weight)
    found = next(found for found in inspected(model).findings if found.rule == "B3")
    assert found.sites == ("model.norm",)
    if dtype == torch.bfloat16:
        assert found.severity == "warning"
        assert "1 is added in bfloat16, which changes" in found.evidence[0]
    else:
        assert (found.severity, found.measured.partition("; ")[2]) == ("note", "in 16 bits it would round")
        assert found.evidence[0].endswith(
            "1 is added in float32, the weight's own dtype: it changes no gain here, and would in 16 bits"
        )


@pytest.mark.slow
def test_a_family_that_adds_in_the_weights_dtype_is_clean(models, inspected, status):
    nemotron = models.tiny("Nemotron", layers=2)
    with torch.no_grad():
        for _, module in norms(nemotron):
            module.weight.zero_()
    inspection = inspected(models.train(nemotron).bfloat16())
    assert inspection.sites[0].spec.offset_dtype == "parameter"
    assert status(inspection, "B3") == "clean"


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
    assert "its gain is computed otherwise" in found.evidence[0]


@pytest.mark.slow
def test_one_tower_whose_gains_lack_the_1():
    model, batch = other_model("SigLIP, both towers")
    assert finding_of(nk.inspect(model, batch), "B1") is None
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.LayerNorm) and path.startswith("text_model"):
                module.weight -= 1.0
    found = finding_of(nk.inspect(model, batch), "B1")
    assert (found.severity, len(found.sites)) == ("error", 4)
    assert found.measured == "gains scatter around 0 at 4 of 4 norms: they need a 1 added"
