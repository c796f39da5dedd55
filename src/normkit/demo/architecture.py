"""The two architectures: GPT-2 and Llama of transformers at one size, with normkit's layers set in.

Everything else is alike, so that what differs between the twins is the family: LayerNorm, biases,
GELU and learned positions against RMSNorm, gated MLPs and rotary positions.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.errors import InputError
from normkit.layers import LayerNorm, RMSNorm

WINDOW = 256
"""Bytes of context."""

_WIDTH, _LAYERS, _HEADS, _EPS = 64, 6, 4, 1e-5
# The families' own 0.02 suits widths near 1000; at this width it starts the blocks near zero.
_INITIAL_DEVIATION = 0.08
# 188 brings Llama's number of parameters within 0.3 % of GPT-2's.
_GATED_WIDTH = 188


def build(name: str) -> Any:
    """A freshly initialised twin, computing its norms with normkit; names of parameters stay stock.

    Args:
        name: "layernorm" or "rmsnorm".

    Returns:
        A `transformers` causal language model over the 256 byte values.

    Raises:
        InputError: If there is no such twin.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = AutoModelForCausalLM.from_config(_configuration(name))
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm):
            model.set_submodule(path, LayerNorm(module.normalized_shape, eps=module.eps))
        elif isinstance(module, LlamaRMSNorm):
            model.set_submodule(path, RMSNorm(module.weight.shape, eps=module.variance_epsilon))
    return model


def _configuration(name: str) -> Any:
    from transformers import GPT2Config, LlamaConfig

    # The byte 0 separates files, so it begins and ends a text.
    shared = {
        "vocab_size": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
        "initializer_range": _INITIAL_DEVIATION,
    }
    if name not in ("layernorm", "rmsnorm"):
        raise InputError(f"the architectures are 'layernorm' and 'rmsnorm', got {name!r}; choose one")
    if name == "layernorm":
        return GPT2Config(
            n_positions=WINDOW,
            n_embd=_WIDTH,
            n_layer=_LAYERS,
            n_head=_HEADS,
            layer_norm_epsilon=_EPS,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            **shared,
        )
    return LlamaConfig(
        max_position_embeddings=WINDOW,
        hidden_size=_WIDTH,
        intermediate_size=_GATED_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        rms_norm_eps=_EPS,
        **shared,
    )


def byte_tokenizer(window: int) -> Any:
    """A `transformers` tokenizer over the 256 byte values; any text round-trips.

    Args:
        window: The longest input of the models it is for, in bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The characters that GPT-2's byte-level tokenizer writes: printable Latin-1 stands for itself; the other bytes take
    # the code points from 256 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=window, clean_up_tokenization_spaces=False
    )
