"""Tiny models of transformers' families: sizes cut down by the names of the configuration's fields, all else as it is.

Nothing but sizes is changed: every eps, activation and kind of norm is what the stock configuration class gives.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from special_cases import COMPOSITIONS, INPUTS, REFUSED, SIZES

WIDTH, LAYERS, TOKENS, VOCABULARY, IMAGE = 64, 2, 12, 99, 32

# Value of the fields of these names, where a configuration has them and their default is a number or None.
_SIZES: dict[str, int] = {
    name: value
    for value, names in (
        (
            WIDTH,
            "hidden_size d_model n_embd dim embed_dim model_dim hidden_dim word_embed_proj_dim embedding_size d_embed "
            "decoder_hidden_size pooler_hidden_size emb_dim moe_intermediate_size shared_expert_intermediate_size "
            "expert_ffn_hidden_size max_position_embeddings n_positions max_seq_len max_source_positions "
            "max_target_positions",
        ),
        (
            LAYERS,
            "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
            "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers depth num_key_value_heads "
            "num_experts_per_tok moe_k moe_topk",
        ),
        (
            4,
            "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
            "num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts n_routed_experts "
            "moe_num_experts",
        ),
        (16, "head_dim d_kv attention_head_size"),
        (8, "rotary_dim qk_rope_head_dim patch_size"),
        (128, "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim d_inner ffn_hidden_size"),
        (
            VOCABULARY,
            "vocab_size src_vocab_size tgt_vocab_size n_words entity_vocab_size vocab_size_per_layer_input "
            "pronunciation_vocab_size shape_vocab_size",
        ),
        (IMAGE, "image_size"),
        (0, "pad_token_id pad_index"),
        (1, "bos_token_id n_group topk_group"),
        (2, "eos_token_id"),
    )
    for name in names.split()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model type of transformers.

    Attributes:
        name: Its `model_type`.
        class_name: The class that is built: with its language-model head, where it has one.
    """

    name: str
    class_name: str


@cache
def families() -> tuple[Family, ...]:
    """Every family that is built, by name."""
    return tuple(Family(name=name, class_name=_class_name(name)) for name in model_types() if name not in refused())


@cache
def refused() -> dict[str, str]:
    """Families that are not built, and why."""
    reasons = {name: reason for reason, names in REFUSED.items() for name in names.split()}
    for name in model_types():
        if name not in COMPOSITIONS and configuration_class(name).sub_configs:
            reasons[name] = "made of other families"
        elif configuration_class(name).model_type != name:
            reasons[name] = "has the configuration of another family"
    return dict(sorted(reasons.items()))


def default_model(family: Family) -> nn.Module:
    """The family in its full size, as its stock configuration has it, without memory for its weights."""
    with torch.device("meta"):
        return _transformers(family.class_name)(configuration_class(family.name)())


def tiny_model(family: Family) -> nn.Module:
    """The family at width 64 with 2 to 4 layers and random weights, in evaluation mode.

    What begins as 0 is made random too: a projection of zeros would hide the branch that it ends.
    """
    torch.manual_seed(0)
    model = _transformers(family.class_name)(tiny_configuration(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def tiny_configuration(family: Family) -> Any:
    """The stock configuration with its sizes cut down."""
    # A configuration writes into the dictionaries that it is given.
    return _cut(configuration_class(family.name), copy.deepcopy(SIZES.get(family.name, {})))


def epsilons(configuration: Any) -> dict[str, Any]:
    """The fields of a configuration, and of those inside it, that are named after the eps of a norm."""
    found = {}
    for field in dataclasses.fields(configuration):
        value = vars(configuration).get(field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": eps for name, eps in epsilons(value).items()}
        elif re.search(r"(norm\w*|rms)_eps", field.name):
            found[field.name] = value
    return found


def tiny_batch(family: Family, model: nn.Module) -> dict[str, Any]:
    """Random keyword arguments for a forward pass of a tiny model, one sample, without a cache."""
    generator = torch.Generator().manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    batch = {name: _input(name, shape, generator) for name, shape in _shapes(family, model).items()}
    if "decoder_input_ids" in accepted and "decoder_input_ids" not in batch:
        batch["decoder_input_ids"] = _ids((1, TOKENS - 5), generator)
    if "use_cache" in accepted:
        batch["use_cache"] = False
    return batch


def _cut(kind: Any, exceptions: dict[str, Any]) -> Any:
    """A configuration with the sizes of the table, and those of the exceptions over them."""
    defaults = vars(kind())
    fields = {field.name for field in dataclasses.fields(kind)}
    stored = {name: kind.attribute_map.get(name, name) for name in fields}
    chosen = {
        name: size
        for name, size in _SIZES.items()
        if name in fields and type(defaults.get(stored[name])) in (int, type(None))
    }
    nested = {
        name: _cut(type(defaults[name]), exceptions.get(name, {}))
        for name in kind.sub_configs
        if dataclasses.is_dataclass(defaults.get(name))
    }
    return kind(**(chosen | {"use_cache": False} | exceptions | nested))


def _shapes(family: Family, model: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each input by its name."""
    if family.name in INPUTS:
        return INPUTS[family.name]
    return {
        "input_ids": {"input_ids": (1, TOKENS)},
        "pixel_values": {"pixel_values": (1, 3, IMAGE, IMAGE)},
        "input_values": {"input_values": (1, 1200)},
        "input_features": {"input_features": (1, 64, 80)},
    }[model.main_input_name]


def _input(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("_ids"):
        return _ids(shape, generator)
    if name == "bbox":
        return torch.arange(4).expand(shape)
    return torch.randn(shape, generator=generator)


def _ids(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY - 10, shape, generator=generator)


@cache
def model_types() -> tuple[str, ...]:
    """Every model type that transformers has a class for, by name."""
    return tuple(sorted({name for mapping in _mappings() for name in mapping}))


def _class_name(name: str) -> str:
    found = next(mapping[name] for mapping in _mappings() if name in mapping)
    return found if isinstance(found, str) else found[0]


@cache
def _mappings() -> tuple[dict[str, Any], ...]:
    """From model type to class, the ones with a language-model head first."""
    from transformers.models.auto import modeling_auto

    names = (
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ",
        "MODEL_FOR_MASKED_LM",
        "MODEL_FOR_CAUSAL_LM",
        "MODEL",
    )
    return tuple(getattr(modeling_auto, f"{name}_MAPPING_NAMES") for name in names)


def configuration_class(name: str) -> Any:
    """The stock configuration class of a model type."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name]


def _transformers(name: str) -> Any:
    import transformers

    return getattr(transformers, name)
