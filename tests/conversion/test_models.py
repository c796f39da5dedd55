"""Whole models of `transformers` and PyTorch, converted and put to their usual uses."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

import forks
from normkit import layers
from normkit.conversion.replacement import is_normkit
from normkit.conversion.swapping import convert, revert
from normkit.kernels import cpu

# Whole models of transformers; the swap itself has quick tests.
pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
}
IMAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
TOKENS = {"input_ids": torch.arange(24).reshape(2, 12) % 64}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64).sin()}
# Name -> configuration, inputs, norms swapped.
MODELS = {
    "Llama": (transformers.LlamaConfig(**SIZES), TOKENS, 5),
    "Qwen3": (transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16), TOKENS, 9),
    "Gemma3": (transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=16), TOKENS, 13),
    "GPT2": (transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64), TOKENS, 5),
    "BERT": (transformers.BertConfig(**SIZES), TOKENS, 5),
    "T5": (
        transformers.T5Config(d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, vocab_size=64),
        TOKENS | {"decoder_input_ids": TOKENS["input_ids"]},
        12,
    ),
    "OLMo": (transformers.OlmoConfig(**SIZES), TOKENS, 5),
    "Cohere": (transformers.CohereConfig(**SIZES, num_key_value_heads=1, use_qk_norm=True), TOKENS, 7),
    "Nemotron": (transformers.NemotronConfig(**SIZES, num_key_value_heads=1), TOKENS, 5),
    "ConvNeXt": (transformers.ConvNextConfig(**IMAGES), PIXELS, 9),
    "PoolFormer": (transformers.PoolFormerConfig(**IMAGES), PIXELS, 8),
    "ViT": (
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            image_size=64,
            patch_size=16,
        ),
        PIXELS,
        5,
    ),
}


# Norms that only plain torch computes: a gain for each head, a group norm. Where there are kernels they are left alone.
NO_KERNEL = {"Cohere": 2, "PoolFormer": 8}


def build(name, kind=transformers.AutoModel):
    """An untrained model whose gains and biases are not what they start with."""
    torch.manual_seed(0)
    model = kind.from_config(copy.deepcopy(MODELS[name][0])).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def llama():
    return build("Llama", transformers.AutoModelForCausalLM)


def output(model, name):
    """The first output and the gradients of all parameters that have one."""
    model.zero_grad()
    y = model(**MODELS[name][1])[0]
    y.square().mean().backward()
    return y.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


# Models with norms of the others' kinds.
LIKE = ("Qwen3", "BERT", "OLMo", "ViT")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [*(name for name in MODELS if name not in LIKE), *(pytest.param(name, marks=pytest.mark.slow) for name in LIKE)],
)
def test_numbers_and_state_stay(name):
    model = build(name)
    expected, gradients = output(model, name)
    state = list(model.state_dict())
    report = convert(model)
    left = NO_KERNEL.get(name, 0) if cpu.load() is None else 0
    assert report.counts["swapped"] == MODELS[name][2] - left
    assert ["no kernel computes it" in norm.reason for norm in report.left_alone] == [True] * left
    assert list(model.state_dict()) == state
    y, found = output(model, name)
    # Float32 through two layers: a few hundred epsilons of the largest element.
    torch.testing.assert_close(y, expected, rtol=0.0, atol=5e-5 * float(expected.abs().max()))
    assert found.keys() == gradients.keys()
    largest = max(float(value.abs().max()) for value in gradients.values())
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[key], rtol=0.0, atol=1e-4 * largest)
    assert len(revert(model)) == MODELS[name][2] - left
    again, _ = output(model, name)
    assert torch.equal(again, expected)


def test_gated_norms_are_named():
    config = transformers.Mamba2Config(
        hidden_size=32, num_hidden_layers=2, vocab_size=64, num_heads=4, head_dim=16, state_size=8, n_groups=1
    )
    model = transformers.AutoModel.from_config(config)
    for inputs, reason in ((None, "its forward also takes gate"), (TOKENS, "it is called with 2 tensors: gated")):
        report = convert(model, inputs)
        assert len(report.swapped) == 3
        assert [left.class_name for left in report.left_alone] == ["MambaRMSNormGated"] * 2
        assert report.left_alone[0].reason.startswith(reason)
        revert(model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_llama_gives_nearly_the_same_bits(dtype):
    model = llama().to(dtype)
    with torch.no_grad():
        expected = model(**TOKENS).logits
        convert(model)
        logits = model(**TOKENS).logits
    # A norm's near-tie in 10,000 elements spreads over a token's logits.
    assert (logits == expected).double().mean() > 0.9
    assert float((logits - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * float(expected.abs().max())


def test_generation_gives_the_same_tokens():
    model = llama()
    ways = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**TOKENS, **ways)
    convert(model)
    assert torch.equal(model.generate(**TOKENS, **ways), expected)


@pytest.mark.exhaustive
def test_compile_takes_the_whole_graph():
    model = llama()
    # A second block is the same again to a compiler, and takes as long.
    del model.model.layers[1:]
    with torch.no_grad():
        expected = model(**TOKENS).logits
        convert(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    compiled(**TOKENS).logits.sum().backward()
    assert model.model.norm.weight.grad is not None


def test_gradient_checkpointing_gives_the_same_gradients():
    model = llama().train()
    convert(model)
    _, expected = output(model, "Llama")
    model.activation_checkpointing_enable()
    _, found = output(model, "Llama")
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_checkpoint_goes_through_a_folder(tmp_path):
    model = llama()
    expected = model(**TOKENS).logits
    convert(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(is_normkit(module) for module in loaded.modules())
    assert torch.equal(loaded(**TOKENS).logits, expected)
    convert(loaded)
    assert torch.equal(loaded(**TOKENS).logits, model(**TOKENS).logits)


def test_weight_decay_skips_the_same_parameters():
    model = build("BERT")
    expected = get_parameter_names(model, [nn.LayerNorm])
    convert(model)
    assert get_parameter_names(model, [nn.LayerNorm]) == expected
    assert not any("LayerNorm" in name for name in expected)


def test_new_parameters_start_as_the_model_starts_them():
    model = build("Gemma3")
    convert(model)
    norm = model.norm
    nn.init.constant_(norm.weight, 7.0)
    model._init_weights(norm)
    # Gemma's gain is 1 + weight.
    assert torch.equal(norm.weight, torch.zeros(32))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_trainer_trains_it(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in TOKENS["input_ids"].repeat(4, 1)]
    losses = []
    for converted in (False, True):
        model = llama()
        if converted:
            convert(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(converted)),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_torchs_encoder_keeps_its_fast_path(norm_first):
    layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32)).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    x, padding = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = model(x), model(x, src_key_padding_mask=padding)
    report = convert(model)
    assert len(report.swapped) == 5
    assert isinstance(model.layers[0].norm1, layers.LayerNorm)
    for _ in range(2):
        with torch.no_grad():
            found = model(x), model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        # A hook ends the fast path in its layer, which then calls its norms with a nested tensor.
        model.layers[1].norm1.register_forward_hook(lambda *_: None)
    model.train()(x).sum().backward()
    assert model.layers[0].norm1.weight.grad is not None


SHARDED = """
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from normkit.conversion.replacement import is_normkit
from normkit.conversion.swapping import convert, revert


