"""Tiny models of the families that fold, with nothing in them that would hide a mistake.

Gains have both signs and one zero each, biases and embeddings have means, and no two sizes of a model are alike; or, in
the square variant, as many as can be. Weights are drawn in float64, so that a seed gives one model in every dtype.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tiny_inputs import inputs_of
from tiny_recipes import FIXED_EPS, HEADS, LAYERS, RECIPES, WIDTH, Recipe

__all__ = ["FIXED_EPS", "HEADS", "LAYERS", "RECIPES", "WIDTH", "Recipe"]

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim"), WIDTH),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv"), 12),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "encoder_ffn_dim", "hidden_dim"), 40
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "original_max_position_embeddings"), 28),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    "decoder_ffn_dim": 44,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 18,
    "max_source_positions": 20,
    "max_target_positions": 28,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
}
# Where a fused reader and its writer cannot both be square, the family says that the reader is.
_SQUARE: dict[str, Any] = {
    **{name: WIDTH for name, size in _SIZES.items() if size in (97, 40, 44, 28, 20, 18, 6)},
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv"), WIDTH // HEADS),
}
_EPS = ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "norm_eps", "norm_epsilon")


def tiny(
    family: str,
    *,
    square: bool = False,
    tied: bool | None = None,
    eps: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    class_name: str = "",
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """A model in evaluation mode, and keyword arguments for a call of it.

    Args:
        family: A key of `RECIPES`.
        square: Make matrices square that can be, the embedding among them.
        tied: Whether the head shares the embedding, one of the recipe's `ties`; None is the class's own choice.
        eps: Of every norm; see `FIXED_EPS`. None is the class's own choice.
        seed: Of all weights and inputs.
        dtype: Of the weights.
        class_name: Another class of the family than the recipe's.
        options: Further fields of the configuration; without them, nothing is dropped out.
    """
    import transformers

    recipe = RECIPES[family]
    if tied not in (None, *recipe.ties):
        raise ValueError(f"{family} cannot have tied={tied}")
    config = configuration(recipe, square=square, tied=tied, eps=eps, **options)
    class_: Any = getattr(transformers, class_name or f"{recipe.name}{recipe.head}")
    # The quicker ways of computing experts know no float64.
    model = class_._from_config(config, dtype=dtype, experts_implementation="eager").eval()
    if recipe.name == "T5" and tied is False:
        # No configuration unties it: a checkpoint does that holds both tables.
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
    if recipe.name == "GPTJ":
        # Its angles are of the dtype in which it is made, except where it is loaded.
        for made, module in zip(class_(config).modules(), model.modules(), strict=True):
            if hasattr(module, "embed_positions"):
                module.embed_positions = made.embed_positions.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    _draw(model, generator)
    if eps is not None and family in ("opt", "opt_post_norm", "whisper"):
        set_eps(model, eps)
    return model, inputs_of(model, generator)


def configuration(
    recipe: Recipe, *, square: bool = False, tied: bool | None = None, eps: float | None = None, **options: Any
) -> Any:
    """The configuration of a recipe."""
    import transformers

    kind = getattr(transformers, recipe.config or f"{recipe.name}Config")
    names = {each.name for each in dataclasses.fields(kind)} | set(recipe.options)
    sizes = {**_SIZES, **recipe.options, **({**_SQUARE, **recipe.square} if square else {})}
    values = {name: size for name, size in sizes.items() if name in names}
    values |= {name: 0.0 for name in names if "drop" in name and name not in values}
    values |= {name: eps for name in _EPS if eps is not None and name in names}
    if tied is not None:
        values["tie_word_embeddings"] = tied
    for name, inner in recipe.options.items():
        if isinstance(inner, Recipe):
            below = {key.partition(".")[2]: options.pop(key) for key in [*options] if key.startswith(f"{name}.")}
            values[name] = configuration(inner, square=square, eps=eps, **below).to_dict()
    # A configuration writes into the dictionaries that it is given.
    return kind(**copy.deepcopy({**values, **options}))


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """The norms of a model by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).__name__.endswith(("Norm", "NormGated"))
        and type(module).__name__ not in ("GroupNorm", "_WeightNorm")
        and (hasattr(module, "weight") or not list(module.children()))
    }


def gain_offset(norm: nn.Module) -> float:
    """1 for a norm that adds 1 to its stored gain."""
    name = type(norm).__name__
    return float(name.startswith("Gemma") or name in ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm"))


def set_eps(model: nn.Module, eps: float) -> None:
    """Give every norm of a model this eps."""
    for module in norms(model).values():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, eps)


def _draw(model: nn.Module, generator: torch.Generator) -> None:
    """Draw all weights, and persistent buffers of floating point, in place."""
    gains = {
        module.weight: gain_offset(module)
        for module in norms(model).values()
        if getattr(module, "weight", None) is not None
    }
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    stored = {id(value) for value in model.state_dict(keep_vars=True).values()}
    buffers = [buffer for buffer in model.buffers() if id(buffer) in stored and buffer.is_floating_point()]
    with torch.no_grad():
        for tensor in [*model.parameters(), *buffers]:
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor in gains:
                drawn = (0.5 + drawn.abs()) * torch.where(torch.rand(drawn.shape, generator=generator) < 0.25, -1, 1)
                drawn.view(-1)[torch.randint(drawn.numel(), (), generator=generator)] = 0.0
                drawn -= gains[tensor]
            elif tensor in tables or tensor.dim() != 2:
                # Rows and vectors with a mean; of three axes and more, those are tokens, patches and experts.
                drawn = 0.4 * drawn + 0.3 if tensor.dim() < 3 or 1 in tensor.shape else drawn / WIDTH**0.5
            else:
                drawn = (drawn + 0.2) / WIDTH**0.5
            tensor.copy_(drawn)
