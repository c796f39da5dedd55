import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from normkit import demo
from normkit.demo.architecture import build
from normkit.demo.entropy import bits_per_byte
from normkit.demo.faults import without_final_norm, wrong_eps
from normkit.errors import ModelError

IDS = torch.tensor([list(b"def mean(values):\n    ")])


@pytest.fixture(params=["layernorm", "rmsnorm"])
def model(request):
    return AutoModelForCausalLM.from_pretrained(demo.directory(request.param)).eval()


def eps_of(model):
    modules = model.modules()
    values = [getattr(module, "eps", getattr(module, "variance_epsilon", None)) for module in modules]
    return [value for value in values if value is not None]


def test_wrong_eps_reaches_all_thirteen_norms_and_the_output(model):
    healthy = model(input_ids=IDS).logits
    assert wrong_eps(model) is model
    assert eps_of(model) == [1e-2] * 13
    assert not torch.allclose(model(input_ids=IDS).logits, healthy)


def test_without_final_norm_removes_that_norm_only(model):
    states = []
    final = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    final.register_forward_pre_hook(lambda _, arguments: states.append(arguments[0]))
    model(input_ids=IDS)
    assert without_final_norm(model) is model
    assert len(eps_of(model)) == 12
    # The output embedding now reads what the final norm used to read: the same product, bit for bit.
    assert torch.equal(model(input_ids=IDS).logits, model.lm_head(states[0]))


@pytest.mark.slow
def test_each_fault_costs_bits_and_the_missing_norm_more(model):
    text = demo.text().encode()
    healthy = bits_per_byte(model, text)
    spoilt = bits_per_byte(wrong_eps(model), text)
    assert healthy < spoilt < bits_per_byte(without_final_norm(model), text) - 0.5


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_both_work_on_models_with_normkit_layers(name):
    model = build(name)
    assert eps_of(wrong_eps(model, 1e-3)) == [1e-3] * 13
    assert len(eps_of(without_final_norm(model))) == 12


def test_a_fault_that_finds_nothing_to_spoil_says_so(model):
    with pytest.raises(ModelError, match="found none in Linear"):
        wrong_eps(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="found none in"):
        without_final_norm(without_final_norm(model))
