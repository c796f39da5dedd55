"""The values of gains: held against an intent file, and against each other where there is none."""

from __future__ import annotations

import copy

import pytest
import torch

from normkit.inspection.build_inspection import infer

LATER, EARLIER = "transformer.h.1.ln_1", "transformer.h.0.ln_2"


def weight(model, path):
    return model.get_submodule(path).weight.data


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


def of(inspection):
    return next((found for found in inspection.findings if found.rule == "B14"), None)


@pytest.mark.slow
def test_the_same_model_is_clean(model, inspected, declared, status):
    assert status(inspected(model, intent=declared), "B14") == "clean"


def permuted(model):
    weight(model, LATER).copy_(weight(model, LATER).flip(0))


def doubled(model):
    weight(model, LATER).mul_(2)


def mirrored(model):
    weight(model, LATER).neg_()


def shifted(model):
    weight(model, LATER).add_(1)


def copied(model):
    weight(model, LATER).copy_(weight(model, EARLIER))


def another(model):
    weight(model, LATER)[3] += 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (permuted, "its gain has its entries in another order"),
        (doubled, "its gain is 2 times the one that is meant"),
        (mirrored, "its gain has the opposite sign"),
        (shifted, "its gain is the one that is meant plus 1"),
        (copied, f"its gain is the one of {EARLIER}"),
        (another, "(some entries differ)"),
    ],
)
def test_a_gain_that_was_changed_is_named_with_what_happened(model, inspected, declared, change, words):
    change(model)
    found = of(inspected(model, intent=declared))
    assert (found.severity, found.sites) == ("warning" if change is another else "error", (LATER,))
    assert found.measured == "1 parameter of norms with other values than intent.json"
    assert found.evidence[0].startswith(f"{LATER}: its gain")
    assert words in found.evidence[0]


class OnePerCentMore(torch.nn.LayerNorm):
    def forward(self, x):
        return 1.01 * super().forward(x)


@pytest.mark.slow
def test_an_output_that_is_multiplied_is_another_rules(model, inspected, declared):
    model.get_submodule(LATER).__class__ = OnePerCentMore
    found = inspected(model, intent=declared)
    assert of(found) is None
    assert [(each.rule, each.sites) for each in found.findings if each.severity != "note"] == [("E5", (LATER,))]


@pytest.mark.slow
def test_two_gains_that_were_swapped(model, inspected, declared):
    one, other = weight(model, EARLIER), weight(model, LATER)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    found = of(inspected(model, intent=declared))
    assert (found.severity, found.sites) == ("error", (EARLIER, LATER))
    assert found.evidence[0] == (
        f"{EARLIER}: its gain is the one of {LATER}, which has this one's: the two are swapped"
    )


@pytest.mark.slow
def test_a_bias_counts_too(model, inspected, declared):
    model.get_submodule(LATER).bias.data.mul_(3)
    found = of(inspected(model, intent=declared))
    assert "its bias is 3 times the one that is meant" in found.evidence[0]


@pytest.mark.slow
def test_a_later_checkpoint_is_a_note(model, inspected, declared):
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data += 0.01 * torch.randn(64)
            module.bias.data += 0.01 * torch.randn(64)
    found = of(inspected(model, intent=declared))
    assert found.severity == "note"
    assert found.measured == "14 of 14 parameters of norms have moved, as in a later checkpoint"


@pytest.mark.slow
def test_rounding_to_16_bits_is_no_change(model, inspected, declared):
    assert of(inspected(model.bfloat16(), intent=declared)) is None


@pytest.mark.slow
def test_without_a_reference_the_command_is_given(model, inspected):
    check = next(check for check in inspected(model).checks if check.rule == "B14")
    assert check.status == "not checked"
    assert check.reason == (
        "no reference for the values of gains: normkit identify MODEL --against REFERENCE compares them"
    )


@pytest.mark.slow
def test_without_a_reference_a_gain_that_two_norms_have_is_named(model, inspected, finding):
    copied(model)
    found = finding(inspected(model), "B14")
    assert found.sites == (EARLIER, LATER)
    assert found.evidence == (f"{LATER}: its 64 gains are a copy of those of {EARLIER}",)


@pytest.mark.slow
def test_gains_that_are_one_parameter_are_another_rules(models, inspected):
    plain = models.train(models.plain())
    plain.blocks[1].norm_2.weight = plain.blocks[1].norm_1.weight
    assert of(inspected(plain)) is None
    # Fresh gains are all alike.
    assert of(inspected(models.plain())) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda gain: -gain, "of its gains are negative, of the median other norm's 0 %: its sign was flipped"),
        (lambda gain: 2 * (gain / 2 * 8).round() / 8, "distinct values, those of the others 64: they were quantized"),
    ],
)
def test_a_gain_unlike_all_others_is_a_warning(models, inspected, change, words):
    model = models.train(models.tiny("Llama", layers=2))
    norm = model.model.layers[1].input_layernorm
    norm.weight.data = change(norm.weight.data)
    (found,) = [each for each in inspected(model).findings if each.rule == "B14"]
    assert (found.severity, found.sites) == ("warning", ("model.layers.1.input_layernorm",))
    assert words in found.evidence[0]
