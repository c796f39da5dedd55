"""What the stock class of a model's config computes, seen from models that are whole, changed, foreign or huge."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from forks import Fork
from normkit import specs
from normkit.measurement.intent import stock_intent

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(family, **options):
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, **options
    )
    return transformers.GPT2LMHeadModel(config)


def test_every_norm_of_the_stock_class_has_its_spec():
    intent = stock_intent(gpt2())
    blocks = [f"transformer.h.{index}.{name}" for index in range(2) for name in ("ln_1", "ln_2")]
    assert intent.source == "GPT2LMHeadModel"
    assert intent.specs == dict.fromkeys([*blocks, "transformer.ln_f"], specs.TORCH_LAYER_NORM)
    assert intent.initial_gains == dict.fromkeys(intent.specs, 1.0)
    assert intent.replaced == frozenset()
    assert {"", "transformer.h.1", "transformer.h.1.attn", "transformer.ln_f"} <= intent.stock


@pytest.mark.parametrize(
    ("family", "options", "norms", "spec", "initial"),
    [
        ("Llama", {}, 5, specs.LLAMA, 1.0),
        ("Gemma2", {"head_dim": 8, "num_key_value_heads": 2}, 9, specs.GEMMA, 1.0),
        ("Olmo", {}, 5, specs.OLMO, None),
        ("NanoChat", {}, 9, specs.NANOCHAT, None),
        ("Nemotron", {"num_key_value_heads": 4}, 5, specs.NEMOTRON, 2.0),
    ],
)
def test_families(family, options, norms, spec, initial):
    intent = stock_intent(tiny(family, **options))
    assert len(intent.specs) == norms
    assert set(intent.specs.values()) == {spec}
    assert set(intent.initial_gains.values()) == ({initial} if initial is not None else set())


def test_gains_with_a_row_for_each_head():
    intent = stock_intent(tiny("Cohere", use_qk_norm=True))
    assert intent.specs["model.layers.0.self_attn.q_norm"] == specs.COHERE


def test_a_weight_that_is_a_buffer_is_no_gain():
    intent = stock_intent(tiny("FalconMamba", state_size=4))
    path = "backbone.layers.0.mixer.b_layernorm"
    assert intent.specs[path] == specs.OLMO2.replace(has_weight=False)
    assert path not in intent.initial_gains
    assert path not in intent.features


def test_the_config_counts_and_not_what_the_model_computes():
    model = gpt2(layer_norm_epsilon=1e-3)
    model.transformer.h[0].ln_1.eps = 0.5
    assert stock_intent(model).specs["transformer.h.0.ln_1"].eps == pytest.approx(1e-3, rel=1e-6)


def test_a_norm_that_was_replaced_is_told():
    model = gpt2()
    model.transformer.ln_f = nn.Identity()
    del model.transformer.h[0].ln_2
    intent = stock_intent(model)
    assert intent.replaced == {"transformer.ln_f", "transformer.h.0.ln_2"}
    assert "transformer.ln_f" in intent.specs
    assert not {"transformer.ln_f", "transformer.h.0.ln_2"} & intent.stock


def test_a_block_that_was_left_out_is_not_replaced():
    model = gpt2()
    del model.transformer.h[1]
    intent = stock_intent(model)
    assert "transformer.h.1.ln_1" in intent.specs
    assert intent.replaced == frozenset()


def test_a_module_with_a_forward_of_its_own_is_not_stock():
    model = gpt2()
    model.transformer.h[0].forward = model.transformer.h[0].forward
    assert "transformer.h.0" not in stock_intent(model).stock
    assert "transformer.h.1" in stock_intent(model).stock


def test_a_subclass_is_held_against_its_stock_class():
    class Mine(transformers.GPT2LMHeadModel):
        pass

    intent = stock_intent(Mine(gpt2().config))
    assert intent.source == "GPT2LMHeadModel"
    assert "" not in intent.stock


class Port(nn.Module):
    """A class that transformers does not know, with a config that it does."""

    def __init__(self, config, name="model"):
        super().__init__()
        self.config = config
        self.add_module(name, transformers.LlamaModel(config))


def test_a_port_with_the_stock_names_is_held_against_the_stock_class():
    config = transformers.LlamaConfig(**SIZES)
    intent = stock_intent(Port(config))
    assert intent.source == "LlamaForCausalLM"
    assert "model.norm" in intent.specs
    config.architectures = ["LlamaForSequenceClassification"]
    assert stock_intent(Port(config)).source == "LlamaForSequenceClassification"


def test_a_port_on_the_familys_own_foundation():
    class Mine(transformers.LlamaPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.model = transformers.LlamaModel(config)

    assert stock_intent(Mine(transformers.LlamaConfig(**SIZES))).source == "LlamaForCausalLM"


def test_without_a_class_or_a_config_that_transformers_knows_there_is_no_intent():
    config = transformers.LlamaConfig(**SIZES)
    assert stock_intent(nn.LayerNorm(4)) is None
    assert stock_intent(Port(config, name="trunk")) is None
    port = Port(config)
    port.config = {"hidden_size": 32}
    assert stock_intent(port) is None


def test_a_config_that_builds_nothing_gives_no_intent():
    model = gpt2()
    model.config.n_head = 5
    assert stock_intent(model) is None


def test_nothing_around_it_changes():
    model = gpt2().bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.set_default_dtype(torch.float64)
    transformers.logging.set_verbosity_info()
    state = torch.get_rng_state()
    try:
        intent = stock_intent(model)
        assert torch.get_default_dtype() == torch.float64
        assert transformers.logging.get_verbosity() == transformers.logging.INFO
    finally:
        torch.set_default_dtype(torch.float32)
        transformers.logging.set_verbosity_warning()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_device() == torch.device("cpu")
    assert set(intent.specs.values()) == {specs.TORCH_LAYER_NORM}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


@pytest.mark.slow
def test_a_model_of_seven_billion_parameters_takes_no_memory():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) > 6e9
    assert len(stock_intent(model).specs) == 65


@pytest.mark.slow
def test_transformers_is_not_imported_for_other_models():
    script = (
        "import sys, torch; from normkit.measurement.intent import stock_intent; "
        "model = torch.nn.LayerNorm(4); model.config = object(); "
        "assert stock_intent(model) is None; assert 'transformers' not in sys.modules"
    )
    process = Fork(script, ours=False)
    assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_norms_that_share_a_parameter_in_the_stock_class():
    from transformers import ZambaConfig, ZambaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    mamba = {"mamba_d_state": 4, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    model = ZambaForCausalLM(ZambaConfig(**sizes, **mamba, num_hidden_layers=6, pad_token_id=0))
    tied = stock_intent(model).tied
    assert {f"model.layers.{layer}.shared_transf.pre_ff_layernorm" for layer in (2, 4)} in tied


def test_a_cut_vocabulary_keeps_the_number_of_its_padding_token():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=99, pad_token_id=98))
    model.resize_token_embeddings(50)
    model.config.pad_token_id = 98
    assert len(stock_intent(model).specs) == 3
    assert model.config.pad_token_id == 98