def build(converted, mesh, apart):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    if converted:
        assert convert(model).counts["swapped"] == 5
    for layer in model.model.layers:
        if apart:
            fully_shard(layer.input_layernorm, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model, seed):
    torch.manual_seed(10 * seed + distributed.get_rank())
    ids = torch.randint(0, 64, (2, 12))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
            parameter.grad = None
    return loss.detach()


def state(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def same(a, b, tolerance):
    assert list(a) == list(b)
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0.0, atol=tolerance)


distributed.init_process_group("gloo")
mesh = distributed.init_device_mesh("cpu", (2,))
for apart in (False, True):
    plain, ours = build(False, mesh, apart), build(True, mesh, apart)
    for seed in (1, 2):
        torch.testing.assert_close(step(ours, seed), step(plain, seed), rtol=1e-5, atol=0.0)
    same(state(ours), state(plain), 1e-5)
    before = state(ours)
    assert len(revert(ours)) == 5
    assert not any(is_normkit(module) for module in ours.modules())
    assert sum(isinstance(module, LlamaRMSNorm) for module in ours.modules()) == 5
    same(state(ours), before, 0.0)
    torch.testing.assert_close(step(ours, 3), step(plain, 3), rtol=1e-5, atol=0.0)
    same(state(ours), state(plain), 1e-5)
distributed.destroy_process_group()
print("sharded and back")
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_fully_shard_on_two_processes_trains_and_goes_back():
    both = forks.pair(SHARDED)
    told = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], told[0][1][-3000:]
    assert [out for out, _ in told] == ["sharded and back\n"] * 2
